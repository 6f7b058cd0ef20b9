"""Fabric after `attach`: all ranks save and load together."""

import pytest

from lightning_snapshot import Snapshot
from lightning_snapshot.manifest import ShardedTensorEntry
from tests.lightning.ranks import fabrics
from tests.ranks.processes import needs_fully_shard, run_ranks

pytestmark = pytest.mark.distributed
NAMESPACES = ["lightning", "pytorch_lightning"]


@pytest.mark.parametrize("layout", ["ddp", "fsdp1", pytest.param("fsdp2", marks=needs_fully_shard)])
@pytest.mark.parametrize("name", NAMESPACES)
def test_save_load_filter_strict_and_raw(name, layout, tmp_path):
    for rank, found in enumerate(run_ranks(fabrics.tour, 2, name, layout, tmp_path)):
        assert "key 'nothing'" in found.pop("strict")
        assert found == {
            "loaded": None,
            "remainder": {},
            "step": 2,
            "mine": rank,
            "takes part": True,
            "in place": True,
            "went on": None,
            "filtered": ["1.weight", "1.bias"],
            "raw": None,
        }


@needs_fully_shard
def test_a_training_is_carried_from_strategy_to_strategy(tmp_path):
    assert run_ranks(fabrics.across, 2, "lightning", tmp_path) == [[None, None, None]] * 2
    entries = Snapshot(tmp_path / "1.ckpt").get_manifest()
    assert {type(entries[f"{rank}/model/0.weight"]) for rank in (0, 1)} == {ShardedTensorEntry}


def test_a_save_on_rank_0_only_says_who_is_missing(tmp_path):
    first, second = run_ranks(fabrics.under_if, 2, "lightning", tmp_path)

    assert second == {"error": "nothing", "left": [], "warnings": []}
    assert first["left"] == []
    assert "no sign of life of rank 1 for 2 s" in first["error"]
    assert "not under `if rank == 0`" in first["warnings"][0]
