"""Tensors that ``torch.distributed`` spreads over ranks: any mesh and placement, stored once, restored in any other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_snapshot import Snapshot, StateDict
from lightning_snapshot.errors import TargetMismatchError, UnsupportedFeatureError, UnsupportedValueError
from lightning_snapshot.options import Options
from lightning_snapshot.save import save
from lightning_snapshot.storage import open_storage
from tests.engine.strategies import bits
from tests.ranks.processes import needs_fully_shard, run_ranks

pytestmark = pytest.mark.distributed

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.uint16]


def layouts() -> dict[str, tuple[DeviceMesh, list[Any]]]:
    """Name → mesh and placements, for the ranks that there are."""
    world_size = distributed.get_world_size()
    line = init_device_mesh("cpu", (world_size,))
    found = {"rows": (line, [Shard(0)]), "columns": (line, [Shard(1)]), "everywhere": (line, [Replicate()])}
    if world_size == 4:
        grid = init_device_mesh("cpu", (2, 2))
        found |= {
            "hybrid": (grid, [Replicate(), Shard(0)]),
            "both": (grid, [Shard(0), Shard(1)]),
            "twice": (grid, [Shard(0), Shard(0)]),
        }
    return found


def spread(content: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> torch.Tensor:
    # Numbers of elements can be sent, elements of some dtypes cannot.
    numbers = distribute_tensor(torch.arange(content.numel()).reshape(content.shape), mesh, placements).to_local()
    raw = content.view(torch.uint8).reshape(content.numel(), content.itemsize)
    local = raw[numbers.flatten()].flatten().view(content.dtype).reshape(numbers.shape)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=content.shape, stride=content.stride())


def content_of(dtype: torch.dtype) -> torch.Tensor:
    """5 by 3: of 4 ranks, one gets no row and one no column."""
    return (torch.arange(15.0).reshape(5, 3) + 1).to(dtype)


def take_layouts(_: int, path: str) -> int:
    state = {
        f"{name} {dtype}": spread(content_of(dtype), *layout) for name, layout in layouts().items() for dtype in DTYPES
    }
    snapshot = Snapshot.take(path, {"s": StateDict(state)})
    return snapshot.last_save.data_bytes


def restore_layouts(rank: int, path: str, names: list[str]) -> int:
    compared = 0
    for layout in layouts().values():
        targets, expected = (
            {f"{name} {dtype}": spread(content, *layout) for name in names for dtype, content in contents.items()}
            for contents in (
                {dtype: torch.zeros(5, 3, dtype=torch.uint8).to(dtype) for dtype in DTYPES},
                {dtype: content_of(dtype) for dtype in DTYPES},
            )
        )
        Snapshot(path).restore({"s": StateDict(targets)})
        for key, target in targets.items():
            assert bits(target.to_local()) == bits(expected[key].to_local()), (key, layout)
            compared += 1
    for name in names:
        for dtype in DTYPES:
            assert bits(Snapshot(path).read_object(f"{rank}/s/{name} {dtype}")) == bits(content_of(dtype))
    return compared


@pytest.mark.parametrize("saved", [2, 4])
def test_any_layout_comes_back_in_any_other(saved: int, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    written = run_ranks(take_layouts, saved, path)
    names = ["rows", "columns", "everywhere", *(["hybrid", "both", "twice"] if saved == 4 else [])]
    content_bytes = len(names) * sum(content_of(dtype).nbytes for dtype in DTYPES)
    pieces = len(names) * len(DTYPES) * 4
    assert content_bytes <= sum(written) <= content_bytes + 64 * pieces  # for alignment
    for world_size in (1, 2, 3, 4):
        compared = run_ranks(restore_layouts, world_size, path, names)
        assert compared == [(6 if world_size == 4 else 3) * len(names) * len(DTYPES)] * world_size


def take_hybrid(_: int, path: str) -> int:
    mesh, placements = layouts()["hybrid"]
    tensors = {str(number): distribute_tensor(torch.ones(1024, 1024), mesh, placements) for number in range(4)}
    return Snapshot.take(path, {"s": StateDict(tensors)}).last_save.data_bytes


def test_replicas_of_shards_are_written_once_and_by_all(tmp_path: Path) -> None:
    written = run_ranks(take_hybrid, 4, str(tmp_path / "s"))
    total = 4 * 4 * 1024 * 1024
    assert total <= sum(written) < 1.01 * total
    assert max(written) < 1.1 * total / 4


def take_with_local_part(rank: int, path: str) -> bool:
    tensor = spread(content_of(torch.float32), *layouts()["rows"])
    local = tensor.to_local()
    assert local.data_ptr() == tensor.to_local().data_ptr()
    snapshot = Snapshot.take(path, {"s": StateDict(first=local, tensor=tensor, again=tensor)})
    found = [snapshot.read_object(f"{rank}/s/{name}") for name in ("first", "tensor", "again")]
    return all(map(torch.equal, found, [local, content_of(torch.float32), content_of(torch.float32)]))


def test_a_part_can_be_in_the_state_beside_the_whole(tmp_path: Path) -> None:
    assert run_ranks(take_with_local_part, 2, str(tmp_path / "s")) == [True, True]


# Models


class Tied(nn.Module):
    """An embedding that is the last layer as well; 5 rows do not divide by 2 or 4."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.head = nn.Linear(8, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(self.embed(tokens)).relu()))


def wrapped(seed: int, how: str, *, steps: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = Tied()
    world_size = distributed.get_world_size()
    if how == "2-D":
        mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    elif how == "1-D":
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    elif how == "hybrid":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.tensor([0, 3, 4])).square().sum().backward()
    optimizer.step()


def full(value: Any) -> Any:
    """Ordinary tensors in place of those that are spread over ranks."""
    if isinstance(value, dict):
        return {key: full(item) for key, item in value.items()}
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.clone() if isinstance(value, torch.Tensor) else value


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": full(model.state_dict()), "optimizer": full(optimizer.state_dict()["state"])}


def take_model(_: int, path: str, how: str) -> list[Any]:
    model, optimizer = wrapped(0, how)
    Snapshot.take(path, {"model": model, "optimizer": optimizer}, replicated=["optimizer/*"])
    saved = state_of(model, optimizer)
    step(model, optimizer)
    return [saved, state_of(model, optimizer)]


def restore_model(_: int, path: str, how: str, steps: int) -> list[Any]:
    model, optimizer = wrapped(1, how, steps=steps)
    Snapshot(path).restore({"model": model, "optimizer": optimizer})
    assert model.head.weight is model.embed.weight
    restored = state_of(model, optimizer)
    step(model, optimizer)
    return [restored, state_of(model, optimizer)]


def restore_with_another_dtype(_: int, path: str) -> dict[str, Any]:
    model = fully_shard(Tied().to(torch.bfloat16), mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    Snapshot(path).restore({"model": model, "optimizer": optimizer})
    restored = state_of(model, optimizer)
    step(model, optimizer)
    return restored


def converted(value: Any) -> Any:
    """To bfloat16, except for the number of steps."""
    if isinstance(value, dict):
        return {key: item if key == "step" else converted(item) for key, item in value.items()}
    return value.to(torch.bfloat16)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return torch.equal(left, right)


@needs_fully_shard
@pytest.mark.parametrize(("how", "saved"), [("1-D", 2), ("1-D", 4), ("2-D", 4), ("hybrid", 4)])
def test_models_go_on_as_if_nothing_had_been(how: str, saved: int, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    taken = run_ranks(take_model, saved, path, how)
    for steps in (1, 0):  # an optimizer that has made no step has no state to read into
        for restored, after in run_ranks(restore_model, saved, path, how, steps):
            assert same(restored, taken[0][0])
            assert same(after, taken[0][1])
    for other, world_size, steps in [("none", 1, 1), ("1-D", 2, 1), ("1-D", 3, 0), ("2-D", 4, 1)]:
        for restored, _ in run_ranks(restore_model, world_size, path, other, steps):
            assert same(restored, taken[0][0]), (other, world_size)
    for restored in run_ranks(restore_with_another_dtype, 2, path):
        assert same(restored, converted(taken[0][0]))


# FSDP 1


def flattened(seed: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that gives its state as ``ShardedTensor``s; of its 5 rows, the last rank of 4 has none."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).to(dtype)
    policy = ModuleWrapPolicy({nn.Linear})
    model = FullyShardedDataParallel(net, device_id=torch.device("cpu"), auto_wrap_policy=policy)
    configs = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *configs)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (seed + 1))
    train_flattened(model, optimizer)
    return model, optimizer


def train_flattened(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 3, dtype=next(model.parameters()).dtype)).square().sum().backward()
    optimizer.step()


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    whole = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=whole)["state"]
    return {"model": full(get_model_state_dict(model, options=whole)), "optimizer": full(state)}


def take_flattened(_: int, path: str) -> list[Any]:
    model, optimizer = flattened(0)
    state = StateDict(FullyShardedDataParallel.optim_state_dict(model, optimizer))
    assert type(state["state"]["0.weight"]["exp_avg"]) is type(model.state_dict()["0.weight"]) is ShardedTensor
    Snapshot.take(path, {"model": model, "optimizer": state}, replicated=["optimizer/*"])
    saved = whole_state(model, optimizer)
    train_flattened(model, optimizer)
    return [saved, whole_state(model, optimizer)]


def restore_flattened(_: int, path: str) -> list[Any]:
    model, optimizer = flattened(1)
    state = StateDict(FullyShardedDataParallel.optim_state_dict(model, optimizer))
    Snapshot(path).restore({"model": model, "optimizer": state})
    optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state.data))
    restored = whole_state(model, optimizer)
    train_flattened(model, optimizer)
    return [restored, whole_state(model, optimizer)]


def restore_flattened_with_another_dtype(_: int, path: str) -> Any:
    model, optimizer = flattened(1, torch.bfloat16)
    Snapshot(path).restore({"model": model})
    return whole_state(model, optimizer)["model"]


def test_sharded_tensors_of_fsdp_1_are_read_into(tmp_path: Path) -> None:
    for saved in (2, 4):
        path = str(tmp_path / str(saved))
        ((at_save, later), *_) = run_ranks(take_flattened, saved, path)
        for world_size in (2, 3, 4):
            for restored, after in run_ranks(restore_flattened, world_size, path):
                assert same(restored, at_save)
                assert saved != world_size or same(after, later)
        for found in run_ranks(restore_flattened_with_another_dtype, 4, path):
            assert same(found, converted(at_save["model"]))
        plain = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
        Snapshot(path).restore({"model": plain})
        assert same(dict(plain.state_dict()), at_save["model"])


def take_partial_sums(rank: int, path: str) -> str:
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    with pytest.raises(UnsupportedValueError) as caught:
        Snapshot.take(path, {"s": StateDict(x=tensor if rank == 1 else torch.ones(2))})
    return str(caught.value)


def test_sums_that_are_not_added_up_are_refused(tmp_path: Path) -> None:
    first, second = run_ranks(take_partial_sums, 2, str(tmp_path / "s"))
    assert second == "s/x: a DTensor with partial sums cannot be stored; redistribute it first"
    assert first == f"rank 1: {second}"
    assert not list(tmp_path.iterdir())


def restore_other_shape(_: int, path: str) -> str:
    target = distribute_tensor(torch.zeros(5, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(TargetMismatchError) as caught:
        Snapshot(path).restore({"s": StateDict({"rows torch.float32": target})})
    assert not target.full_tensor().any()
    return str(caught.value)


def save_alone(rank: int, folder: Path) -> str:
    mesh = init_device_mesh("cpu", (2,))
    state = {"m": {"w": distribute_tensor(torch.zeros(4), mesh, [Shard(0)])}}
    try:
        save(state, open_storage(folder / str(rank)), save_id="alone", options=Options())
    except UnsupportedFeatureError as error:
        return str(error)
    return ""


def test_a_rank_does_not_save_its_part_as_if_it_were_the_whole(tmp_path: Path) -> None:
    for message in run_ranks(save_alone, 2, tmp_path):
        assert message.startswith("m/w: this tensor is spread over several ranks, and only one of them saves")
    assert list(tmp_path.iterdir()) == []


def test_another_shape_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    run_ranks(take_layouts, 2, path)
    for message in run_ranks(restore_other_shape, 2, path):
        assert "s/rows torch.float32: the target has shape [5, 4], the snapshot [5, 3]" in message
