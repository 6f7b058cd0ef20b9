"""Train until Ctrl-C, while a save goes on until training has ended: ``async_train.py NAMESPACE FOLDER``."""

import signal
import sys
from importlib import import_module
from pathlib import Path

from lightning_snapshot import SnapshotCallback
from tests.lightning.gates import Gate, GatedCheckpointIO
from tests.lightning.models import models


def main(name: str, folder: Path) -> None:
    pl = import_module({"lightning": "lightning.pytorch"}.get(name, name))
    # Where the tests run in the background of a shell, it is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gate = Gate(is_open=False)

    class Tells(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 1:
                print("saving", flush=True)

        def on_exception(self, *_):
            gate.open()

    pl.Trainer(
        accelerator="cpu",
        callbacks=[
            Tells(),
            pl.callbacks.ModelCheckpoint(
                dirpath=folder / "kept", filename="{step}", every_n_train_steps=1, save_top_k=-1
            ),
            SnapshotCallback(),
        ],
        default_root_dir=folder,
        devices=1,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        max_epochs=-1,
        plugins=[GatedCheckpointIO(gate)],
    ).fit(models(name).Tiny())


main(sys.argv[1], Path(sys.argv[2]))
