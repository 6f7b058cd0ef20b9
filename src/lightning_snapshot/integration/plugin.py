"""`SnapshotCheckpointIO`: Lightning's checkpoints as snapshots."""

import io
import os
import pickle
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch.optim import Optimizer

from lightning_snapshot.errors import DataError, NotASnapshotError, UnsafeObjectError
from lightning_snapshot.group import Group
from lightning_snapshot.integration.behind import Behind, OnBusy, OnError, SavesBehindTraining
from lightning_snapshot.integration.namespaces import bases
from lightning_snapshot.integration.ranks import part_to_load, rank_and_world_size
from lightning_snapshot.manifest import Manifest
from lightning_snapshot.objects import how_to_allow
from lightning_snapshot.options import Options
from lightning_snapshot.restore import load
from lightning_snapshot.save import begin_save
from lightning_snapshot.save_as_one import MainRankSharing, begin_as_one
from lightning_snapshot.saving import Saving
from lightning_snapshot.session import Session
from lightning_snapshot.siblings import Fallback
from lightning_snapshot.snapshot import new_save_id
from lightning_snapshot.stats import Stats
from lightning_snapshot.storage import (
    Storage,
    list_names,
    local_path,
    offer_file_systems,
    open_storage,
    read_remote_file,
)
from lightning_snapshot.together import Save

__all__ = ["SnapshotCheckpointIO"]

_Path: TypeAlias = str | os.PathLike[str]

# After this, a rank that has not come to a save is named in a warning.
_LATE_SECONDS = 30.0
# Before callbacks are made, which look into the folder of checkpoints at once.
offer_file_systems()

# A temporary file of fsspec, which stock Lightning moves to the path of the checkpoint, or into the folder there.
_STOCK_FILE = re.compile(r"tmp[a-z0-9_]{8}")


class SnapshotCheckpointIO(*bases("fabric", "plugins.io.checkpoint_io", "CheckpointIO")):  # type: ignore[misc]  # bases depend on what is installed
    """Saves and loads Lightning's checkpoints as snapshots: ``Trainer(plugins=[SnapshotCheckpointIO()])``, or Fabric.

    A checkpoint becomes a folder under the name that Lightning gives it. Until a save has succeeded, the path holds
    what it held before. Stock ``.ckpt`` files load, too. All methods may be called on any one rank alone, except
    `save_on_all_ranks`: none of them waits for another rank.

    With ``async_save``, a save returns when the state is copied, and the rest goes on behind training. Nobody else can
    tell: removals wait until the saves before them are published, loads wait as well, and a save that fails does not
    cost the checkpoints that it was to replace. Under a Trainer, saves outside of training, and those that somebody
    reads at once, are synchronous.

    Args:
        verify: Compare checksums of everything that is loaded.
        trusted: Let stored objects run their own code when they are loaded, as ``weights_only=False`` does for one
            load. Without it, tensors, numbers, text, containers and other plain data load, and anything else raises
            `UnsafeObjectError`.
        storage_options: Passed to the storage of every save and load.
        memory_budget_bytes: Upper bound of the staging memory of a save or load; 64 MiB by default.
        on_damaged: What to do if a snapshot to load is damaged: raise the ``"error"``, or load the newest complete
            snapshot in the same folder that is older (``"previous"``), with a warning.
        check_replicas: Before each save by several ranks, compare the content of what all of them should hold alike,
            and raise `UnsupportedValueError` if it differs.
        rank_timeout_seconds: In a save by several ranks: after this without a sign of life of a rank, the others
            raise `RankTimeoutError`. The time-out of training's process group does not matter.
        async_save: Let saves go on behind training.
        overlap: With it, make no copy of what optimizers own (parameters and their states): it is read during the
            next forward and backward pass, and copied as far as it is not read when the optimizer takes its step. For
            programs in which nobody but the optimizers changes that; implies ``async_save``.
        overlap_check: With ``overlap``, compare checksums from the call and from the reading, and fail the save if
            they differ. Slow: for trying out whether a program may use ``overlap``.
        on_error: What to do if a save behind training has failed: ``"raise"`` the error once, at the next call of the
            plugin, or at the end of training; or ``"warn"`` and go on.
        on_busy: What to do if a save comes while another one goes on: ``"wait"`` for that, ``"skip"`` the new one, or
            give up the old one for it (``"supersede"``).
        max_pending_bytes: Most memory for copies of states. By default as much as one state takes; with less, a save
            returns when the rest of its state fits.
    """

    def __init__(  # noqa: PLR0913, PLR0917  # each is a choice of its own, and Lightning's CLI wants them flat
        self,
        verify: bool = True,  # noqa: FBT001, FBT002  # Lightning's CLI passes arguments by name
        trusted: bool = False,  # noqa: FBT001, FBT002  # as above
        storage_options: dict[str, Any] | None = None,
        memory_budget_bytes: int | None = None,
        on_damaged: Literal["error", "previous"] = "error",
        check_replicas: bool = False,  # noqa: FBT001, FBT002  # as above
        rank_timeout_seconds: float = 1800.0,
        async_save: bool = False,  # noqa: FBT001, FBT002  # as above
        overlap: bool = False,  # noqa: FBT001, FBT002  # as above
        overlap_check: bool = False,  # noqa: FBT001, FBT002  # as above
        on_error: OnError = "raise",
        on_busy: OnBusy = "wait",
        max_pending_bytes: int | None = None,
    ) -> None:
        if on_damaged not in ("error", "previous"):
            msg = f"on_damaged must be 'error' or 'previous', found {on_damaged!r}"
            raise ValueError(msg)
        budget = Options.from_env().memory_budget_bytes if memory_budget_bytes is None else memory_budget_bytes
        self._options = Options(budget, verify=verify, trusted=trusted)
        self._storage_options = storage_options or {}
        self._fallback = Fallback(previous=on_damaged == "previous", storage_options=self._storage_options)
        self._session = Session()
        how = Behind(async_save, overlap, overlap_check, on_error, on_busy, max_pending_bytes)
        is_snapshot = partial(_is_snapshot, self._storage_options)
        self.behind = SavesBehindTraining(how, self._session, self._options.block_bytes, is_snapshot)
        self._check_replicas = check_replicas
        self._rank_timeout_seconds = rank_timeout_seconds
        self._expects_single_writer = False
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
            StorageError: The storage failed. What was at ``path`` is still there. With ``async_save``, that may have
                been an earlier save; the message says which.
        """
        self._warn_of_single_writer()
        storage = self._open(path, storage_options)
        begin = partial(
            begin_save, checkpoint, storage, save_id=new_save_id(), options=self._options, session=self._session
        )
        self.behind.save(os.fspath(path), lambda claim: begin(claim=claim))

    def save_on_all_ranks(
        self,
        checkpoint: dict[str, Any],
        path: _Path,
        sharing: MainRankSharing,
        storage_options: dict[str, Any] | None = None,
        *,
        timeout_seconds: float | None = None,
        optimizers: Iterable[Optimizer] | None = None,
    ) -> None:
        """Save a checkpoint that all ranks have, each rank a share of it; on all ranks, and they wait for each other.

        Args:
            checkpoint: As in `save_checkpoint`. Rank 0's counts, and of what ranks have of their own, each one's.
            path: Folder to write; rank 0's counts.
            sharing: What ranks have in common.
            storage_options: Passed to the storage.
            timeout_seconds: Instead of ``rank_timeout_seconds``.
            optimizers: With ``overlap``: those whose parameters and states need no copy. By default the Trainer's.

        Raises:
            UnsupportedValueError: A value cannot be stored, or replicas differ. Nothing is written.
            StorageError: The storage failed on some rank. What was at ``path`` is still there.
            RankError: Another rank failed or did not come.
        """
        timeout_seconds = timeout_seconds or self._rank_timeout_seconds
        late_seconds = min(_LATE_SECONDS, timeout_seconds / 4)
        group_of = partial(Group.of, late_seconds=late_seconds, timeout_seconds=timeout_seconds)
        request = Save(
            os.fspath(path),
            lambda place: self._open(place, storage_options),
            new_save_id(),
            self._options,
            self._session,
            group_of(),
        )

        def begin(claim: bool) -> Saving:  # noqa: FBT001  # for `SavesBehindTraining`
            save = replace(request, claim=claim)
            return begin_as_one(checkpoint, save, sharing, check_replicas=self._check_replicas)

        self.behind.save(os.fspath(path), begin, group_of, optimizers)

    def expect_single_writer(self) -> None:
        """Do not warn any more if one of several ranks saves alone: the others know how to take part."""
        self._expects_single_writer = True

    def load_checkpoint(
        self,
        path: _Path,
        map_location: Any = None,
        weights_only: bool | None = None,  # noqa: FBT001  # Lightning passes it by position
    ) -> dict[str, Any]:
        """Load a snapshot, or a stock checkpoint file.

        What ranks had of their own at the save, each gets back if there are as many ranks now; otherwise all get rank
        0's, with a warning.

        In place of an unfinished save or removal, the newest complete snapshot in the same folder is loaded, with a
        warning; ``on_damaged`` says whether that is also done for a damaged snapshot.

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
        return self.load_into(path, self._take_targets(path), map_location=map_location, weights_only=weights_only)

    def load_into(
        self,
        path: _Path,
        targets: Mapping[str, torch.Tensor],
        *,
        skip: Collection[str] | Callable[[Manifest], Collection[str]] = (),
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load like `load_checkpoint`, as far as possible into tensors that exist.

        Args:
            path: Folder or file.
            targets: Logical path → tensor (``state_dict/layer.weight``). Of one that is spread over ranks, this rank's
                part is read. They then stand in the checkpoint, so nothing may edit it.
            skip: Top-level keys of a snapshot that are not wanted; or what gives them, given the snapshot.
            map_location: For other tensors.
            weights_only: As in `load_checkpoint`.
        """
        self.behind.wait()
        trusted = self._options.trusted or weights_only is False
        content = read_remote_file(path, self._storage_options)
        if content is not None or os.path.isfile(local_path(path)):
            file = path if content is None else io.BytesIO(content)
            return _load_file(path, file, map_location, weights_only=False if trusted else weights_only)
        options = replace(self._options, trusted=trusted)
        device = _device(map_location)
        read = partial(
            load,
            rank=part_to_load,
            options=options,
            skip=skip,
            targets=targets,
            device=device,
            session=self._session,
        )
        state = self._fallback.load(path, read, targets)
        _warn_of_stock_files(path, self._storage_options)
        return state

    def remove_checkpoint(self, path: _Path) -> None:
        """Remove a snapshot, a stock checkpoint file, a sharded checkpoint of Lightning, or a link to any of them.

        A link is removed, not what it leads to. Files that no checkpoint wrote are kept, with a warning. Nothing at
        ``path`` is no error.

        Raises:
            NotASnapshotError: There is something that no checkpoint plugin wrote.
            StorageError: The storage failed.
        """
        self.behind.after_save(os.fspath(path), self._open(path).remove)

    def teardown(self) -> None:
        """Wait for the save that goes on, and give back the memory that is kept. The plugin can be used again.

        Raises:
            SnapshotError: See `wait`.
        """
        try:
            self.behind.wait()
        finally:
            self._session.release()

    def wait(self) -> None:
        """Wait until all saves are published, and what comes after them is done.

        Raises:
            SnapshotError: One of them has failed since this was last told; other failures are logged. If another
                exception is being handled, it gets a note instead.
        """
        self.behind.wait()

    def __enter__(self) -> "SnapshotCheckpointIO":  # noqa: PYI034  # Self is of Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.teardown()

    @property
    def storage_options(self) -> Mapping[str, Any]:
        """What is passed to the storage of every save and load. It may hold credentials."""
        return self._storage_options

    @property
    def last_save(self) -> Stats | None:
        """What the last save that is published did and how long it took; ``None`` before the first."""
        return self._session.last_save

    @property
    def last_load(self) -> Stats | None:
        """What the last load of a snapshot did and how long it took; ``None`` before the first."""
        return self._session.last_load

    def read_next_checkpoint_into(self, tensors: Callable[[_Path], Mapping[str, torch.Tensor]] | None) -> None:
        """Let a coming `load_checkpoint` read into tensors that exist, so that no second copy is made.

        `SnapshotCallback` calls this right before Lightning restores a model. The loaded checkpoint then holds these
        very tensors, so nothing may edit it.

        Args:
            tensors: Gives logical path → tensor (``state_dict/layer.weight``) for the path that is loaded; nothing if
                that load is not the one that is meant. ``None`` takes the request back.
        """
        self._tensors_to_restore = tensors

    def _open(self, path: _Path, storage_options: Mapping[str, Any] | None = None) -> Storage:
        return open_storage(path, {**self._storage_options, **(storage_options or {})})

    def _take_targets(self, path: _Path) -> Mapping[str, torch.Tensor]:
        targets = self._tensors_to_restore(path) if self._tensors_to_restore else {}
        if targets:
            self._tensors_to_restore = None
        return targets

    def _warn_of_single_writer(self) -> None:
        rank, world_size = rank_and_world_size()
        if world_size > 1 and not self._expects_single_writer:
            self._expects_single_writer = True
            warnings.warn(
                f"SnapshotCheckpointIO writes on rank {rank} alone while the other {world_size - 1} ranks wait, and "
                "what they have of their own is not saved. For all ranks to save, add SnapshotCallback() to the "
                "Trainer, or call attach(fabric)",
                stacklevel=3,
            )


def _warn_of_stock_files(path: _Path, storage_options: Mapping[str, Any]) -> None:
    names = [name for name in list_names(path, storage_options) if _STOCK_FILE.fullmatch(name)]
    if names:
        msg = (
            f"{path}: loaded the snapshot, but its folder also holds {names[0]}, as stock Lightning leaves it if it "
            f"saves over a snapshot; if that is what you want, load {os.path.join(path, names[0])}, else remove it"
        )
        warnings.warn(msg, stacklevel=3)


def _is_snapshot(storage_options: Mapping[str, Any], path: str) -> bool:
    return open_storage(path, storage_options).is_snapshot()


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


def _load_file(
    path: _Path, file: _Path | io.BytesIO, map_location: Any, *, weights_only: bool | None
) -> dict[str, Any]:
    try:
        checkpoint = torch.load(file, map_location=map_location, weights_only=weights_only)
    # Damaged files make torch and its zip reader raise anything from UnpicklingError to KeyError.
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        # How torch names what it has refused to run.
        refused = re.search(r"GLOBAL (\S+)|but got <class '(\S+)'>", str(error))
        if refused:
            name = refused[1] or refused[2]
            msg = (
                f"{path}: reading this checkpoint file needs {name}, which is not known to be plain data. If you trust "
                f"whoever wrote it, pass weights_only=False (Lightning) or trusted=True{how_to_allow(name)}"
            )
            raise UnsafeObjectError(msg) from error
        msg = f"{path}: expected a checkpoint file written by torch.save, but it cannot be read: {error}"
        raise DataError(msg) from error
    if not isinstance(checkpoint, dict):
        msg = f"{path}: expected a checkpoint, which is a dictionary, found {type(checkpoint).__name__}"
        raise NotASnapshotError(msg)
    return checkpoint
