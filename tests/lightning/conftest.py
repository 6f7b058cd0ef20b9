"""Trainers and modules of either distribution."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
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
def plugin_arguments() -> dict[str, Any]:
    """Of the plugins that `make_trainer` makes; tests may say others."""
    return {}


@pytest.fixture
def make_trainer(namespace, tmp_path: Path, plugin_arguments: dict[str, Any]) -> Callable[..., Any]:
    """A quiet Trainer with the plugin. ``plugin=None`` gives Lightning's own checkpoints."""

    def make(*, plugin: Any = ..., **arguments: Any) -> Any:
        plugin = SnapshotCheckpointIO(**plugin_arguments) if plugin is ... else plugin
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


@pytest.fixture
def start_program(namespace) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts a program of ``tests/lightning/programs`` with the name of the distribution as its first argument."""
    root = Path(__file__).parents[2]
    started = []

    def start(name: str, *arguments: object) -> "subprocess.Popen[str]":
        command = [sys.executable, "-u", Path(__file__).parent / "programs" / name, namespace.name, *arguments]
        process = subprocess.Popen(
            [str(part) for part in command],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])]),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def run_program(start_program) -> Callable[..., str]:
    """Runs such a program to its end; returns what it has printed."""

    def run(name: str, *arguments: object) -> str:
        process = start_program(name, *arguments)
        output, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
        return output

    return run
