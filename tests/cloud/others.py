"""What others do in a bucket, in a process that has their packages: ``python -m tests.cloud.others PROGRAM ARGUMENTS``.

Prints what it has found as JSON.
"""

import json
import sys
from typing import Any

import fsspec
import torch

from tests.interop import states


def app_state(seed: int, state_dict: type) -> dict[str, Any]:
    """A training after a step, and a tensor of each type that torchsnapshot can write without loss."""
    module, optimizer = states.training(seed)
    tensors = {name: tensor for name, tensor in states.values()["dtypes"].items() if name != "bfloat16"}
    if seed:
        tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    nested = {"list": [seed, "é", {"deep": torch.full((3,), seed)}], "none": None}
    return {"module": module, "optimizer": optimizer, "values": state_dict(**tensors, nested=nested)}


def contents(state: dict[str, Any]) -> dict[str, Any]:
    """The state of each part, in plain containers."""
    return {key: dict(part.state_dict()) for key, part in state.items()}


def take(url: str) -> None:
    """Let torchsnapshot save."""
    import torchsnapshot

    torchsnapshot.Snapshot.take(url, app_state(0, torchsnapshot.StateDict))


def restore(out: str, *urls: str) -> None:
    """Let torchsnapshot load; writes what it finds to a file."""
    import torchsnapshot

    found = []
    for url in urls:
        state = app_state(1, torchsnapshot.StateDict)
        snapshot = torchsnapshot.Snapshot(url)
        snapshot.restore(state)
        found.append([contents(state), snapshot.read_object("0/values/int16")])
    torch.save(found, out)


def train(folder: str) -> dict[str, Any]:
    """Train twice with Lightning, which looks into the folder through s3fs, and load what was saved."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    import lightning_snapshot
    from tests.lightning.models import models

    cls = models("lightning").Tiny
    quiet = {"enable_model_summary": False, "enable_progress_bar": False, "logger": False, "num_sanity_val_steps": 0}

    def fit(max_epochs: int, ckpt_path: str | None = None, dirpath: str = folder, **how: Any) -> Any:
        trainer = Trainer(
            accelerator="cpu",
            callbacks=[ModelCheckpoint(dirpath, **how)],
            max_epochs=max_epochs,
            plugins=[lightning_snapshot.SnapshotCheckpointIO()],
            **quiet,
        )
        trainer.fit(cls(scores=(3.0, 1.0, 2.0, 0.5)), ckpt_path=ckpt_path)
        return trainer

    how = {"monitor": "score", "save_top_k": 2, "filename": "{epoch}", "save_last": True}
    fit(3, **how)
    trainer = fit(4, "last", **how)
    for _ in range(2):
        fit(2, dirpath=f"{folder}-same", filename="same", monitor="score", save_top_k=-1)
    lightning_snapshot.enable()
    loaded = cls.load_from_checkpoint(trainer.ckpt_path)
    return {
        "file system": type(fsspec.filesystem("s3")).__module__,
        "resumed at": trainer.lightning_module.trained_steps[0],
        "best": trainer.checkpoint_callback.best_model_path,
        "last": trainer.ckpt_path,
        "is loaded": torch.equal(loaded.net[0].weight, trainer.lightning_module.net[0].weight),
    }


if __name__ == "__main__":
    programs = {program.__name__: program for program in (take, restore, train)}
    print(json.dumps(programs[sys.argv[1]](*sys.argv[2:])))
