"""What users may import, and what importing it costs."""

import subprocess
import sys
from importlib import metadata

import pytest

import lightning_snapshot

PUBLIC = [
    "PendingSnapshot",
    "RNGState",
    "ResumeState",
    "Snapshot",
    "SnapshotCallback",
    "SnapshotCheckpointIO",
    "SnapshotError",
    "StateDict",
    "__version__",
    "attach",
    "disable",
    "enable",
    "latest",
    "load_from_checkpoint",
]


def _run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_public_names_are_these() -> None:
    assert sorted(lightning_snapshot.__all__) == PUBLIC


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "__version__"])
def test_public_names_resolve_to_things_of_this_package(name: str) -> None:
    value = getattr(lightning_snapshot, name)
    assert value.__name__ == name
    assert value.__module__.split(".")[0] == "lightning_snapshot"


def test_nothing_else_is_offered() -> None:
    assert sorted(dir(lightning_snapshot)) == PUBLIC
    names = _run("from lightning_snapshot import *; print(*(name for name in globals() if name[0] != '_'))")
    assert sorted(names.split()) == [name for name in PUBLIC if not name.startswith("_")]


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="'lightning_snapshot' has no attribute 'Snapshots'"):
        lightning_snapshot.Snapshots  # noqa: B018 - looking the name up is the test
    assert not hasattr(lightning_snapshot, "import_everything")


def test_version_is_that_of_the_distribution() -> None:
    assert lightning_snapshot.__version__ == metadata.version("lightning-snapshot")


def test_importing_the_package_is_free() -> None:
    heavy = ("torch", "lightning", "lightning_fabric", "pytorch_lightning", "fsspec", "msgspec", "yaml", "xxhash")
    program = f"import sys, lightning_snapshot; print(*(name for name in {heavy!r} if name in sys.modules))"
    assert _run(program) == ""
