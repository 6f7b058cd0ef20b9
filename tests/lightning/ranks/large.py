"""What the ranks of `test_large` do: a model that is large enough to see what is copied, written and read."""

import gc
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytorch_lightning
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_snapshot import SnapshotCheckpointIO
from tests.lightning.ranks.worlds import join_world, make_trainer, pl_of

MIB = 1024 * 1024
MODEL_BYTES = 64 * MIB
STATE_BYTES = 2 * MODEL_BYTES  # with what the optimizer keeps
BUDGET_BYTES = 8 * MIB


class _Large:
    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout
        self.net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(MODEL_BYTES // (4 * MIB))))

    def configure_model(self) -> None:
        if self.layout == "fsdp2":
            for part in (*self.net, self.net):
                fully_shard(part, mesh=self._device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        return None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def train_dataloader(self):
        return DataLoader(torch.ones(4, 1024))

    val_dataloader = train_dataloader


class LightningLarge(_Large, lightning.pytorch.LightningModule): ...


class PytorchLightningLarge(_Large, pytorch_lightning.LightningModule): ...


def _model(name: str, layout: str) -> Any:
    return {"lightning": LightningLarge, "pytorch_lightning": PytorchLightningLarge}[name](layout)


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


class MeasuringCheckpointIO(SnapshotCheckpointIO):
    """Notes by how much the memory of the process grows for a while."""

    def __init__(self) -> None:
        super().__init__(memory_budget_bytes=BUDGET_BYTES)
        self.grown_bytes = {}

    def _measured(self, what: str, action: Any, *args: Any, **kwargs: Any) -> Any:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
        before = _status_bytes("VmRSS")
        try:
            return action(*args, **kwargs)
        finally:
            self.grown_bytes[what] = _status_bytes("VmHWM") - before

    def save_on_all_ranks(self, *args: Any, **kwargs: Any) -> None:
        self._measured("save", super().save_on_all_ranks, *args, **kwargs)

    def load_into(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._measured("load", super().load_into, *args, **kwargs)


def _trainer(name: str, folder: Path, layout: str, **arguments: Any) -> Any:
    strategy: Any = "ddp"
    if layout == "fsdp2":
        strategy = pl_of(name).strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return make_trainer(name, folder, strategy=strategy, plugins=[MeasuringCheckpointIO()], **arguments)


def save(rank: int, name: str, folder: Path, layout: str) -> dict[str, int]:
    join_world()
    trainer = _trainer(name, folder, layout, max_steps=1, limit_val_batches=0)
    trainer.fit(_model(name, layout))
    trainer.save_checkpoint(folder / "a.ckpt")
    plugin = trainer.strategy.checkpoint_io
    return {"written": plugin.last_save.data_bytes, "grown": plugin.grown_bytes["save"]}


def load(rank: int, name: str, folder: Path, layout: str) -> dict[str, int]:
    """Resume; validate; and load without a model to read into, to show that copies are seen."""
    join_world()
    found = {}
    resuming = _trainer(name, folder, layout, max_steps=1, limit_val_batches=0)
    resuming.fit(_model(name, layout), ckpt_path=folder / "a.ckpt")
    plugin = resuming.strategy.checkpoint_io
    found |= {"resume read": plugin.last_load.data_bytes, "resume grown": plugin.grown_bytes["load"]}
    evaluating = _trainer(name, folder, layout)
    evaluating.validate(_model(name, layout), ckpt_path=folder / "a.ckpt", verbose=False)
    found["validate read"] = evaluating.strategy.checkpoint_io.last_load.data_bytes
    plugin.load_into(folder / "a.ckpt", {})
    return found | {"copy grown": plugin.grown_bytes["load"]}
