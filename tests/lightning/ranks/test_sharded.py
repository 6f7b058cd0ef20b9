"""Trainers whose model is spread over ranks, and snapshots that change from one layout to another."""

import json
from types import SimpleNamespace

import pytest
import torch

from tests.lightning.models import difference
from tests.lightning.ranks import layouts
from tests.ranks.processes import needs_fully_shard, run_ranks

pytestmark = pytest.mark.distributed
NAMESPACES = ["lightning", "pytorch_lightning"]

SOURCES = {1: ["plain"], 2: ["plain", "fsdp1", "fsdp2", "tp"], 3: ["fsdp2"], 4: ["2d", "hsdp"]}
"""Number of ranks → layouts that are saved."""

if needs_fully_shard.args[0]:
    SOURCES = {1: ["plain"], 2: ["plain", "fsdp1", "tp"]}

ALL = [f"{layout}-{world_size}" for world_size, several in SOURCES.items() for layout in several]
PAIRS = {
    (1, "plain"): ALL,
    (2, "plain"): ["fsdp1-2", "fsdp2-3", "2d-4"],
    (2, "fsdp1"): ["plain-1", "fsdp1-2", "fsdp2-2", "hsdp-4"],
    (2, "fsdp2"): ["plain-1", "plain-2", "fsdp1-2", "fsdp2-2", "tp-2"],
    (2, "tp"): ["plain-2", "tp-2", "2d-4"],
    (3, "fsdp2"): ["plain-1", "fsdp1-2", "fsdp2-3", "hsdp-4"],
    (4, "2d"): ["plain-1", "tp-2", "fsdp2-3", "2d-4"],
    (4, "hsdp"): ["plain-2", "fsdp1-2", "hsdp-4"],
}
"""Number of ranks and layout → snapshots that are loaded there."""
PAIRS = {
    (world_size, layout): [source for source in sources if source in ALL]
    for (world_size, layout), sources in PAIRS.items()
    if layout in SOURCES.get(world_size, ())
}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory) -> SimpleNamespace:
    """What was saved, and what became of it."""
    folder = tmp_path_factory.mktemp("matrix")
    saved, continued = {}, {}
    for world_size, several in SOURCES.items():
        saved |= run_ranks(layouts.save_each, world_size, "lightning", folder, several)[0]
    for world_size in SOURCES:
        pairs = [(source, to) for (size, to), sources in PAIRS.items() if size == world_size for source in sources]
        found = run_ranks(layouts.continue_each, world_size, "lightning", folder, pairs)[0]
        continued |= {(source, world_size, to): result for (source, to), result in found.items()}
    return SimpleNamespace(saved=saved, continued=continued)


@pytest.mark.parametrize(
    ("source", "world_size", "layout"),
    [(source, world_size, layout) for (world_size, layout), sources in PAIRS.items() for source in sources],
)
def test_any_layout_goes_on_from_any_other(matrix, source, world_size, layout):
    at_start, at_end, step = matrix.continued[source, world_size, layout]

    assert difference(at_start, matrix.saved[source]) is None
    assert step == 8
    # Layouts add up in another order.
    _, expected, _ = matrix.continued["plain-1", 1, "plain"]
    torch.testing.assert_close(at_end["tensors"], expected["tensors"], rtol=1e-4, atol=1e-6)
    assert at_end["groups"] == expected["groups"]


@needs_fully_shard
@pytest.mark.parametrize("name", NAMESPACES)
def test_several_optimizers_and_a_save_before_the_first_step(name, tmp_path):
    found = run_ranks(layouts.resume_two_optimizers, 2, name, tmp_path, "fsdp2")
    assert found == [{"from the middle": None, "from the start": None}] * 2


@pytest.mark.parametrize("layout", ["fsdp1", pytest.param("fsdp2", marks=needs_fully_shard)])
@pytest.mark.parametrize("name", NAMESPACES)
def test_evaluation_weights_stock_checkpoints_and_a_failing_rank(name, layout, tmp_path):
    run_ranks(layouts.tour, 2, name, tmp_path, layout, may_die=[0, 1])

    ranks = [json.loads((tmp_path / f"{rank}.txt").read_text()) for rank in (0, 1)]
    for found in ranks:
        assert found["evaluated"] is found["weights only"] is found["stock"] is None
        assert found["teardowns"] == 1
        assert "contains only the model" in found["fit from weights"]
        assert found["files"] == ["a.ckpt", "stock.ckpt", "weights.ckpt"]
    assert "the user's own words" in ranks[1]["error"]
    (text,) = ranks[0]["texts"]
    assert text.startswith(f"{tmp_path / 'failed.ckpt'} is not saved")
    assert not (tmp_path / "failed.ckpt").exists()
