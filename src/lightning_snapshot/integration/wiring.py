"""Giving the strategy of a Trainer or Fabric the methods with which all ranks save and load together."""

import os
from abc import ABC
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_snapshot.errors import UnsupportedFeatureError
from lightning_snapshot.integration.namespaces import modules
from lightning_snapshot.integration.plugin import SnapshotCheckpointIO
from lightning_snapshot.storage import Found, local_path, look_at

__all__ = ["StrategyMixin", "is_stock_checkpoint", "join", "plugin_of", "strategies_named"]


def plugin_of(strategy: Any) -> SnapshotCheckpointIO | None:
    """Our plugin, if the strategy has it, perhaps inside another one such as ``AsyncCheckpointIO``."""
    plugin = strategy.checkpoint_io
    while plugin is not None and not isinstance(plugin, SnapshotCheckpointIO):
        plugin = getattr(plugin, "_checkpoint_io", None)
    return plugin


class StrategyMixin(ABC):  # without ABC, the class of a strategy could not be exchanged
    """Base of what is put in front of the class of a strategy.

    Attributes:
        replaced: Names of the methods that do not call those of the strategy.
    """

    replaced: ClassVar[tuple[str, ...]]

    if TYPE_CHECKING:
        # What the strategy has, whichever distribution of Lightning it comes from.
        barrier: Any
        broadcast: Any
        load_checkpoint: Any
        optimizer_state: Any
        reduce: Any
        reduce_boolean_decision: Any
        teardown: Any

        def __getattr__(self, name: str) -> Any: ...

    @property
    def snapshots(self) -> SnapshotCheckpointIO:
        """The plugin.

        Raises:
            UnsupportedFeatureError: The strategy has another one.
        """
        plugin = plugin_of(self)
        if plugin is None:
            msg = (
                f"expected SnapshotCheckpointIO to be the checkpoint plugin, found {type(self.checkpoint_io).__name__}"
            )
            raise UnsupportedFeatureError(msg)
        return plugin


def strategies_named(family: str, *names: str) -> tuple[Any, ...]:
    """Classes of strategies, from all distributions of Lightning that are installed and have them."""
    found = (getattr(module, name, None) for module in modules(family, "strategies") for name in names)
    return tuple(cls for cls in found if isinstance(cls, type))


def join(strategy: Any, mixin: type[StrategyMixin]) -> None:
    """Put a mixin in front of the class of a strategy.

    Raises:
        UnsupportedFeatureError: The class has its own version of something that the mixin replaces.
    """
    cls: Any = type(strategy)
    if issubclass(cls, mixin):
        return
    for name in mixin.replaced:
        method = getattr(cls, name)
        if method.__module__.partition(".")[0] not in {"lightning", "lightning_fabric", "pytorch_lightning"}:
            msg = (
                f"{cls.__qualname__}.{name} would be replaced, so that all ranks save together; derive the class from "
                f"{mixin.__module__}.{mixin.__qualname__} first, and call super().{name}() there"
            )
            raise UnsupportedFeatureError(msg)
    strategy.__class__ = _joined(cls, mixin)


@lru_cache(maxsize=64)
def _joined(cls: Any, mixin: Any) -> Any:
    namespace = {"__doc__": cls.__doc__, "__module__": cls.__module__, "__reduce_ex__": _reduce}
    return type(f"Snapshot{cls.__name__}", (mixin, cls), namespace)


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    # A class that was made at run time cannot be found by its name, as a process that is spawned would have to.
    reduced: Any = super(type(self), self).__reduce_ex__(protocol)
    mixin, cls = type(self).__bases__
    return (_new, (cls, mixin), *reduced[2:])


def _new(cls: Any, mixin: Any) -> Any:
    joined = _joined(cls, mixin)
    return joined.__new__(joined)


def is_stock_checkpoint(path: str | os.PathLike[str], storage_options: Mapping[str, Any]) -> bool:
    """Whether a path leads to what Lightning's own strategies save: a file, or a folder of torch's distributed kind."""
    place = local_path(path)
    if not place:
        return look_at(path, storage_options) in (Found.FILE, Found.CHECKPOINT)
    return os.path.isfile(place) or os.path.exists(os.path.join(place, "meta.pt"))
