"""Lightning under its two names: ``lightning`` and ``pytorch-lightning`` with ``lightning-fabric``.

The same classes exist twice, and ``isinstance`` tells them apart. Our classes derive from those of all distributions
that are installed, so one plugin works in both.
"""

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from lightning_snapshot.errors import UnsupportedFeatureError

__all__ = ["bases", "modules"]

# The same module in the one and the other distribution.
_TWINS = {
    "fabric": ("lightning.fabric", "lightning_fabric"),
    "pytorch": ("lightning.pytorch", "pytorch_lightning"),
}


def modules(family: str, name: str = "") -> Iterator[ModuleType]:
    """A module of Lightning, from each installed distribution that has it.

    Args:
        family: ``"fabric"`` or ``"pytorch"``.
        name: Name below that package, like ``"core.saving"``.
    """
    for package in _TWINS[family]:
        top = package.partition(".")[0]
        if find_spec(top) is not None and find_spec(package) is not None:
            yield import_module(f"{package}.{name}" if name else package)


def bases(family: str, module: str, name: str) -> tuple[Any, ...]:
    """A class of Lightning, from each installed distribution that has it.

    Raises:
        UnsupportedFeatureError: No distribution is installed.
    """
    found = tuple(getattr(each, name) for each in modules(family, module))
    if not found:
        msg = (
            f"expected Lightning to be installed, found neither {' nor '.join(_TWINS[family])}; install "
            "lightning-snapshot[lightning] or lightning-snapshot[pytorch-lightning]"
        )
        raise UnsupportedFeatureError(msg)
    return found
