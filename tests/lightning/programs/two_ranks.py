"""Train and resume on two processes that Lightning starts: ``two_ranks.py NAMESPACE FOLDER``."""

import json
import sys
import warnings
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch

from lightning_snapshot import SnapshotCallback, SnapshotCheckpointIO
from tests.lightning.models import models, state_of


def main(name: str, folder: Path) -> None:
    pl = import_module({"lightning": "lightning.pytorch"}.get(name, name))

    def fit(max_epochs, ckpt_path=None):
        checkpoint = pl.callbacks.ModelCheckpoint(folder / "kept", monitor="val_loss", save_top_k=-1, save_last=True)
        trainer = pl.Trainer(
            accelerator="cpu",
            callbacks=[checkpoint, SnapshotCallback()],
            devices=2,
            enable_model_summary=False,
            enable_progress_bar=False,
            logger=False,
            max_epochs=max_epochs,
            plugins=[SnapshotCheckpointIO()],
            strategy=pl.strategies.DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=30)),
        )
        trainer.fit(models(name).Tiny(), ckpt_path=ckpt_path)
        return trainer

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(2)
        trainer = fit(3, ckpt_path=folder / "kept" / "last.ckpt")
    found = {
        "bytes": trainer.strategy.checkpoint_io.last_save.data_bytes,
        "resumed at": trainer.lightning_module.trained_steps[0],
        "warnings": [str(each.message) for each in caught if "SnapshotCheckpointIO" in str(each.message)],
    }
    rank = trainer.global_rank
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    if rank == 0:
        torch.save(state_of(trainer), folder / "final.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
