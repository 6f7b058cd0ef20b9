"""Snapshots that torchsnapshot took on two and four ranks, restored by real processes on one, two and four."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_snapshot import Snapshot
from lightning_snapshot.errors import EntryNotFoundError
from tests.golden.describe import as_loaded, describe, text_of
from tests.golden.test_golden import DATA, EXPECTED, part_of_new_rank, paths_of_new_rank, token_of
from tests.ranks.processes import run_ranks

pytestmark = pytest.mark.distributed

NAMES = [name for name in EXPECTED if name.startswith(("w2-", "w4-"))]
SPREAD = ("sharded_tensor", "dtensor")


class Holder:
    """An object that keeps its state as it gets it."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def expected_of(name: str, rank: int) -> dict[str, Any]:
    """What a rank gets: what it had itself, or what is shared."""
    expected = EXPECTED[name]
    if rank < expected["world_size"]:
        return dict(expected["ranks"][rank])
    paths = paths_of_new_rank(name, rank)
    nodes = expected["ranks"][0].items()
    parts = {key: part_of_new_rank(name, node, token_of(name, key), paths) for key, node in nodes}
    return {key: part for key, part in parts.items() if part is not None}


def blank(node: Any, mesh: DeviceMesh) -> Any:
    """A state of the same structure, with other values; tensors that were spread over ranks are spread again."""
    if node["kind"] == "list":
        return [blank(item, mesh) for item in node["items"]]
    if node["kind"] in {"dict", "OrderedDict"}:
        kind = OrderedDict if node["kind"] == "OrderedDict" else dict
        return kind((key, blank(item, mesh)) for key, item in node["items"])
    if node["kind"] in SPREAD:
        tensor = torch.full(node["global_shape"], -1).to(getattr(torch, node["dtype"].removeprefix("torch.")))
        return distribute_tensor(tensor, mesh, [Shard(tensor.dim() - 1)])
    return torch.zeros(1) if node["kind"] == "tensor" else 0


def whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, list):
        return [whole(item) for item in value]
    return type(value)((key, whole(item)) for key, item in value.items()) if isinstance(value, dict) else value


def spread_in(value: Any) -> int:
    if isinstance(value, (list, dict)):
        return sum(map(spread_in, value.values() if isinstance(value, dict) else value))
    return isinstance(value, DTensor)


def kinds(node: Any) -> list[str]:
    """Of all leaves."""
    if node["kind"] in {"dict", "OrderedDict"}:
        return [kind for _, item in node["items"] for kind in kinds(item)]
    return [kind for item in node["items"] for kind in kinds(item)] if node["kind"] == "list" else [node["kind"]]


def restore(rank: int, names: list[str]) -> int:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    spread = 0
    for name in names:
        snapshot = Snapshot(DATA / name)
        shared = expected_of(name, rank)
        expected = {key: node for key, node in shared.items() if kinds(node)}
        for key in EXPECTED[name]["ranks"][0].keys() - expected.keys() if rank >= EXPECTED[name]["world_size"] else ():
            with pytest.raises(EntryNotFoundError, match=r"each rank had its own|stored .* for itself"):
                snapshot.restore({key: Holder({})})
        app_state = {key: Holder(blank(node, mesh)) for key, node in expected.items()}
        snapshot.restore(app_state)
        assert sum(map(spread_in, (holder.state for holder in app_state.values()))) == sum(
            kind in SPREAD for node in expected.values() for kind in kinds(node)
        )
        found = {key: describe(whole(holder.state)) for key, holder in app_state.items()}
        assert text_of(found) == text_of(as_loaded(expected)), name
        spread += sum(kind in SPREAD for node in expected.values() for kind in kinds(node))
    return spread


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_rank_gets_its_part(world_size: int) -> None:
    assert len(NAMES) == 15
    assert min(run_ranks(restore, world_size, NAMES)) > 30
