"""What the ranks of the DDP tests do. Each function runs on two ranks and returns what the tests look at."""

import errno
import os
import resource
import signal
import threading
import time
from pathlib import Path
from types import MethodType
from typing import Any

import lightning.pytorch
import pytorch_lightning
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader

from lightning_snapshot import SnapshotCallback, SnapshotCheckpointIO
from lightning_snapshot.errors import SnapshotError
from lightning_snapshot.storage import local_path
from lightning_snapshot.storage.local import LocalStorage
from tests.edges.faulty_posix import FaultyPosix
from tests.lightning.models import difference, models
from tests.lightning.ranks.worlds import heard_warnings, join_world, make_trainer, pl_of


class _Various:
    """Has what is not the same on all ranks: batch norm, a parameter that DDP leaves alone, a value of the hook."""

    def __init__(self) -> None:
        super().__init__()
        self._ddp_params_and_buffers_to_ignore = [".own"]  # how DDP calls a parameter of the outermost module
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(8, 4000), nn.BatchNorm1d(4000), nn.Linear(4000, 20), nn.Linear(20, 1))
            self.unused = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.own = nn.Parameter(torch.zeros(4))
        self.loaded: dict[str, Any] = {}
        self.first_step = -1

    def training_step(self, batch, batch_idx):
        if self.first_step < 0:
            self.first_step = self.trainer.global_step
        self.log("score", float(self.trainer.global_step))
        return self.net(batch).square().mean() + (2 * self.global_rank - 1) * self.own.sum()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return DataLoader(torch.randn(32, 8, generator=torch.Generator().manual_seed(3)), batch_size=2)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = {"rank": self.global_rank, "tensor": torch.full((3,), float(self.global_rank))}
        checkpoint["ours"] = {"tensor": torch.arange(4)}

    def on_load_checkpoint(self, checkpoint):
        self.loaded = {key: value for key, value in checkpoint.items() if key != "optimizer_states"}
        self.loaded["own moments"] = _moments(checkpoint["optimizer_states"][0], self).clone()


class LightningVarious(_Various, lightning.pytorch.LightningModule): ...


class PytorchLightningVarious(_Various, pytorch_lightning.LightningModule): ...


def _various(name: str) -> Any:
    return {"lightning": LightningVarious, "pytorch_lightning": PytorchLightningVarious}[name]()


def _moments(optimizer_state: dict[str, Any], module: nn.Module) -> torch.Tensor:
    return optimizer_state["state"][[name for name, _ in module.named_parameters()].index("own")]["exp_avg"]


def _fit(name: str, folder: Path, model: Any, ckpt_path: Any = None, **arguments: Any) -> Any:
    trainer = make_trainer(name, folder, **{"strategy": "ddp_find_unused_parameters_true", **arguments})
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer


def battery(rank: int, name: str, folder: Path) -> dict[str, Any]:
    """Train with two checkpoint callbacks and accumulation, and resume in the middle of the epoch."""
    join_world()
    checkpoint = pl_of(name).callbacks.ModelCheckpoint
    best = {"every_n_train_steps": 1, "monitor": "score", "mode": "max", "save_top_k": 2, "save_last": "link"}
    callbacks = [
        checkpoint(folder / "best", filename="{step}", **best),
        checkpoint(folder / "same", filename="same", every_n_train_steps=2, save_top_k=-1),
    ]
    model = _various(name)
    how = {"accumulate_grad_batches": 2}
    # The folder of a rank below another name would show if paths of ranks were not rank 0's.
    with heard_warnings() as warnings:
        # What ranks need not hold alike must not count as a replica that differs.
        plugins = [SnapshotCheckpointIO(check_replicas=True)]
        trainer = _fit(name, folder / str(rank), model, callbacks=callbacks, max_steps=3, plugins=plugins, **how)
        stats = trainer.strategy.checkpoint_io.last_save
        trainer.save_checkpoint(folder / str(rank) / "after.ckpt")
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    own = {"own": saved["own"], "own moments": _moments(trainer.optimizers[0].state_dict(), model).clone()}
    again = _various(name)
    resumed = _fit(name, folder / str(rank), again, folder / "best" / "last.ckpt", max_steps=4, **how)
    return {
        "bytes": stats.data_bytes,
        "folders": {each: sorted(os.listdir(folder / each)) for each in ("best", "same", "0")},
        "last": os.readlink(folder / "best" / "last.ckpt"),
        "loaded": again.loaded,
        "own": own,
        "resumed at": again.first_step,
        "saved": saved,
        "steps": resumed.global_step,
        "strategy": type(trainer.strategy).__mro__[1].__name__,
        "warnings": warnings,
    }


def exactness(rank: int, name: str, folder: Path) -> dict[str, str | None]:
    """Compare runs that were saved and resumed with ones that were not."""
    join_world()
    found = {}
    for kind, cls in (("adam", models(name).Tiny), ("zero", _with_zero(name))):
        path = folder / f"{kind}.ckpt"
        whole = _fit(name, folder, cls(), max_epochs=2)
        _fit(name, folder, cls(), max_epochs=1).save_checkpoint(path)
        resumed = _fit(name, folder, cls(seed=2), path, max_epochs=2)
        # ZeroRedundancyOptimizer has a part on each rank, and its steps show in the weights.
        states = [[each.state_dict() for each in run.optimizers if kind == "adam"] for run in (resumed, whole)]
        found[kind] = difference(_weights(resumed), _weights(whole)) or difference(*states)
    return found


def _weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.lightning_module.state_dict().items()}


def _with_zero(name: str) -> type:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

    class WithZero(models(name).Tiny):
        def configure_optimizers(self):
            return ZeroRedundancyOptimizer(self.parameters(), torch.optim.Adam, lr=0.01)

    return WithZero


def load_elsewhere(rank: int, path: Path) -> dict[str, Any]:
    """Load on another number of ranks than at the save."""
    with heard_warnings() as warnings:
        checkpoint = SnapshotCheckpointIO().load_checkpoint(path)
    return {"mine": checkpoint["mine"]["rank"], "step": checkpoint["global_step"], "warnings": warnings}


def tuner(rank: int, name: str, folder: Path) -> list[str]:
    """Let lr_find save and restore."""
    join_world()
    trainer = make_trainer(name, folder, max_epochs=2)
    finder = pl_of(name).tuner.Tuner(trainer).lr_find(models(name).Tiny(), num_training=3, update_attr=False)
    assert len(finder.results["lr"]) == 3
    distributed.barrier()  # rank 0 removes what it has saved, and in Lightning 2.4 nobody waits for that
    return os.listdir(folder)


def without_callback(rank: int, name: str, folder: Path) -> dict[str, Any]:
    """Save with nothing but the plugin."""
    import warnings

    join_world()
    trainer = make_trainer(name, folder, max_epochs=1)
    trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, SnapshotCallback)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(models(name).Tiny())
        trainer.save_checkpoint(folder / "a.ckpt")
        trainer.save_checkpoint(folder / "b.ckpt")
    texts = [str(warning.message) for warning in caught if "SnapshotCheckpointIO" in str(warning.message)]
    return {"warnings": texts, "weights": _weights(trainer)}


def replicas(rank: int, name: str, folder: Path) -> str:
    """Let a parameter of one rank differ."""
    join_world()
    trainer = _fit(name, folder, models(name).Tiny(), max_epochs=1, plugins=[SnapshotCheckpointIO(check_replicas=True)])
    trainer.save_checkpoint(folder / "equal.ckpt")
    if rank == 1:
        with torch.no_grad():
            trainer.lightning_module.net[2].bias[1] += 1
    try:
        trainer.save_checkpoint(folder / "different.ckpt")
    except SnapshotError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def full_disk(rank: int, name: str, folder: Path) -> dict[str, Any]:
    """Let rank 1 have no space at first."""
    join_world()
    trainer = _fit(name, folder, _various(name), max_steps=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    started = time.monotonic()
    try:
        trainer.save_checkpoint(folder / "a.ckpt")
        error = None
    except SnapshotError as caught:
        error = caught
    seconds = time.monotonic() - started
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    distributed.barrier()
    left = os.listdir(folder)
    distributed.barrier()
    trainer.save_checkpoint(folder / "a.ckpt")
    return {
        "errno": getattr(error, "errno", None) == errno.EFBIG,
        "left": left,
        "loads": trainer.strategy.checkpoint_io.load_checkpoint(folder / "a.ckpt")["global_step"],
        "seconds": seconds,
        "text": str(error),
    }


class SlowCheckpointIO(SnapshotCheckpointIO):
    """Writes to a disk that is slow on rank 1."""

    def _open(self, path, storage_options=None):
        def wait(*_: Any) -> None:
            time.sleep(3.0 * distributed.get_rank())

        return LocalStorage(Path(local_path(path)), str(path), FaultyPosix(before={"write": wait}))


def slow_disk(rank: int, name: str, folder: Path) -> int:
    """Write for longer than the process group's time-out."""
    join_world()
    trainer = _fit(name, folder, models(name).Tiny(), max_epochs=1, plugins=[SlowCheckpointIO()])
    trainer.save_checkpoint(folder / "a.ckpt")
    return trainer.strategy.checkpoint_io.load_checkpoint(folder / "a.ckpt")["global_step"]


class SignalledCheckpointIO(SnapshotCheckpointIO):
    """Gets a signal while it writes the checkpoint of step 2."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._pending = [number]

    def _open(self, path, storage_options=None):
        def send(*_: Any) -> None:
            while self._pending:
                signal.pthread_kill(threading.main_thread().ident, self._pending.pop())

        posix = FaultyPosix(before={"write": send} if "step=2" in str(path) else {})
        return LocalStorage(Path(local_path(path)), str(path), posix)


def signalled(rank: int, name: str, folder: Path, number: int) -> None:
    """Let a signal reach both ranks during a save."""
    join_world()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores Ctrl-C
    callbacks = [
        pl_of(name).callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1),
        pl_of(name).callbacks.OnExceptionCheckpoint(folder, "saved"),
    ]
    model = {"lightning": LightningRaising, "pytorch_lightning": PytorchLightningRaising}[name](-1)
    try:
        _fit(name, folder, model, max_epochs=2, callbacks=callbacks, plugins=[SignalledCheckpointIO(number)])
        error = "nothing"
    except BaseException as caught:  # noqa: BLE001 - whatever it is, the test has to see it
        error = repr(caught)
    (folder / f"{rank}.txt").write_text(error)
    os._exit(1)


class _Raising:
    """Fails in the second step: one rank, or all of them by a signal."""

    def __init__(self, failing: int | None) -> None:
        super().__init__()
        self.failing = failing

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = self.global_rank

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 2:
            if self.failing is None:
                os.kill(os.getpid(), signal.SIGTERM)
            elif self.failing == self.global_rank:
                raise ValueError("the user's own words")
        return super().training_step(batch, batch_idx)


class LightningRaising(_Raising, models("lightning").Tiny): ...


class PytorchLightningRaising(_Raising, models("pytorch_lightning").Tiny): ...


def one_fails(rank: int, name: str, folder: Path, failing: int | None, zero: bool = False) -> None:
    """Save when an exception ends the training. Who fails leaves at once, like a process without a net."""
    join_world()
    model = {"lightning": LightningRaising, "pytorch_lightning": PytorchLightningRaising}[name](failing)
    if zero:
        model.configure_optimizers = MethodType(_with_zero(name).configure_optimizers, model)
    checkpoint = pl_of(name).callbacks.OnExceptionCheckpoint(folder, "saved")
    trainer = make_trainer(name, folder, callbacks=[checkpoint], max_epochs=2)
    with heard_warnings() as texts:
        try:
            trainer.fit(model)
            error = "nothing"
        except BaseException as caught:  # noqa: BLE001 - whatever it is, the test has to see it
            error = repr(caught)
    (folder / f"{rank}.txt").write_text("\n".join([error, *texts]))
    if failing is not None:
        os._exit(1)
