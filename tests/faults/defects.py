"""Mistakes that the package does not make, and that the matrix has to find."""

from pathlib import Path
from typing import Any

from lightning_snapshot.storage import DATA_FOLDER, Storage, Transaction
from lightning_snapshot.storage.folders import remove_path
from lightning_snapshot.storage.locations import SAVE_ID
from tests.edges.faulty_posix import FaultyPosix
from tests.faults.power import Disk, RecordingPosix
from tests.faults.scenes import open_local


class WithoutOneSync(RecordingPosix):
    """One sync is left out, that of the number ``drop``, from 1 on."""

    def __init__(self, disk: Disk, *, drop: int, **faults: Any) -> None:
        super().__init__(disk, **faults)
        self._drop = drop
        self._syncs = 0

    def _perform(self, name: str, real: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in ("sync", "sync_folder"):
            self._syncs += 1
            if self._syncs == self._drop:
                return None
        return super()._perform(name, real, args, kwargs)


class CopyInsteadOfRename(RecordingPosix):
    """Things get their names by being copied there."""

    def rename(self, source: Path, target: Path) -> None:
        if source.is_dir():
            if not target.exists():
                self.make_folder(target)
            for name in self.list_folder(source):
                self.rename(source / name, target / name)
            self.remove_folder(source)
            return
        remove_path(self, target)
        content = source.read_bytes()
        descriptor = self.create_file(target)
        self.write(descriptor, memoryview(content), 0)
        self.sync(descriptor)
        self.close(descriptor)
        self.unlink(source)


class NoRename(RecordingPosix):
    """Nothing is ever published."""

    def rename(self, source: Path, target: Path) -> None:
        pass

    exchange = rename


class RemoveInsteadOfExchange(RecordingPosix):
    """What is replaced goes before what replaces it comes."""

    def exchange(self, first: Path, second: Path) -> None:
        self.unlink(second)
        self.rename(first, second)


class _Wrapped:
    """A storage whose saves go wrong."""

    def __init__(self, root: Path, posix: FaultyPosix) -> None:
        self._root = root
        self._posix = posix
        self._storage: Storage = open_local(root, posix)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


class RemoveBeforeCommit(_Wrapped):
    """The data of the snapshot that is replaced goes before the new one is published."""

    def begin(self, save_id: str, *, claim: bool = False) -> Transaction:
        transaction = self._storage.begin(save_id, claim=claim)
        commit = transaction.commit

        def remove_and_commit(metadata: bytes) -> None:
            data = self._root / DATA_FOLDER
            for name in self._posix.list_folder(data) if data.is_dir() else ():
                if SAVE_ID.fullmatch(name) and name != save_id:
                    remove_path(self._posix, data / name)
            commit(metadata)

        transaction.commit = remove_and_commit
        return transaction


class CommitBeforeData(_Wrapped):
    """The metadata is published before the data files are written."""

    def begin(self, save_id: str, *, claim: bool = False) -> Transaction:
        transaction = self._storage.begin(save_id, claim=claim)
        late: list[_LateWriter] = []

        def create(location: str, size_bytes: int) -> _LateWriter:
            late.append(_LateWriter(self._posix, self._root / location, size_bytes))
            return late[-1]

        commit = transaction.commit

        def commit_and_write(metadata: bytes) -> None:
            commit(metadata)
            for writer in late:
                writer.write_now()

        transaction.create, transaction.commit = create, commit_and_write
        return transaction


class _LateWriter:
    def __init__(self, posix: FaultyPosix, path: Path, size_bytes: int) -> None:
        self._posix = posix
        self._path = path
        self._content = bytearray(size_bytes)

    def write(self, offset_bytes: int, buffer: memoryview) -> None:
        self._content[offset_bytes : offset_bytes + len(buffer)] = buffer

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass

    def write_now(self) -> None:
        descriptor = self._posix.create_file(self._path)
        self._posix.write(descriptor, memoryview(self._content), 0)
        self._posix.sync(descriptor)
        self._posix.close(descriptor)
        self._posix.sync_folder(self._path.parent)
