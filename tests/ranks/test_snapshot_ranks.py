"""`Snapshot` on several ranks, as processes: what is stored once, what each rank gets back, and on how many ranks."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_snapshot import RNGState, Snapshot, StateDict
from lightning_snapshot.errors import EntryNotFoundError, RankError, UnsupportedValueError
from tests.ranks.processes import run_ranks

pytestmark = pytest.mark.distributed

ROWS = torch.arange(15.0).reshape(5, 3)


@contextmanager
def logged() -> Iterator[list[str]]:
    """Warnings of the package, as they come."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]  # all it has to do
    logger = logging.getLogger("lightning_snapshot")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def trained(seed: int, rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A module in DDP, whose buffers have seen other data on each rank."""
    torch.manual_seed(seed)
    module = DistributedDataParallel(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1 * (seed + 1))
    module(torch.randn(4, 6) + rank).square().sum().backward()
    optimizer.step()
    return module, optimizer


def rows(content: torch.Tensor) -> torch.Tensor:
    """Spread over all ranks: of 5 rows, the last rank of 4 gets none."""
    return distribute_tensor(content, init_device_mesh("cpu", (distributed.get_world_size(),)), [Shard(0)])


def app_state(seed: int, rank: int, content: torch.Tensor) -> dict[str, Any]:
    module, optimizer = trained(seed, rank)
    return {
        "module": module,
        "optimizer": optimizer,
        "spread": StateDict(rows=rows(content), deeper={"rows": rows(content + 1)}),
        "progress": StateDict(epoch=seed + 7, pos=10 * rank, own=torch.full((2,), rank)),
        "random": RNGState(),
    }


REPLICATED = ["optimizer/*", "progress/epoch"]


def take(rank: int, path: str) -> dict[str, Any]:
    state = app_state(0, rank, ROWS)
    torch.manual_seed(rank)
    snapshot = Snapshot.take(path, state, replicated=REPLICATED)
    assert Snapshot(path).get_manifest() == snapshot.get_manifest()  # it is published on every rank
    module = {key: value.clone() for key, value in state["module"].state_dict().items()}
    return {
        "module": module,
        "optimizer": state["optimizer"].state_dict(),
        "random": torch.rand(3),
        "bytes": snapshot.last_save.data_bytes,
        "paths": sorted(snapshot.get_manifest()),
    }


def restore(rank: int, path: str) -> dict[str, Any]:
    state = app_state(1, rank, torch.full((5, 3), -1.0))
    places = {name: tensor.data_ptr() for name, tensor in state["module"].state_dict().items()}
    local = state["spread"]["rows"].to_local()
    found: dict[str, Any] = {}
    snapshot = Snapshot(path)
    with logged() as found["warnings"]:
        try:
            snapshot.restore({"progress": state["progress"]})
        except EntryNotFoundError as error:
            found["refused"] = str(error)
            state["progress"] = StateDict(epoch=-1)
            del state["random"]
        snapshot.restore(state)
    assert {name: tensor.data_ptr() for name, tensor in state["module"].state_dict().items()} == places
    assert state["spread"]["rows"].to_local().data_ptr() == local.data_ptr()
    return found | {
        "module": state["module"].state_dict(),
        "optimizer": state["optimizer"].state_dict(),
        "rows": [tensor.full_tensor() for tensor in (state["spread"]["rows"], state["spread"]["deeper"]["rows"])],
        "progress": dict(state["progress"]),
        "random": torch.rand(3),
        "read": [snapshot.read_object(f"{rank}/spread/rows"), snapshot.read_object(f"{rank}/progress/epoch")],
        "by key": sorted(snapshot.get_state_dict_for_key("progress")),
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    return bool(left == right)


@pytest.mark.parametrize("saved", [1, 2, 4])
def test_saved_on_some_ranks_and_restored_on_others(saved: int, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    taken = run_ranks(take, saved, path)
    parameters = [name for name, value in taken[0]["module"].items() if value.is_floating_point() and "run" not in name]
    assert saved == 1 or not same(taken[0]["module"], taken[1]["module"])  # the buffers differ
    once = [path for path in taken[0]["paths"] if path.endswith(("/module.0.weight", "/exp_avg", "/lr", "/epoch"))]
    assert {path[:2] for path in once} == {"0/"}
    assert len([path for path in taken[0]["paths"] if path.endswith("/pos")]) == saved
    for world_size in (1, 2, 3, 4):
        restored = run_ranks(restore, world_size, path)
        for rank, found in enumerate(restored):
            assert same(found["module"], taken[0]["module"]), (world_size, rank)
            assert all(same(found["module"][name], taken[-1]["module"][name]) for name in parameters)
            assert same(found["optimizer"], taken[0]["optimizer"]), (world_size, rank)
            assert all(map(torch.equal, found["rows"], [ROWS, ROWS + 1]))
            assert torch.equal(found["read"][0], ROWS)
            assert found["read"][1] == 7
            if rank < saved:
                assert same(found["progress"], {"epoch": 7, "pos": 10 * rank, "own": torch.full((2,), rank)})
                assert torch.equal(found["random"], taken[rank]["random"])
                assert found["by key"] == ["epoch", "own", "pos"]
                assert "refused" not in found
            else:
                assert found["progress"] == {"epoch": 7}
                assert "each rank had its own progress/pos, progress/own" in found["refused"]
                assert found["by key"] == ["epoch"]
        lost = [line for line in restored[0]["warnings"] if "not restored is" in line]
        assert len(lost) == (3 if saved > world_size else 0)  # progress twice, and random numbers
        assert not any(found["warnings"] for found in restored[1:])


# Which values are stored once


def take_with_different_globs(rank: int, path: str) -> tuple[list[str], list[str]]:
    values = {"all": 1, "one": torch.ones(3), "alone" if rank else "other": 2}
    with logged() as warnings:
        snapshot = Snapshot.take(path, {"s": StateDict(values)}, replicated=[["s/a*"], ["s/*"]][rank])
    return sorted(snapshot.get_manifest()), warnings


def test_what_not_all_ranks_call_replicated_is_not(tmp_path: Path) -> None:
    (paths, warnings), (paths_of_1, warnings_of_1) = run_ranks(take_with_different_globs, 2, str(tmp_path / "s"))
    assert paths == paths_of_1 == ["0/s", "0/s/all", "0/s/one", "0/s/other", "1/s", "1/s/alone", "1/s/one"]
    assert warnings == [
        "1 values, such as s/one, are replicated on some ranks only, so each rank stores its own: the globs differ"
    ]
    assert not warnings_of_1


def take_different_replicas(rank: int, path: str, values: list[Any]) -> str:
    with pytest.raises(UnsupportedValueError) as caught:
        Snapshot.take(path, {"s": StateDict(x=values[rank])}, replicated=["**"])
    assert Snapshot.take(path, {"s": StateDict(x=values[0])}, replicated=["**"]).read_object("0/s/x") is not None
    return str(caught.value)


@pytest.mark.parametrize("values", [[1, 2], [torch.ones(3), torch.ones(4)], [torch.ones(3), 1.0]])
def test_replicas_that_cannot_be_equal_are_refused(values: list[Any], tmp_path: Path) -> None:
    first, second = run_ranks(take_different_replicas, 2, str(tmp_path / "s"), values)
    assert first.startswith("s/x: marked replicated, but rank 0 has ")
    assert second == f"rank 0: {first}"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Linear(3, 2)
        self.own = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.same(x) + self.own(x)


def take_with_ignored_parameters(rank: int, path: str) -> list[str]:
    torch.manual_seed(rank)
    net = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["own.weight", "own.bias"])
    module = DistributedDataParallel(net)
    own = net.own.weight.clone()
    snapshot = Snapshot.take(path, {"m": module})
    nn.init.zeros_(net.own.weight)
    snapshot.restore({"m": module})
    assert torch.equal(net.own.weight, own)
    return sorted(snapshot.get_manifest())


def test_what_ddp_ignores_is_each_ranks_own(tmp_path: Path) -> None:
    paths, _ = run_ranks(take_with_ignored_parameters, 2, str(tmp_path / "s"))
    names = [path for path in paths if path.startswith(("0/m/", "1/m/"))]
    own = ["m/module.own.bias", "m/module.own.weight"]
    assert names == [*(f"0/{name}" for name in own), "0/m/module.same.bias", "0/m/module.same.weight"] + [
        f"1/{name}" for name in own
    ]


def take_large(rank: int, path: str) -> int:
    tensors = {str(number): torch.full((250_000 + 1000 * number,), float(number)) for number in range(12)}
    snapshot = Snapshot.take(path, {"s": StateDict(tensors)}, replicated=["**"])
    assert torch.equal(snapshot.read_object("3/s/7"), tensors["7"])
    return snapshot.last_save.data_bytes


def test_each_rank_writes_about_as_much_of_what_all_have(tmp_path: Path) -> None:
    written = run_ranks(take_large, 3, str(tmp_path / "s"))
    total = 4 * sum(250_000 + 1000 * number for number in range(12))
    assert total <= sum(written) < 1.01 * total
    assert max(written) < 1.1 * total / 3


# Ranks that do not do the same


def take_elsewhere(rank: int, folder: str) -> tuple[str, list[str], int]:
    with logged() as warnings:
        snapshot = Snapshot.take(f"{folder}/{rank}", {"s": StateDict(r=rank)})
    return snapshot.path, warnings, snapshot.read_object(f"{rank}/s/r")


def test_the_path_of_rank_0_counts(tmp_path: Path) -> None:
    results = run_ranks(take_elsewhere, 2, str(tmp_path))
    path = f"{tmp_path}/0"
    assert results == [
        (path, [], 0),
        (path, [f"rank 0 saves to {path}, so {tmp_path}/1 is not written"], 1),
    ]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["0"]


class Broken(StateDict):
    def state_dict(self) -> dict[str, Any]:
        raise ValueError("cannot say")


def take_with_broken_object(rank: int, path: str) -> tuple[str, int]:
    with pytest.raises((ValueError, RankError)) as caught:
        Snapshot.take(path, {"s": (StateDict, Broken)[rank](x=1)})
    return f"{type(caught.value).__name__}: {caught.value}", len(
        Snapshot.take(path, {"s": StateDict(x=1)}).get_manifest()
    )


def test_an_object_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(take_with_broken_object, 2, str(tmp_path / "s"))
    assert first == ("RankError: rank 1 raised ValueError: cannot say", 4)
    assert second == ("ValueError: cannot say", 4)


def take_in_subgroups(rank: int, folder: str) -> list[Any]:
    groups = [distributed.new_group([0, 2]), distributed.new_group([1, 3])]
    mine, other = groups[rank % 2], groups[1 - rank % 2]
    path = f"{folder}/{rank % 2}"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "group"))["pair"]
    state = {"s": StateDict(rank=rank, shared=rank % 2, spread=distribute_tensor(ROWS + rank % 2, mesh, [Shard(0)]))}
    Snapshot.take(path, state, pg=mine, replicated=["s/shared"])
    found = StateDict(rank=-1, shared=-1, spread=distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)]))
    snapshot = Snapshot(path, pg=mine)
    snapshot.restore({"s": found})
    with pytest.raises(RankError, match="not in the process group"):
        Snapshot(path, pg=other).restore({"s": found})
    return [found["rank"], found["shared"], found["spread"].full_tensor(), sorted(snapshot.get_manifest())]


def test_a_part_of_the_ranks(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(take_in_subgroups, 4, str(tmp_path))):
        assert found[:2] == [rank, rank % 2]
        assert torch.equal(found[2], ROWS + rank % 2)
        assert found[3] == ["0/s", "0/s/rank", "0/s/shared", "0/s/spread", "1/s", "1/s/rank", "1/s/spread"]


# Tensors spread over ranks


def restore_tables(rank: int, path: str, holders: dict[str, int]) -> list[str]:
    """Each table is on one rank, another one than at the save."""
    tables = {name: rows(torch.zeros(5, 3)) for name, holder in holders.items() if holder == rank}
    app = StateDict(kept=-1, **tables)
    Snapshot(path).restore({"s": app})
    return sorted(app)


def take_tables(rank: int, path: str) -> None:
    tables = {"a": rows(ROWS), "b": rows(ROWS + 1)}
    Snapshot.take(path, {"s": StateDict(kept=rank, **tables)})


def test_a_rank_gets_the_tables_that_it_has_now(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    run_ranks(take_tables, 2, path)
    assert run_ranks(restore_tables, 2, path, {"a": 1, "b": 0}) == [["b", "kept"], ["a", "kept"]]
    assert run_ranks(restore_tables, 1, path, {}) == [["a", "b", "kept"]]  # who has no tensor gets all
