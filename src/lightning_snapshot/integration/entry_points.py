"""What Lightning calls for every Trainer of the environment, whether or not its program knows this package.

So this module imports nothing.
"""

import sys
from typing import Any

__all__ = ["callbacks"]


def callbacks() -> list[Any]:
    """``[SnapshotCallback()]`` if the program uses `SnapshotCheckpointIO`, else nothing."""
    if "lightning_snapshot.integration.plugin" not in sys.modules:
        return []
    return [sys.modules["lightning_snapshot"].SnapshotCallback()]
