"""``Snapshot``: torchsnapshot's API on this project's engine."""

import datetime
import os
import secrets
from collections.abc import Mapping
from typing import Any

import torch

from lightning_snapshot.errors import (
    EntryNotFoundError,
    TargetMismatchError,
    UnsupportedFeatureError,
    UnsupportedValueError,
)
from lightning_snapshot.manifest import Entry, Manifest
from lightning_snapshot.options import Options
from lightning_snapshot.restore import load, read_manifest, read_value
from lightning_snapshot.save import save
from lightning_snapshot.session import Session
from lightning_snapshot.stateful import RNGState, Stateful, copies_tensors_as_they_are
from lightning_snapshot.stats import Stats
from lightning_snapshot.storage import open_storage
from lightning_snapshot.tensors import tensors_by_path
from lightning_snapshot.verify import Progress, Report, verify

__all__ = ["Snapshot", "new_save_id"]


def new_save_id() -> str:
    """A name for a save that no other save has, and that sorts by time."""
    # secrets draws from the operating system, so saving moves none of the random streams of a training run.
    return f"{datetime.datetime.now(datetime.timezone.utc):%Y%m%dT%H%M%S}-{secrets.token_hex(6)}"


class Snapshot:
    """A snapshot at a path, written by this project or by any version of torchsnapshot.

    Creating the object reads nothing; each method opens the snapshot as it is then.

    Args:
        path: Folder, as a path or a ``file://`` URL.
        pg: Process group. One process only for now.
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
        _refuse_several_ranks(pg)
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
        """Save the state of some objects.

        Until this returns, the path holds what it held before; then it holds the new snapshot, also after a power
        cut. The random number generators are as before.

        Args:
            path: Folder to write. A snapshot, file or link that is there is replaced.
            app_state: Name → object with ``state_dict``/``load_state_dict``. At most one `RNGState`.
            pg: Process group. One process only for now.
            replicated: Glob patterns of paths that all ranks share; with one process everything is stored once anyway.
            storage_options: Passed to the storage.

        Raises:
            UnsupportedValueError: A value cannot be stored. Nothing is written.
            StorageError: The storage failed. What was there before is still there.
        """
        snapshot = cls(path, pg, storage_options)
        del replicated  # one process writes everything once, whatever is replicated
        states = _state_dicts(app_state)
        save(states, snapshot._storage, save_id=new_save_id(), options=snapshot._options, session=snapshot._session)
        return snapshot

    @classmethod
    def async_take(cls, *_: Any, **__: Any) -> None:
        """Not offered by this version.

        Raises:
            UnsupportedFeatureError: Always.
        """
        msg = "Snapshot.async_take is not supported yet; use Snapshot.take"
        raise UnsupportedFeatureError(msg)

    def restore(self, app_state: Mapping[str, Stateful], strict: bool = True) -> None:  # noqa: FBT001, FBT002  # torchsnapshot's signature
        """Load the state of some objects, in place where a tensor of equal dtype and shape is there.

        Each object reads only its own part of the snapshot. When this raises, tensors of the object that was being
        restored may be partly filled.

        Args:
            app_state: Name → object. Names that are only in the snapshot are ignored.
            strict: Passed to ``load_state_dict`` of modules.

        Raises:
            EntryNotFoundError: The snapshot has no such name.
            TargetMismatchError: A parameter or buffer of a module has another shape than the stored one.
            DataError: A data file is missing or damaged.
            UnsafeObjectError: A value needs code that is not known to be safe.
        """
        _check_rng_states(app_state)
        for key, stateful in sorted(app_state.items(), key=lambda item: isinstance(item[1], RNGState)):
            own = tensors_by_path({key: stateful.state_dict()})
            targets = own if copies_tensors_as_they_are(stateful) else {}
            state = self._load([key], targets)[key]
            if isinstance(stateful, torch.nn.Module):
                _check_shapes(key, own, state)
                stateful.load_state_dict(state, strict=strict)
            else:
                stateful.load_state_dict(state)

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
        """The state under a name, with fresh tensors on the CPU; sharded ones in full.

        Args:
            key: The name.
            mmap: Map the tensors instead of reading them, as in `read_object`.

        Raises:
            EntryNotFoundError: The snapshot has no such name.
            DataError: A data file is missing or damaged.
            UnsafeObjectError: A value needs code that is not known to be safe.
        """
        return self._load([key], {}, mmap=mmap)[key]

    @property
    def last_save(self) -> Stats | None:
        """What `take` did to make this snapshot; ``None`` if this object did not come from it."""
        return self._session.last_save

    @property
    def last_load(self) -> Stats | None:
        """What the last load through this object did; ``None`` before the first."""
        return self._session.last_load

    def _load(self, keys: list[str], targets: Mapping[str, torch.Tensor], *, mmap: bool = False) -> dict[str, Any]:
        return load(
            self._storage,
            rank=0,
            options=self._options,
            keys=keys,
            targets=targets,
            mmap=mmap,
            session=self._session,
        )

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


def _refuse_several_ranks(pg: Any) -> None:
    distributed = torch.distributed
    if pg is None and not (distributed.is_available() and distributed.is_initialized()):
        return
    if distributed.get_world_size(pg) > 1:
        msg = "Snapshot works in one process for now; in a group of several, only SnapshotCheckpointIO does"
        raise UnsupportedFeatureError(msg)


def _check_rng_states(app_state: Mapping[str, Stateful]) -> None:
    found = [key for key, stateful in app_state.items() if isinstance(stateful, RNGState)]
    if len(found) > 1:
        msg = f"expected at most one RNGState, found {found}"
        raise TargetMismatchError(msg)


def _state_dicts(app_state: Mapping[str, Any]) -> dict[str, Any]:
    """All state dicts, with that of the RNGState taken first, and the generator put back at the end."""
    _check_rng_states(app_state)
    for key, stateful in app_state.items():
        if not isinstance(stateful, Stateful):
            msg = (
                f"{key}: expected an object with state_dict() and load_state_dict(), found {type(stateful).__name__}; "
                f"put plain values into a StateDict: StateDict({key}=…)"
            )
            raise UnsupportedValueError(msg)
    before = torch.get_rng_state()
    rng = {key: stateful.state_dict() for key, stateful in app_state.items() if isinstance(stateful, RNGState)}
    states = {key: rng[key] if key in rng else stateful.state_dict() for key, stateful in app_state.items()}
    if rng:
        torch.set_rng_state(before)
    return states


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
