"""Fast, safe checkpoints for PyTorch Lightning, in torchsnapshot's format.

``Trainer(plugins=[SnapshotCheckpointIO()])`` is all that a training script needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_snapshot.errors import SnapshotError
    from lightning_snapshot.integration.callback import SnapshotCallback
    from lightning_snapshot.integration.fabric import attach
    from lightning_snapshot.integration.loading import disable, enable, load_from_checkpoint
    from lightning_snapshot.integration.plugin import SnapshotCheckpointIO
    from lightning_snapshot.integration.resume.loop import ResumeState
    from lightning_snapshot.siblings import latest
    from lightning_snapshot.snapshot import PendingSnapshot, Snapshot
    from lightning_snapshot.stateful import RNGState, StateDict

__all__ = [
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

__version__ = "0.1.0"

# Loaded at first use, so that importing the package imports neither torch nor Lightning.
_HOME = {
    "PendingSnapshot": "lightning_snapshot.snapshot",
    "RNGState": "lightning_snapshot.stateful",
    "ResumeState": "lightning_snapshot.integration.resume.loop",
    "Snapshot": "lightning_snapshot.snapshot",
    "SnapshotCallback": "lightning_snapshot.integration.callback",
    "SnapshotCheckpointIO": "lightning_snapshot.integration.plugin",
    "SnapshotError": "lightning_snapshot.errors",
    "StateDict": "lightning_snapshot.stateful",
    "attach": "lightning_snapshot.integration.fabric",
    "disable": "lightning_snapshot.integration.loading",
    "enable": "lightning_snapshot.integration.loading",
    "latest": "lightning_snapshot.siblings",
    "load_from_checkpoint": "lightning_snapshot.integration.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
