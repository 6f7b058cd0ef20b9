"""Print how much memory two resumes take beyond the model itself, in MiB: ``resume_memory.py NAMESPACE FOLDER``.

First a plain resume, which reads into the model. Then one with a hook that may edit the checkpoint, which needs a copy:
it shows that the measurement sees one.
"""

import gc
import sys
import warnings
from importlib import import_module
from pathlib import Path

import torch

from lightning_snapshot import SnapshotCheckpointIO

MIB = 1024 * 1024
MODEL_MIB = 300


def status_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def main(name: str, folder: Path) -> None:
    pl = import_module({"lightning": "lightning.pytorch"}.get(name, name))

    class Model(pl.LightningModule):
        def __init__(self, value: float) -> None:
            super().__init__()
            # Several tensors, so that a copy of one at a time would not be noticed, but one of all would.
            self.parts = torch.nn.ParameterList(torch.full((MODEL_MIB // 10, MIB // 4), value) for _ in range(10))

        def training_step(self, batch, batch_idx): ...

        def train_dataloader(self):
            return torch.utils.data.DataLoader([0])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Edits(Model):
        def on_load_checkpoint(self, checkpoint):
            checkpoint["state_dict"]["parts.0"].add_(1)

    def trainer():
        return pl.Trainer(
            accelerator="cpu",
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            logger=False,
            max_steps=0,
            plugins=[SnapshotCheckpointIO()],
        )

    model = Model(1.0)
    first = trainer()
    first.fit(model)
    first.save_checkpoint(folder / "a.ckpt")
    with torch.no_grad():
        for part in model.parts:
            part.zero_()
    gc.collect()

    base = status_mib("VmRSS")
    trainer().fit(model, ckpt_path=folder / "a.ckpt")
    assert all((part == 1).all() for part in model.parts)
    print(status_mib("VmHWM") - base)

    model.__class__ = Edits
    base = status_mib("VmRSS")
    trainer().fit(model, ckpt_path=folder / "a.ckpt")
    assert (model.parts[0] == 2).all()
    assert (model.parts[1] == 1).all()
    print(status_mib("VmHWM") - base)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], Path(sys.argv[2]))
