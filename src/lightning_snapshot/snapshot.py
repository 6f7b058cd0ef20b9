"""``Snapshot``: torchsnapshot's API on this project's engine."""

import datetime
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed

from lightning_snapshot.app_state import Replicated, check_rng_states, state_dicts
from lightning_snapshot.background import Failure, note_failure, take_back
from lightning_snapshot.errors import EntryNotFoundError, TargetMismatchError
from lightning_snapshot.group import Group
from lightning_snapshot.manifest import Entry, Manifest, PrimitiveEntry
from lightning_snapshot.memory import UNLIMITED_BYTES, BufferPool
from lightning_snapshot.options import Options
from lightning_snapshot.read_plan import TensorLike, stored_tensor
from lightning_snapshot.restore import load, read_manifest, read_value
from lightning_snapshot.save import begin_save
from lightning_snapshot.save_each import begin_each
from lightning_snapshot.saving import PendingSave, Saving
from lightning_snapshot.session import Session
from lightning_snapshot.stateful import RNGState, Stateful, copies_tensors_as_they_are
from lightning_snapshot.stats import Stats
from lightning_snapshot.storage import Storage, open_storage
from lightning_snapshot.tensors import is_spread, is_tensor, tensors_by_path
from lightning_snapshot.together import Save
from lightning_snapshot.tree import Leaf, encode_key, flatten
from lightning_snapshot.verify import Progress, Report, verify
from lightning_snapshot.view import kept_back, values_of_ranks, view_of_rank

__all__ = ["PendingSnapshot", "Snapshot", "new_save_id"]

_MAX_LISTED = 5


class _Alone:
    """In place of a process group where there is none."""


_ALONE = _Alone()
# The last `async_take` of each process group.
_going_on: "WeakKeyDictionary[Any, PendingSnapshot]" = WeakKeyDictionary()
_logger = logging.getLogger("lightning_snapshot")


def new_save_id() -> str:
    """A name for a save that no other save has, and that sorts by time."""
    # secrets draws from the operating system, so saving moves none of the random streams of a training run.
    return f"{datetime.datetime.now(datetime.timezone.utc):%Y%m%dT%H%M%S}-{secrets.token_hex(6)}"


class Snapshot:
    """A snapshot at a path, written by this project or by any version of torchsnapshot.

    Creating the object reads nothing; each method opens the snapshot as it is then.

    Args:
        path: Folder, as a path or a ``file://`` URL.
        pg: Process group of the ranks that save or restore together. By default all ranks, or this process alone if
            there is no process group. Its first rank is rank 0 of the snapshot.
        storage_options: Passed to the storage.
        verify: Compare checksums of what is read, where the snapshot has some.
        trusted: Let stored objects run their own code when they are read. Without it, values that are not known to be
            plain data raise `UnsafeObjectError`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        pg: Any = None,
        storage_options: dict[str, Any] | None = None,
        *,
        verify: bool = True,
        trusted: bool = False,
    ) -> None:
        self._pg = pg
        self._storage_options = storage_options
        self.path = os.fspath(path)
        self._storage = open_storage(path, storage_options)
        self._session = Session()
        defaults = Options.from_env()
        self._options = Options(defaults.memory_budget_bytes, verify=verify, trusted=trusted)

    @classmethod
    def take(
        cls,
        path: str | os.PathLike[str],
        app_state: Mapping[str, Stateful],
        pg: Any = None,
        replicated: list[str] | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> "Snapshot":
        """Save the state of some objects. Called on all ranks of the process group; each saves what it has.

        Until this returns, the path holds what it held before; then it holds the new snapshot, also after a power
        cut. The random number generators are as before. If it fails on one rank, all ranks raise, and nothing is left.

        A value is stored once instead of once for each rank, and ranks that do not exist now can restore it, if all
        ranks have it and one of `replicated` matches its path on each of them. The same holds for parameters and
        buffers of a ``DistributedDataParallel`` module, except for those that it ignores. Each rank writes a share of
        such tensors; of the buffers, those of rank 0 count. Tensors that ``torch.distributed`` spreads over the ranks
        (``DTensor``, ``ShardedTensor``) are stored once in any case.

        Args:
            path: Folder to write. A snapshot, file or link that is there is replaced. If the ranks name different
                ones, that of rank 0 counts.
            app_state: Name → object with ``state_dict``/``load_state_dict``. At most one `RNGState`.
            pg: Process group. By default all ranks, or this process alone if there is no process group.
            replicated: Glob patterns of paths ``<name>/<key>/…``, as in `get_manifest` but without the rank. ``*``
                stands for any text, also one with slashes: ``["**"]`` or ``["*"]`` is everything.
            storage_options: Passed to the storage.

        Raises:
            UnsupportedValueError: A value cannot be stored, or replicated ones differ. Nothing is written.
            StorageError: The storage failed. What was there before is still there.
            RankError: Another rank failed for a reason of its own.
            RankTimeoutError: A rank did not come, or is gone.
        """
        snapshot, saving = cls._begin(path, app_state, pg, replicated, storage_options)
        saving.finish()
        return snapshot

    def _move_to(self, path: str) -> Storage:
        if path != self.path:
            self.path, self._storage = path, open_storage(path, self._storage_options)
        return self._storage

    @classmethod
    def async_take(
        cls,
        path: str | os.PathLike[str],
        app_state: Mapping[str, Stateful],
        pg: Any = None,
        replicated: list[str] | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> "PendingSnapshot":
        """Copy the state of some objects and save the copy in the background. Called on all ranks, like `take`.

        When this returns, the objects may change: nothing of that gets into the snapshot. The copy takes as much memory
        as the state, until it is written. If another `async_take` of the process group goes on, this waits for it
        first, for at most one copy to be there; so does `take`.

        Args:
            path: As in `take`. If nothing is there, an empty folder keeps the place until the snapshot is published.
            app_state: As in `take`.
            pg: As in `take`. In the background, its ranks talk without collectives.
            replicated: As in `take`.
            storage_options: As in `take`.

        Returns:
            What tells about the end. If the save fails and nobody asks, the program ends with an error message and
            exit status 1; a program that ends earlier waits for it.

        Raises:
            UnsupportedValueError: As in `take`.
            StorageError: As in `take`, as far as it is known by now.
            RankError: As in `take`.
        """
        snapshot, saving = cls._begin(path, app_state, pg, replicated, storage_options, claim=True)
        block_bytes = snapshot._options.block_bytes  # noqa: SLF001  # of this class
        try:
            saving.capture(BufferPool(UNLIMITED_BYTES, block_bytes))
        except BaseException as error:
            saving.abandon(error)
            raise
        pending = _going_on[_ranks(pg)] = PendingSnapshot(snapshot, saving)
        return pending

    @classmethod
    def _begin(
        cls,
        path: str | os.PathLike[str],
        app_state: Mapping[str, Stateful],
        pg: Any,
        replicated: list[str] | None,
        storage_options: dict[str, Any] | None,
        *,
        claim: bool = False,
    ) -> tuple["Snapshot", Saving]:
        before = _going_on.pop(_ranks(pg), None)
        if before is not None:
            before.wait_quietly()
        snapshot = cls(path, pg, storage_options)
        sharing = Replicated(app_state, replicated or ())
        group = Group.of(pg)
        options, session, save_id = snapshot._options, snapshot._session, new_save_id()
        if group.world_size > 1:
            save = Save(snapshot.path, snapshot._move_to, save_id, options, session, group, claim)
            return snapshot, begin_each(lambda: state_dicts(app_state), save, sharing)
        saving = begin_save(
            state_dicts(app_state),
            snapshot._storage,
            save_id=save_id,
            options=options,
            session=session,
            claim=claim,
            sharing=sharing,
        )
        return snapshot, saving

    def restore(self, app_state: Mapping[str, Stateful], strict: bool = True) -> None:  # noqa: FBT001, FBT002  # torchsnapshot's signature
        """Load the state of some objects, in place where a tensor of equal dtype and shape is there.

        Each object reads only its own part of the snapshot, and of a tensor that is spread over ranks only what this
        rank has of it, no matter how the tensor was spread at the save. When this raises, tensors of the object that
        was being restored may be partly filled.

        With other ranks than at the save, a rank gets what it had itself, what was replicated, and what was spread
        over ranks. What only ranks had that do not exist any more is left out, which rank 0 logs. Of tensors that
        were spread over ranks, an object that has tensors gets only those that it has.

        Args:
            app_state: Name → object. Names that are only in the snapshot are ignored.
            strict: Passed to ``load_state_dict`` of modules.

        Raises:
            EntryNotFoundError: The snapshot has no such name, or this rank did not exist at the save, and each rank
                had its own values of what it asks for.
            TargetMismatchError: A parameter or buffer of a module has another shape than the stored one.
            DataError: A data file is missing or damaged.
            UnsafeObjectError: A value needs code that is not known to be safe.
        """
        check_rng_states(app_state)
        group = Group.of(self._pg)
        # All ranks in one order, because getting or setting the state of a module can be a joint action of all ranks.
        for key, stateful in sorted(app_state.items(), key=lambda item: (isinstance(item[1], RNGState), item[0])):
            current = {key: stateful.state_dict()}
            own = tensors_by_path(current)
            if isinstance(stateful, torch.optim.Optimizer):
                own = {**self._parts_to_come(key, stateful, group.rank), **own}
            self._check_elasticity(key, current, group)
            targets = own if copies_tensors_as_they_are(stateful) else _copies_of_spread(own)
            state = self._load([key], group.rank, targets=targets, asked=own.keys())[key]
            if isinstance(stateful, torch.nn.Module):
                _check_shapes(key, own, state)
                stateful.load_state_dict(state, strict=strict)
            else:
                stateful.load_state_dict(state)

    def _parts_to_come(self, key: str, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, torch.Tensor]:
        """Logical path → memory for state that an optimizer does not have yet, spread over ranks like its parameter.

        Without this, all of it would come to each rank, and the optimizer could make no step with it.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        spread = {
            f"{encode_key(key)}/state/{number}": parameter.detach()
            for number, parameter in enumerate(parameters)
            if is_spread(parameter)
        }
        found = {}
        view = view_of_rank(read_manifest(self._storage, self._session), rank) if spread else {}
        for path, located in view.items():
            like, entry = spread.get(path.rpartition("/")[0]), located.entry
            if like is not None and isinstance(entry, TensorLike) and stored_tensor(path, entry).shape == like.shape:
                found[path] = torch.empty_like(like)
        return found

    def _check_elasticity(self, key: str, current: Mapping[str, Any], group: Group) -> None:
        """Say what this rank, or ranks that do not exist any more, do not get back of a state."""
        manifest = read_manifest(self._storage, self._session)
        root = encode_key(key)
        if group.rank >= manifest.world_size:
            kept = kept_back(manifest, group.rank, root)
            items = flatten(current, is_tensor=is_tensor).items.items()
            has = {path for path, item in items if isinstance(item, (Leaf, PrimitiveEntry))}
            missing = [path for path in kept if path in has or not has]
            if missing:
                msg = (
                    f"{self.path}: rank {group.rank} did not exist when this was saved, and each rank had its own "
                    f"{_listed(missing)}; save such values with replicated=[…] if all ranks share them, or leave them "
                    "out of what this rank restores"
                )
                raise EntryNotFoundError(msg)
        elif group.rank == 0 and (
            lost := values_of_ranks(manifest, range(group.world_size, manifest.world_size), root)
        ):
            _logger.warning(
                "%s was saved by %d ranks, now there are %d: not restored is %s",
                self.path,
                manifest.world_size,
                group.world_size,
                _listed(lost),
            )

    def read_object(
        self,
        path: str,
        obj_out: torch.Tensor | None = None,
        memory_budget_bytes: int | None = None,
        *,
        index: Any = None,
        mmap: bool = False,
    ) -> Any:
        """Read one value, or a part of a tensor.

        Of a part, only the blocks of 4 MiB that hold something of it are read.

        Args:
            path: ``<rank>/<name>/<key>/…`` as in `get_manifest`; ``%`` and ``/`` in keys are ``%25`` and ``%2F``.
            obj_out: Tensor to read into; it is returned.
            memory_budget_bytes: Upper bound of the staging memory.
            index: Part of a tensor to read, as in ``tensor[index]``: integers, slices with step 1, ``...``.
            mmap: Map a tensor of a local snapshot instead of reading it, as in ``torch.load(mmap=True)``. What is
                written to it stays in memory and never reaches the snapshot. It is not verified, and it comes without
                mapping where it has several pieces (more than 512 MiB, sharded) or `index` is given.

        Raises:
            EntryNotFoundError: There is no value under that path, or a container.
            TargetMismatchError: ``obj_out`` has another dtype or shape than what is read, or ``index`` does not fit.
            DataError: A data file is missing or damaged.
            UnsafeObjectError: The value needs code that is not known to be safe.
        """
        if not path.partition("/")[0].isdecimal():
            msg = f"{self.path}: expected '<rank>/<name>/<key>/…', like '0/{path}', found {path!r}"
            raise EntryNotFoundError(msg)
        options = self._options
        if memory_budget_bytes is not None:
            options = Options(memory_budget_bytes, verify=options.verify, trusted=options.trusted)
        return read_value(
            self._storage, path, options=options, target=obj_out, index=index, mmap=mmap, session=self._session
        )

    def get_manifest(self) -> dict[str, Entry]:
        """All entries: ``<rank>/<path>`` → entry, as in torchsnapshot.

        Raises:
            SnapshotNotFoundError: There is nothing at the path.
            NotASnapshotError: There is something else.
            MetadataError: The metadata is damaged.
        """
        return dict(self.metadata.entries)

    def get_state_dict_for_key(self, key: str, *, mmap: bool = False) -> Any:
        """The state of this rank under a name, with fresh tensors on the CPU; sharded ones in full.

        Args:
            key: The name.
            mmap: Map the tensors instead of reading them, as in `read_object`.

        Raises:
            EntryNotFoundError: The snapshot has no such name.
            DataError: A data file is missing or damaged.
            UnsafeObjectError: A value needs code that is not known to be safe.
        """
        return self._load([key], Group.of(self._pg).rank, mmap=mmap)[key]

    @property
    def last_save(self) -> Stats | None:
        """What `take` did to make this snapshot; ``None`` if this object did not come from it."""
        return self._session.last_save

    @property
    def last_load(self) -> Stats | None:
        """What the last load through this object did; ``None`` before the first."""
        return self._session.last_load

    def _load(self, keys: list[str], rank: int, **arguments: Any) -> dict[str, Any]:
        return load(self._storage, rank=rank, options=self._options, keys=keys, session=self._session, **arguments)

    def verify(self, progress: Progress | None = None) -> Report:
        """Check the whole snapshot, for all ranks, without loading it: entries, files, lengths, checksums.

        Args:
            progress: Called with the bytes that are checked so far and those to check.

        Returns:
            All problems that were found.

        Raises:
            SnapshotNotFoundError: There is nothing at the path.
            NotASnapshotError: There is something else.
            StorageError: The storage failed, or others kept saving over the snapshot.
        """
        return verify(self._storage, self._options, progress)

    @property
    def metadata(self) -> Manifest:
        """Version, world size and entries. Raises like `get_manifest`."""
        return read_manifest(self._storage)


class PendingSnapshot:
    """A snapshot that is being saved. Any thread may ask about it; `Snapshot.async_take` gives it."""

    def __init__(self, snapshot: Snapshot, saving: Saving) -> None:
        self.path = snapshot.path
        self._snapshot = snapshot
        self._failure: Failure | None = None
        self._pending = PendingSave(saving, self._end)
        self._pending.start()

    def _end(self, result: Stats | BaseException) -> None:
        if isinstance(result, BaseException):
            self._failure = Failure(self.path, result)
            note_failure(self._failure)

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._pending.done()

    def wait(self, timeout_seconds: float | None = None) -> Snapshot:
        """Wait for the end.

        Args:
            timeout_seconds: By default as long as it takes.

        Returns:
            The snapshot, which is published.

        Raises:
            TimeoutError: The end has not come in time.
            SnapshotError: The save failed; what was there before is still there.
        """
        error = self.exception(timeout_seconds)
        if error is not None:
            raise error
        return self._snapshot

    def wait_quietly(self) -> None:
        """Wait for the end; what made the save fail is still to be told."""
        self._pending.exception()

    def exception(self, timeout_seconds: float | None = None) -> BaseException | None:
        """Wait for the end, and give what made the save fail; ``None`` if the snapshot is published.

        Args:
            timeout_seconds: As in `wait`.

        Raises:
            TimeoutError: As in `wait`.
        """
        error = self._pending.exception(timeout_seconds)
        if self._failure is not None:
            take_back(self._failure)
        return error

    def add_done_callback(self, callback: Callable[["PendingSnapshot"], object]) -> None:
        """Call a function when the save has ended: in its thread, or at once if that is so already."""
        self._pending.add_done_callback(lambda _: callback(self))


def _ranks(pg: Any) -> Any:
    """Those that save together, as a key of `_going_on`."""
    if pg is None and distributed.is_available():
        pg = distributed.group.WORLD
    return _ALONE if pg is None else pg


def _copies_of_spread(targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """For code that may change what it loads: tensors that say which part this rank wants, but are not its own."""
    return {path: tensor.detach().clone() for path, tensor in targets.items() if is_spread(tensor)}


def _listed(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _MAX_LISTED} more" if len(paths) > _MAX_LISTED else ""
    return ", ".join(paths[:_MAX_LISTED]) + more


def _check_shapes(key: str, targets: Mapping[str, torch.Tensor], state: Any) -> None:
    loaded = tensors_by_path({key: state})
    for path, target in targets.items():
        value = loaded.get(path)
        if value is not None and value.shape != target.shape:
            msg = (
                f"{path}: the module has shape {list(target.shape)}, the snapshot {list(value.shape)}; restore into a "
                "module of the same shape, or take single tensors with read_object()"
            )
            raise TargetMismatchError(msg)
