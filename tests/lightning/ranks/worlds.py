"""What runs inside the ranks of `tests.ranks.processes.run_ranks`: Trainers that find the process group made."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytorch_lightning  # noqa: F401 - imported once, by the server that ranks are forked from
import torch
from torch import distributed

from lightning_snapshot import SnapshotCallback, SnapshotCheckpointIO
from tests.ranks.processes import tell_stacks


def pl_of(name: str) -> Any:
    return {"lightning": lightning.pytorch}.get(name) or import_module(name)


def fabric_of(name: str) -> Any:
    return import_module({"lightning": "lightning.fabric"}.get(name, "lightning_fabric"))


def join_world() -> tuple[int, int]:
    """Let Lightning find this process's place among the ranks, as torchrun would tell it."""
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "tests",
        "GROUP_RANK": "0",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return rank, world_size


def make_trainer(name: str, folder: Path, **arguments: Any) -> Any:
    """A quiet Trainer with the plugin, over all ranks."""
    tell_stacks()
    defaults = {
        "accelerator": "cpu",
        "callbacks": [],
        "default_root_dir": folder,
        "devices": distributed.get_world_size(),
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "logger": False,
        "num_sanity_val_steps": 0,
        "plugins": [SnapshotCheckpointIO()],
        "strategy": "ddp",
    }
    arguments = defaults | arguments
    if any(isinstance(callback, pl_of(name).callbacks.Checkpoint) for callback in arguments["callbacks"]):
        arguments["enable_checkpointing"] = True
    # Harmless where the entry point has added it.
    arguments["callbacks"] = [*arguments["callbacks"], SnapshotCallback()]
    return pl_of(name).Trainer(**arguments)


@contextmanager
def heard_warnings() -> Iterator[list[str]]:
    """What our log says meanwhile, from warnings on."""
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger = logging.getLogger("lightning_snapshot")
    handler = Handler(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
