"""Trainers and modules of either distribution."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_snapshot import SnapshotCheckpointIO
from tests.lightning.models import models


@pytest.fixture
def cls(namespace) -> SimpleNamespace:
    """The modules of `tests.lightning.models` in the distribution of ``namespace``."""
    return models(namespace.name)


@pytest.fixture
def make_trainer(namespace, tmp_path: Path) -> Callable[..., Any]:
    """A quiet Trainer with the plugin. ``plugin=None`` gives Lightning's own checkpoints."""

    def make(*, plugin: Any = ..., **arguments: Any) -> Any:
        plugin = SnapshotCheckpointIO() if plugin is ... else plugin
        defaults = {
            "accelerator": "cpu",
            "devices": 1,
            "default_root_dir": tmp_path,
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "logger": False,
            "num_sanity_val_steps": 0,
            "plugins": [] if plugin is None else [plugin],
        }
        return namespace.pl.Trainer(**{**defaults, **arguments})

    return make


@pytest.fixture
def make_fabric(namespace) -> Callable[..., Any]:
    """A Fabric with the plugin."""

    def make(**arguments: Any) -> Any:
        return namespace.fabric.Fabric(accelerator="cpu", devices=1, plugins=[SnapshotCheckpointIO(**arguments)])

    return make
