"""What the ranks of the tests of saves behind training do. Each function runs on two ranks."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from lightning_snapshot import Snapshot, SnapshotCheckpointIO, StateDict, attach
from lightning_snapshot.errors import SnapshotError
from tests.lightning.gates import PATIENCE_SECONDS, Gate, GatedCheckpointIO
from tests.lightning.models import difference, models
from tests.lightning.ranks.layouts import module, trainer_for, whole_state
from tests.lightning.ranks.worlds import fabric_of, join_world, make_trainer, pl_of


def training(rank: int, name: str, folder: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """Save after each step, the best two and the last, and go on from there."""
    join_world()
    checkpoint = pl_of(name).callbacks.ModelCheckpoint(
        folder / "kept", filename="{step}", every_n_train_steps=1, save_top_k=1, save_last=True
    )
    plugin = SnapshotCheckpointIO(**arguments)
    model = models(name).Tiny()
    trainer = make_trainer(name, folder, callbacks=[checkpoint], max_steps=6, max_epochs=9, plugins=[plugin])
    trainer.fit(model)
    distributed.barrier()
    again = models(name).Tiny(seed=2)
    resumed = make_trainer(name, folder, max_steps=8, max_epochs=9)
    resumed.fit(again, ckpt_path=folder / "kept" / "last.ckpt")
    saved = Snapshot(folder / "kept" / "step=6.ckpt").get_state_dict_for_key("state_dict")
    return {
        "names": sorted(os.listdir(folder / "kept")),
        "best": os.path.basename(checkpoint.best_model_path),
        "steps": again.trained_steps,
        "weight": saved["net.0.weight"].clone(),
        "expected": model.net[0].weight.detach().clone(),
        "stall": plugin.last_save.stall_seconds < plugin.last_save.seconds,
    }


def sharded(rank: int, name: str, folder: Path, arguments: dict[str, Any]) -> str | None:
    """Train on while the save of what is spread over the ranks stands still; says in what it differs from the state."""
    join_world()
    gate = Gate(is_open=False)
    expected: dict[str, Any] = {}
    behind = []

    class Saves(pl_of(name).Callback):
        def on_train_batch_start(self, trainer, *_):
            behind.append(trainer.strategy.checkpoint_io.behind.pending is not None)
            if trainer.global_step == 3:
                gate.open()

        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 1:
                expected.update(whole_state(trainer)["tensors"])
                trainer.save_checkpoint(folder / "s.ckpt")

    trainer = trainer_for(
        name, folder, "fsdp2", max_epochs=1, callbacks=[Saves()], plugins=[GatedCheckpointIO(gate, **arguments)]
    )
    trainer.fit(module(name, "fsdp2"))
    assert behind == [False, True, True, True], behind
    distributed.barrier()
    loaded = SnapshotCheckpointIO().load_checkpoint(folder / "s.ckpt")
    found = {("model", key): value for key, value in loaded["state_dict"].items()}
    for key, state in loaded["optimizer_states"][0]["state"].items():
        found |= {("optimizer 0", key, each): value for each, value in state.items()}
    return difference(dict(sorted(found.items())), expected)


def _fabric(name: str, plugin: SnapshotCheckpointIO) -> Any:
    fabric = fabric_of(name).Fabric(accelerator="cpu", devices=distributed.get_world_size(), strategy="ddp")
    attach(fabric, plugin)
    fabric.launch()
    return fabric


def one_rank_fails(rank: int, name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """The first save fails on rank 1; the second one, to the same path, does not."""
    join_world()
    plugin = GatedCheckpointIO(Gate(failing={1} if rank == 1 else ()), rank_timeout_seconds=PATIENCE_SECONDS)
    fabric = _fabric(name, plugin)
    state = {"w": torch.full((300_000,), rank)}  # of its own on each rank, so that each writes
    fabric.save(folder / "s", state)
    try:
        plugin.wait()
        error = "none"
    except SnapshotError as caught:
        error = f"{type(caught).__name__}: {caught}"
    distributed.barrier()
    fabric.save(folder / "s", state)
    plugin.wait()
    return error, plugin.load_checkpoint(folder / "s")


def one_rank_cannot_remove(rank: int, name: str, folder: Path) -> tuple[str, list[str], int]:
    """A removal behind a save fails, of which rank 0 alone knows; the save after the next one succeeds."""
    join_world()
    gate = Gate(is_open=False)
    plugin = GatedCheckpointIO(gate)
    fabric = _fabric(name, plugin)
    fabric.save(folder / "a", {"n": 1})
    if rank == 0:
        (folder / "foreign").mkdir()
        (folder / "foreign" / "notes.txt").touch()
        plugin.remove_checkpoint(folder / "foreign")
    gate.open()
    try:
        fabric.save(folder / "b", {"n": 2})
        error = "none"
    except SnapshotError as caught:
        error = f"{type(caught).__name__}: {caught}"
    fabric.save(folder / "c", {"n": 3})
    plugin.wait()
    distributed.barrier()
    return error, sorted(os.listdir(folder)), plugin.load_checkpoint(folder / "c")["n"]


def collectives_meanwhile(rank: int, name: str, folder: Path) -> list[int]:
    """Saves go on while training talks; a second one waits for the first."""
    join_world()
    gate = Gate(is_open=False)
    plugin = GatedCheckpointIO(gate)
    fabric = _fabric(name, plugin)
    fabric.save(folder / "s", {"w": torch.zeros(1000), "n": 1})
    found = torch.zeros(1)
    for _ in range(200):
        distributed.all_reduce(found.add_(1))
        distributed.barrier()
    gate.open()
    for number in (2, 3):
        fabric.save(folder / "s", {"w": torch.zeros(1000), "n": number})
        fabric.save(folder / "t", {"w": torch.zeros(1000), "n": number})
    plugin.wait()
    distributed.barrier()
    return [plugin.load_checkpoint(folder / each)["n"] for each in "st"]


def skipping(rank: int, name: str, folder: Path) -> list[str]:
    """Only rank 1's part of a save stands still, and yet both ranks skip the next one."""
    join_world()
    gate = Gate(is_open=rank == 0)
    plugin = GatedCheckpointIO(gate, on_busy="skip")
    fabric = _fabric(name, plugin)
    state = {"w": torch.full((1000,), rank), "n": 1}  # of its own on each rank, so that each writes
    fabric.save(folder / "a", state)
    fabric.save(folder / "b", state)
    gate.open()
    plugin.wait()
    fabric.save(folder / "c", state)
    plugin.wait()
    distributed.barrier()
    return sorted(os.listdir(folder))


def taking(rank: int, folder: Path) -> tuple[list[Any], bool]:
    """`Snapshot.async_take` on all ranks, twice."""
    state = StateDict(w=torch.full((3_000_000,), rank), n=rank)
    first = Snapshot.async_take(folder / "s", {"a": state})
    state["w"].fill_(7)
    state["n"] = 7
    second = Snapshot.async_take(folder / "t", {"a": state})
    first_is_done = first.done()
    distributed.barrier()
    found = []
    for pending in (first, second):
        loaded = StateDict(w=torch.zeros(3_000_000, dtype=torch.int64), n=-1)
        pending.wait().restore({"a": loaded})
        found.append((int(loaded["w"].min()), int(loaded["w"].max()), loaded["n"]))
    return found, first_is_done
