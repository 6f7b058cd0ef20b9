"""Snapshots where Lightning itself opens checkpoint files, without asking the plugin.

``load_from_checkpoint`` of modules and data modules, and ``LightningCLI`` with ``--ckpt_path``, read the path that they
are given with ``torch.load``. `enable` makes them understand snapshots, too. Without it, `load_from_checkpoint` does so
for one call, and `SnapshotCLIMixin` for one command line.
"""

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lightning_snapshot.integration.namespaces import modules
from lightning_snapshot.integration.plugin import SnapshotCheckpointIO
from lightning_snapshot.snapshot import Snapshot
from lightning_snapshot.storage import Found, local_path, look_at, open_storage

__all__ = ["SnapshotCLIMixin", "disable", "enable", "load_from_checkpoint"]

_T = TypeVar("_T")
# Where stock checkpoint files may be, but no snapshot.
_WEB = ("http:", "https:")
_lock = threading.RLock()
_replaced: list[tuple[Any, str, Any]] = []


def enable(*, trusted: bool = False, storage_options: dict[str, Any] | None = None) -> None:
    """Let Lightning open snapshots wherever it opens checkpoint files, in all installed distributions.

    Replaces two functions inside Lightning: the one with which ``load_from_checkpoint`` opens a path, and the one with
    which ``LightningCLI`` takes hyperparameters from ``--ckpt_path``. What is no snapshot goes to the originals.
    Calling it again only changes the arguments. `disable` puts the originals back.

    Args:
        trusted: Let stored objects run their own code when they are loaded.
        storage_options: Passed to the storage.
    """
    with _lock:
        disable()
        _replace_loader(SnapshotCheckpointIO(trusted=trusted, storage_options=storage_options))
        for cli in modules("pytorch", "cli"):
            # Older versions do not take hyperparameters from a checkpoint at all.
            original = getattr(cli.LightningCLI, "_parse_ckpt_path", None)
            if original is not None:
                _replace(cli.LightningCLI, "_parse_ckpt_path", _snapshot_aware_parser(original))


def disable() -> None:
    """Take `enable` back. Harmless without it."""
    with _lock:
        while _replaced:
            owner, name, value = _replaced.pop()
            setattr(owner, name, value)


def load_from_checkpoint(
    cls: type[_T],
    checkpoint_path: str | os.PathLike[str],
    *,
    trusted: bool = False,
    storage_options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> _T:
    """``cls.load_from_checkpoint`` for a snapshot or a stock checkpoint file.

    Args:
        cls: A ``LightningModule`` or ``LightningDataModule`` of any distribution.
        checkpoint_path: Folder or file; a path or URL.
        trusted: Let stored objects run their own code when they are loaded.
        storage_options: Passed to the storage.
        **kwargs: As for ``cls.load_from_checkpoint``: ``map_location``, ``hparams_file``, ``strict``,
            ``weights_only``, and arguments that replace stored hyperparameters.

    Raises:
        SnapshotNotFoundError: There is nothing at the path.
        DataError: The snapshot is damaged.
        UnsafeObjectError: A value needs code that is not known to be safe.
    """
    with _lock:
        before = list(_replaced)
        _replace_loader(SnapshotCheckpointIO(trusted=trusted, storage_options=storage_options))
        try:
            return cls.load_from_checkpoint(checkpoint_path, **kwargs)  # type: ignore[attr-defined,no-any-return]  # any distribution's class
        finally:
            while len(_replaced) > len(before):
                owner, name, value = _replaced.pop()
                setattr(owner, name, value)


class SnapshotCLIMixin:
    """Makes ``--ckpt_path`` restore hyperparameters from a snapshot, too. Put it before ``LightningCLI``.

    ::

        class CLI(SnapshotCLIMixin, LightningCLI): ...
    """

    def _parse_ckpt_path(self) -> None:
        if not _take_hyperparameters(self):
            super()._parse_ckpt_path()  # type: ignore[misc]  # LightningCLI is the next class in line


def _replace(owner: Any, name: str, value: Any) -> None:
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def _replace_loader(plugin: SnapshotCheckpointIO) -> None:
    for saving in modules("pytorch", "core.saving"):
        _replace(saving, "pl_load", _snapshot_aware_loader(saving.pl_load, plugin))


def _snapshot_aware_loader(original: Callable[..., Any], plugin: SnapshotCheckpointIO) -> Callable[..., Any]:
    def load(
        path_or_url: Any,
        map_location: Any = None,
        weights_only: bool | None = None,  # noqa: FBT001  # as the original
    ) -> Any:
        if isinstance(path_or_url, (str, os.PathLike)) and _may_be_snapshot(path_or_url, plugin.storage_options):
            return plugin.load_checkpoint(path_or_url, map_location, weights_only)
        # Lightning before 2.6 has no such argument.
        chosen = {} if weights_only is None else {"weights_only": weights_only}
        return original(path_or_url, map_location=map_location, **chosen)

    return load


def _may_be_snapshot(url: str | os.PathLike[str], storage_options: Mapping[str, Any]) -> bool:
    if os.fspath(url).startswith(_WEB):
        return False
    return bool(local_path(url)) or look_at(url, storage_options) not in (Found.FILE, Found.NOTHING)


def _is_snapshot(path: str | os.PathLike[str]) -> bool:
    place = local_path(path)
    may_be = os.path.isdir(place) if place else not os.fspath(path).startswith(_WEB)
    return may_be and open_storage(path).is_snapshot()


def _snapshot_aware_parser(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def _parse_ckpt_path(self: Any) -> None:
        if not _take_hyperparameters(self):
            original(self)

    return _parse_ckpt_path


def _take_hyperparameters(cli: Any) -> bool:
    """Do what ``LightningCLI`` does with the hyperparameters of a checkpoint file, for a snapshot.

    Returns:
        Whether ``--ckpt_path`` names a snapshot.
    """
    subcommand = cli.config.get("subcommand")
    path = cli.config[subcommand].get("ckpt_path") if subcommand else None
    if not path or not _is_snapshot(path):
        return False
    snapshot = Snapshot(path)
    if "0/hyper_parameters" not in snapshot.get_manifest():
        return True
    hyperparameters = snapshot.get_state_dict_for_key("hyper_parameters")
    hyperparameters.pop("_instantiator", None)
    if "_class_path" in hyperparameters:
        hyperparameters = {"class_path": hyperparameters.pop("_class_path"), "dict_kwargs": hyperparameters}
    if hyperparameters:
        cli.config = cli.parser.parse_object({subcommand: {"model": hyperparameters}}, cli.config)
    return True
