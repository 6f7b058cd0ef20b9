"""What ranks do in a bucket."""

import os
import tempfile
from pathlib import Path

import torch

from lightning_snapshot import Snapshot, SnapshotCheckpointIO, StateDict
from lightning_snapshot.errors import SnapshotError
from lightning_snapshot.storage import open_storage
from tests.lightning.ranks.replicated import _various
from tests.lightning.ranks.worlds import join_world, make_trainer, pl_of


def take_and_restore(rank, url, options):
    """Each rank saves its own part, twice over; whether both get theirs back."""
    for factor in (1, 2):
        state = StateDict(mine=torch.full((300,), float(rank * factor)), step=factor)
        Snapshot.take(url, {"app": state}, storage_options=options)
    state = StateDict(mine=torch.zeros(300), step=0)
    Snapshot(url, storage_options=options).restore({"app": state})
    return bool((state["mine"] == rank * 2).all()) and state["step"] == 2


def fail_to_take(rank, url, options):
    """The error that a rank gets."""
    try:
        Snapshot.take(url, {"app": StateDict(x=torch.ones(3))}, storage_options=options)
    except SnapshotError as error:
        return str(error)
    return ""


def train_and_resume(rank, name, url, environment):
    """Train for an epoch, then resume from the last checkpoint for another one; the first step of that."""
    join_world()
    os.environ.update(environment)
    first_step = -1
    for max_epochs in (1, 2):
        checkpoint = pl_of(name).callbacks.ModelCheckpoint(url, save_last=True, save_top_k=-1)
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(
                name,
                Path(folder),
                max_epochs=max_epochs,
                callbacks=[checkpoint],
                plugins=[SnapshotCheckpointIO()],
                strategy="ddp_find_unused_parameters_true",
            )
            model = _various(name)
            trainer.fit(model, ckpt_path="last" if max_epochs > 1 else None)
            first_step = model.first_step
    return first_step


def fail_to_link(rank, name, url, environment):
    """Train where something else is in the place of the last checkpoint; the error that a rank gets."""
    join_world()
    os.environ.update(environment)
    if rank == 0:
        place = open_storage(f"{url}/checkpoints/last.ckpt").place
        place.bucket.put(place.key("somebody's.txt"), b"text")
    checkpoint = pl_of(name).callbacks.ModelCheckpoint(save_last="link", enable_version_counter=False)
    how = {"callbacks": [checkpoint], "max_epochs": 1, "strategy": "ddp_find_unused_parameters_true"}
    trainer = make_trainer(name, url, **how)
    try:
        trainer.fit(_various(name))
    except SnapshotError as error:
        return str(error)
    return ""
