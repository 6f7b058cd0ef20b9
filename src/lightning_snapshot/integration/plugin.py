"""`SnapshotCheckpointIO`: Lightning's checkpoints as snapshots."""

import os
import pickle
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from lightning_snapshot.errors import DataError, NotASnapshotError, UnsafeObjectError
from lightning_snapshot.integration.namespaces import bases
from lightning_snapshot.options import Options
from lightning_snapshot.restore import load
from lightning_snapshot.save import save
from lightning_snapshot.snapshot import new_save_id
from lightning_snapshot.storage import local_path, open_storage

__all__ = ["SnapshotCheckpointIO"]

_Path: TypeAlias = str | os.PathLike[str]


class SnapshotCheckpointIO(*bases("fabric", "plugins.io.checkpoint_io", "CheckpointIO")):  # type: ignore[misc]  # bases depend on what is installed
    """Saves and loads Lightning's checkpoints as snapshots: ``Trainer(plugins=[SnapshotCheckpointIO()])``, or Fabric.

    A checkpoint becomes a folder under the name that Lightning gives it. Until a save has succeeded, the path holds
    what it held before. Stock ``.ckpt`` files load, too. All methods may be called on any one rank alone: none of them
    waits for another rank.

    Args:
        verify: Compare checksums of everything that is loaded.
        trusted: Let stored objects run their own code when they are loaded, as ``weights_only=False`` does for one
            load. Without it, tensors, numbers, text, containers and other plain data load, and anything else raises
            `UnsafeObjectError`.
        storage_options: Passed to the storage of every save and load.
        memory_budget_bytes: Upper bound of the staging memory of a save or load; 64 MiB by default.
    """

    def __init__(
        self,
        verify: bool = True,  # noqa: FBT001, FBT002  # Lightning's CLI passes arguments by name
        trusted: bool = False,  # noqa: FBT001, FBT002  # as above
        storage_options: dict[str, Any] | None = None,
        memory_budget_bytes: int | None = None,
    ) -> None:
        budget = Options.from_env().memory_budget_bytes if memory_budget_bytes is None else memory_budget_bytes
        self._options = Options(budget, verify=verify, trusted=trusted)
        self._storage_options = storage_options or {}
        self._warned_of_single_writer = False
        self._tensors_to_restore: Callable[[_Path], Mapping[str, torch.Tensor]] | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _Path, storage_options: dict[str, Any] | None = None
    ) -> None:
        """Save a checkpoint, durably and in one step. Whatever is at ``path`` is replaced.

        Args:
            checkpoint: State with string keys. Tensors are read in place until this returns.
            path: Folder to write.
            storage_options: Passed to the storage.

        Raises:
            UnsupportedValueError: A value cannot be stored. Nothing is written.
            StorageError: The storage failed. What was at ``path`` is still there.
        """
        self._warn_of_single_writer()
        storage = open_storage(path, {**self._storage_options, **(storage_options or {})})
        save(checkpoint, storage, save_id=new_save_id(), options=self._options)

    def load_checkpoint(
        self,
        path: _Path,
        map_location: Any = None,
        weights_only: bool | None = None,  # noqa: FBT001  # Lightning passes it by position
    ) -> dict[str, Any]:
        """Load a snapshot, or a stock checkpoint file.

        Args:
            path: Folder or file.
            map_location: As in ``torch.load``; by default tensors come to the CPU.
            weights_only: False lets stored objects run their own code; None and True do not.

        Raises:
            SnapshotNotFoundError: There is nothing at ``path``.
            NotASnapshotError: There is something else.
            MetadataError, DataError: The snapshot is damaged.
            UnsafeObjectError: A value needs code that is not known to be safe.
        """
        targets = self._take_targets(path)
        trusted = self._options.trusted or weights_only is False
        if os.path.isfile(local_path(path)):
            return _load_file(path, map_location, weights_only=False if trusted else weights_only)
        storage = open_storage(path, self._storage_options)
        options = replace(self._options, trusted=trusted)
        return load(storage, rank=0, options=options, targets=targets, device=_device(map_location))

    def remove_checkpoint(self, path: _Path) -> None:
        """Remove a snapshot, a stock checkpoint file, a sharded checkpoint of Lightning, or a link to any of them.

        A link is removed, not what it leads to. Files that no checkpoint wrote are kept, with a warning. Nothing at
        ``path`` is no error.

        Raises:
            NotASnapshotError: There is something that no checkpoint plugin wrote.
            StorageError: The storage failed.
        """
        open_storage(path, self._storage_options).remove()

    def teardown(self) -> None:
        """Nothing is kept between saves, so there is nothing to release; the plugin can be used again."""

    def read_next_checkpoint_into(self, tensors: Callable[[_Path], Mapping[str, torch.Tensor]] | None) -> None:
        """Let a coming `load_checkpoint` read into tensors that exist, so that no second copy is made.

        `SnapshotCallback` calls this right before Lightning restores a model. The loaded checkpoint then holds these
        very tensors, so nothing may edit it.

        Args:
            tensors: Gives logical path → tensor (``state_dict/layer.weight``) for the path that is loaded; nothing if
                that load is not the one that is meant. ``None`` takes the request back.
        """
        self._tensors_to_restore = tensors

    def _take_targets(self, path: _Path) -> Mapping[str, torch.Tensor]:
        targets = self._tensors_to_restore(path) if self._tensors_to_restore else {}
        if targets:
            self._tensors_to_restore = None
        return targets

    def _warn_of_single_writer(self) -> None:
        distributed = torch.distributed
        if self._warned_of_single_writer or not (distributed.is_available() and distributed.is_initialized()):
            return
        if distributed.get_world_size() > 1:
            self._warned_of_single_writer = True
            warnings.warn(
                f"SnapshotCheckpointIO writes on rank {distributed.get_rank()} alone while the other "
                f"{distributed.get_world_size() - 1} ranks wait; sharing the work is not supported yet. The snapshot "
                "is complete for strategies that replicate the model.",
                stacklevel=3,
            )


def _device(map_location: Any) -> torch.device:
    """The device that ``map_location`` means for tensors that lie on the CPU, as all tensors in a snapshot do."""
    if map_location is None:
        return torch.device("cpu")
    if isinstance(map_location, Mapping):
        return torch.device(map_location.get("cpu", "cpu"))
    if callable(map_location):
        moved = map_location(torch.empty(0).untyped_storage(), "cpu")
        return torch.device("cpu") if moved is None else moved.device
    return torch.device(map_location)


def _load_file(path: _Path, map_location: Any, *, weights_only: bool | None) -> dict[str, Any]:
    try:
        checkpoint = torch.load(path, map_location=map_location, weights_only=weights_only)
    # Damaged files make torch and its zip reader raise anything from UnpicklingError to KeyError.
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        # How torch names what it has refused to run.
        refused = re.search(r"GLOBAL (\S+)|but got <class '(\S+)'>", str(error))
        if refused:
            msg = (
                f"{path}: reading this checkpoint file needs {refused[1] or refused[2]}, which is not known to be "
                "plain data. If you trust whoever wrote it, pass weights_only=False (Lightning) or trusted=True; or "
                "allow the class with torch.serialization.add_safe_globals"
            )
            raise UnsafeObjectError(msg) from error
        msg = f"{path}: expected a checkpoint file written by torch.save, but it cannot be read: {error}"
        raise DataError(msg) from error
    if not isinstance(checkpoint, dict):
        msg = f"{path}: expected a checkpoint, which is a dictionary, found {type(checkpoint).__name__}"
        raise NotASnapshotError(msg)
    return checkpoint
