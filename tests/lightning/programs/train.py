"""Train, from ``last.ckpt`` if there is one: ``train.py NAMESPACE FOLDER EPOCHS``.

Prints each step and writes the final state. The test kills it somewhere, most likely while it saves: saves are large
here and steps are small.
"""

import sys
import warnings
from importlib import import_module
from pathlib import Path

import torch

from lightning_snapshot import SnapshotCheckpointIO
from tests.lightning.models import models, state_of

HIDDEN = 50_000


def main(name: str, folder: Path, max_epochs: int) -> None:
    pl = import_module({"lightning": "lightning.pytorch"}.get(name, name))

    class Prints(pl.Callback):
        def on_train_batch_start(self, trainer, *_):
            print("step", trainer.global_step)

    checkpoint = pl.callbacks.ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=[checkpoint, Prints()],
        default_root_dir=folder,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        max_epochs=max_epochs,
        plugins=[SnapshotCheckpointIO()],
    )
    trainer.fit(models(name).Tiny(hidden=HIDDEN), ckpt_path="last")
    torch.save(state_of(trainer), folder / "final.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
