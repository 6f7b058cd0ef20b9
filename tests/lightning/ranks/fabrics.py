"""What the ranks of the Fabric tests do. Each function runs on two ranks and returns what the tests look at."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from lightning_snapshot import SnapshotCheckpointIO, attach
from lightning_snapshot.errors import SnapshotError
from tests.lightning.models import difference
from tests.lightning.ranks.worlds import fabric_of, heard_warnings, join_world


def _strategy(name: str, layout: str) -> Any:
    strategies = fabric_of(name).strategies
    if layout == "ddp":
        return "ddp"
    if layout == "fsdp2":

        def spread(model: nn.Module, mesh: Any) -> nn.Module:
            for part in (*model, model):
                fully_shard(part, mesh=mesh["data_parallel"])
            return model

        return strategies.ModelParallelStrategy(spread, data_parallel_size=2, tensor_parallel_size=1)

    class FSDPOnCPU(strategies.FSDPStrategy):
        def setup_module(self, module: nn.Module) -> nn.Module:
            return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **self._fsdp_kwargs)

    return FSDPOnCPU(auto_wrap_policy={nn.Linear})


class WatchedCheckpointIO(SnapshotCheckpointIO):
    """Keeps what it has loaded."""

    def load_into(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        content = super().load_into(*args, **kwargs)
        self.loaded = dict(content)
        return content


def _address(tensor: torch.Tensor) -> int:
    return getattr(tensor, "_local_tensor", tensor).data_ptr()


def _make(name: str, layout: str, plugin: SnapshotCheckpointIO | None = None) -> Any:
    given = [SnapshotCheckpointIO()] if layout == "ddp" else []
    fabric = fabric_of(name).Fabric(accelerator="cpu", devices=2, strategy=_strategy(name, layout), plugins=given)
    attach(fabric, plugin)
    fabric.launch()
    return fabric


def _training(fabric: Any, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters(), lr=0.01))
    return {"model": model, "optimizer": optimizer, "step": 0, "mine": -1}


def _train(fabric: Any, state: dict[str, Any], steps: int) -> None:
    for _ in range(steps):
        generator = torch.Generator().manual_seed(state["step"])
        state["optimizer"].zero_grad()
        fabric.backward(state["model"](torch.randn(4, 3, generator=generator)).square().mean())
        state["optimizer"].step()
        state["step"] += 1


def _weights(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = state["model"]._forward_module
    return {
        name: value.clone()
        for name, value in get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)).items()
    }


def tour(rank: int, name: str, layout: str, folder: Path) -> dict[str, Any]:
    """Save, go on, and do the same again from what was saved; then everything else that Fabric can do."""
    join_world()
    plugin = WatchedCheckpointIO()
    fabric = _make(name, layout, plugin)
    state = _training(fabric, 1)
    _train(fabric, state, 2)
    state["mine"] = rank
    fabric.save(folder / "a.ckpt", state)
    saved = _weights(state)
    _train(fabric, state, 2)

    resumed = _training(fabric, 2)
    remainder = fabric.load(folder / "a.ckpt", resumed)
    found = {
        "loaded": difference(_weights(resumed), saved),
        "remainder": remainder,
        "step": resumed["step"],
        "mine": resumed["mine"],
        "takes part": plugin.last_save.data_bytes > 0,
        # FSDP 1 gives copies of its parameters away.
        "in place": layout == "fsdp1"
        or _address(plugin.loaded["model"]["1.weight"]) == _address(resumed["model"].state_dict()["1.weight"]),
    }
    _train(fabric, resumed, 2)
    found["went on"] = difference(_weights(resumed), _weights(state))

    fabric.save(folder / "a.ckpt", {"model": state["model"]}, filter={"model": lambda key, _: key.startswith("1.")})
    found["filtered"] = list(fabric.load(folder / "a.ckpt")["model"])
    found["strict"] = _error_of(lambda: fabric.load(folder / "a.ckpt", {"nothing": 0}), KeyError)
    fabric.load(folder / "a.ckpt", {"nothing": 0}, strict=False)

    raw = {key: value + 1 for key, value in saved.items()}
    if rank == 0:
        SnapshotCheckpointIO().save_checkpoint(raw, folder / "raw.ckpt")
    fabric.barrier()
    fabric.load_raw(folder / "raw.ckpt", state["model"])
    found["raw"] = difference(_weights(state), raw)
    return found


def save_and_load(fabric: Any, path: Path) -> None:
    """What each rank that Fabric itself starts does."""
    torch.manual_seed(1)
    model = fabric.setup_module(nn.Linear(3, 5))
    expected = model.weight.detach().clone()
    fabric.save(path, {"model": model, "mine": fabric.global_rank})
    nn.init.zeros_(model.weight)
    state = {"model": model, "mine": -1}
    fabric.load(path, state)
    assert torch.equal(model.weight, expected)
    assert state["mine"] == fabric.global_rank


def _error_of(action: Callable[[], Any], kind: type[Exception]) -> str:
    try:
        action()
    except kind as error:
        return str(error)
    return "nothing"


def across(rank: int, name: str, folder: Path) -> list[str | None]:
    """Carry a training from DDP over FSDP2 and FSDP1 back to DDP."""
    join_world()
    found = []
    reference: dict[str, Any] = {}
    for number, layout in enumerate(["ddp", "fsdp2", "fsdp1", "ddp"]):
        fabric = _make(name, layout)
        state = _training(fabric, number)
        if number:
            fabric.load(folder / f"{number - 1}.ckpt", state)
            found.append(difference(_weights(state), reference))
        _train(fabric, state, 1)
        fabric.save(folder / f"{number}.ckpt", state)
        reference = _weights(state)
    return found


def under_if(rank: int, name: str, folder: Path) -> dict[str, Any]:
    """Save on rank 0 only."""
    join_world()
    fabric = _make(name, "ddp", SnapshotCheckpointIO(rank_timeout_seconds=2.0))
    state = _training(fabric, 1)
    with heard_warnings() as warnings:
        text = _error_of(lambda: rank or fabric.save(folder / "a.ckpt", state), SnapshotError)
    distributed.barrier()
    return {"error": text, "left": os.listdir(folder), "warnings": warnings}
