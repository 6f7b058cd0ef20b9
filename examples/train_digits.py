"""Train a small CNN on scikit-learn's handwritten digits: ``train_digits.py FOLDER``.

If FOLDER holds the snapshots of a run that was interrupted, this run goes on where that one stopped.
"""

import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_snapshot import SnapshotCheckpointIO

warnings.filterwarnings("ignore", ".*(does not have many workers|no last checkpoint available|exists and is not empty)")


class DigitsCNN(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, kernel_size=3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10)),
        )

    def training_step(self, batch, batch_idx):
        images, digits = batch
        return cross_entropy(self.net(images), digits)

    def validation_step(self, batch, batch_idx):
        images, digits = batch
        guesses = self.net(images)
        self.log("val_loss", cross_entropy(guesses, digits))
        self.log("val_accuracy", (guesses.argmax(dim=1) == digits).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)]


class Progress(Callback):
    """Says what happens, one line per epoch."""

    def on_train_start(self, trainer, model):
        self.first_step = trainer.global_step
        verb = "resumes" if self.first_step else "starts"
        print(f"{verb} at step {self.first_step} of {trainer.estimated_stepping_batches}")

    def on_validation_epoch_end(self, trainer, model):
        loss, accuracy = (trainer.callback_metrics[name] for name in ("val_loss", "val_accuracy"))
        step = trainer.global_step
        print(f"epoch {trainer.current_epoch:2}   step {step:3}   val_loss {loss:.4f}   val_accuracy {accuracy:.1%}")

    def on_train_end(self, trainer, model):
        print(f"ends at step {trainer.global_step} after {trainer.global_step - self.first_step} steps")


def loaders():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    everything = TensorDataset(images, torch.tensor(digits.target))
    training, validation = random_split(everything, [0.8, 0.2], torch.Generator().manual_seed(0))
    # This version does not restore random states yet, so the order of the images must not depend on one.
    return DataLoader(training, batch_size=32, shuffle=False), DataLoader(validation, batch_size=128)


def main(folder):
    seed_everything(0)
    checkpoint = ModelCheckpoint(folder / "checkpoints", monitor="val_loss", save_top_k=2, save_last=True)
    trainer = Trainer(
        max_epochs=12,
        accelerator="cpu",
        deterministic=True,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        callbacks=[checkpoint, Progress()],
        plugins=[SnapshotCheckpointIO()],  # ← all that this project asks of a training script
    )
    trainer.fit(DigitsCNN(), *loaders(), ckpt_path="last")
    trainer.save_checkpoint(folder / "final.ckpt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
