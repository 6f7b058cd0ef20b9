"""Runs a plan in a few threads; reads: moves bytes from files to tensors, block by block, and compares checksums."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TypeAlias

import msgspec
import xxhash

from lightning_snapshot.devices import SideStreams
from lightning_snapshot.errors import ChecksumError, DataError, MissingDataError
from lightning_snapshot.manifest import FileRecord
from lightning_snapshot.memory import Buffer, BufferPool, copy_memory, memory_at
from lightning_snapshot.read_plan import Blob, Fetch, ReadPlan
from lightning_snapshot.stats import Meter
from lightning_snapshot.storage import Reader, Storage
from lightning_snapshot.tensors import TensorTarget

__all__ = ["PAGE_BYTES", "Means", "check_range", "open_checked", "read_all", "run"]

# Reads of stretches that lie at most this far apart are cheaper as one.
_MERGE_GAP_BYTES = 64 * 1024
# Tensors that an error message lists.
_MAX_NAMED = 5
PAGE_BYTES = 4096
"""Memory that starts on a page can be read and written without staging it."""


def _no_check() -> None: ...


@dataclass(frozen=True, slots=True)
class Means:
    """What a plan is run with.

    Attributes:
        pool: Staging buffers of at least ``block_bytes``.
        block_bytes: Stretch of a file that has one checksum.
        threads: How many blocks are in work at once.
        meter: Notes what is done.
        streams: For copies from and to other devices.
        check: Called before each block; what it raises ends the work.
    """

    pool: BufferPool
    block_bytes: int
    threads: int
    meter: Meter
    streams: SideStreams
    check: Callable[[], None] = _no_check


def run(tasks: Iterable[Callable[[], None]], threads: int) -> None:
    """Run tasks in a few threads. The first error keeps those from beginning that have not, and is raised.

    Plain threads, because Python lets no executor work on while the program ends; a save in the background must.
    """
    waiting = iter(tasks)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                with lock:
                    task = next(waiting, None)
                if task is None:
                    return
                task()
            except BaseException as error:  # noqa: BLE001, PERF203  # raised below, in the thread of the caller
                errors.append(error)

    workers = [threading.Thread(target=work, name=f"lightning-snapshot-{number}") for number in range(threads)]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    except BaseException as error:  # Ctrl-C, or no more threads
        errors.append(error)
        for worker in workers:
            if worker.ident is not None:
                worker.join()
        errors.clear()
        raise
    if errors:
        try:
            raise errors[0]
        finally:
            # Else the error would lead to itself, and all that its traceback holds would stay for a while.
            errors.clear()


# --- reading ---------------------------------------------------------------------------------------------------------


def read_all(
    plan: ReadPlan,
    target_of: Callable[[str], TensorTarget],
    storage: Storage,
    records: Mapping[str, FileRecord],
    means: Means,
    *,
    verify: bool,
) -> dict[Blob, bytearray]:
    """Read everything that a plan asks for.

    Args:
        plan: What to read.
        target_of: Gives the place of a tensor's elements, by logical path; asked when the sizes of all files are known
            to be right, before the first byte is read.
        storage: The snapshot.
        records: Location → what each file must be; empty for snapshots of torchsnapshot.
        means: What to do it with.
        verify: Compare checksums where there are some.

    Returns:
        The bytes of each blob.

    Raises:
        DataError: A file is missing, too short, too long or damaged. Targets are then partly filled.
        StorageError: The storage failed.
    """
    reads = _Reads(target_of, storage, records, means, verify)
    blobs = {(blob.location, blob.byte_range): bytearray() for blob in plan.blobs}
    files = [tuple(group) for _, group in groupby(plan.fetches, key=lambda fetch: fetch.location)]
    try:
        # All files are looked at before memory is taken for the first tensor.
        sizes = [reads.check_size(fetches) for fetches in files]
        tasks = [task for pair in zip(files, sizes, strict=True) for task in reads.fetch_tasks(*pair)]
        names = {(blob.location, blob.byte_range): blob.path for blob in plan.blobs}
        tasks.extend(partial(reads.read_blob, *key, names[key], out) for key, out in blobs.items())
        run(tasks, means.threads)
    finally:
        reads.close()
    means.meter.count(files=len({*(fetch.location for fetch in plan.fetches), *(key[0] for key in blobs)}))
    return {blob: blobs[blob.location, blob.byte_range] for blob in plan.blobs}


@dataclass(slots=True)
class _OpenFile:
    """A file of a load: opened by the first task that needs it and closed by the last, so that few are open at once.

    Attributes:
        open: Opens it.
        tasks: How many tasks have yet to end.
    """

    open: Callable[[], Reader]
    tasks: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    reader: Reader | None = None

    def __enter__(self) -> Reader:
        with self.lock:
            if self.reader is None:
                self.reader = self.open()
            return self.reader

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.tasks -= 1
            if self.tasks == 0:
                self.close()

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()


@dataclass(slots=True)
class _Reads:
    target_of: Callable[[str], TensorTarget]
    storage: Storage
    records: Mapping[str, FileRecord]
    means: Means
    verify: bool
    files: list[_OpenFile] = field(default_factory=list)

    def close(self) -> None:
        for file in self.files:
            file.close()
        # They lead back here, and from here it goes to all tensors: those must not have to wait to be collected.
        self.files.clear()

    def check_size(self, fetches: Sequence[Fetch]) -> int:
        """Length of a file, which must hold all of ``fetches``."""
        with closing(self._open(fetches[0].location, fetches[0].path)) as reader:
            size_bytes = reader.size_bytes
        for fetch in fetches:
            check_range(fetch, size_bytes)
        return size_bytes

    def fetch_tasks(self, fetches: Sequence[Fetch], size_bytes: int) -> Iterator[Callable[[], None]]:
        """One task per stretch of one file; ``fetches`` are all of that file, in order."""
        location, path = fetches[0].location, fetches[0].path
        record, block_bytes = self.records.get(location), self.means.block_bytes
        # Their places are chosen here, because several threads that do little each are slower than one.
        moves = [_Move(fetch, target := self.target_of(fetch.path), target.address_of(fetch)) for fetch in fetches]
        stretches = _merged(moves, block_bytes) if record is None else _blocks(moves, block_bytes)
        file = _OpenFile(partial(self._open, location, path), len(stretches))
        self.files.append(file)
        for begin, end, members in stretches:
            stop = min(end, size_bytes)
            yield partial(self._read_stretch, file, begin, stop, members, self._digest(record, begin))

    def read_blob(self, location: str, byte_range: tuple[int, int] | None, path: str, out: bytearray) -> None:
        """Read a whole file, or a range of it, into memory."""
        with closing(self._open(location, path)) as reader:
            self._read_blob(reader, location, byte_range, path, out)

    def _read_blob(
        self, reader: Reader, location: str, byte_range: tuple[int, int] | None, path: str, out: bytearray
    ) -> None:
        begin, end = byte_range or (0, reader.size_bytes)
        if not 0 <= begin <= end <= reader.size_bytes:
            msg = (
                f"{path}: expected the bytes {begin} to {end} in {location}, found a file of {reader.size_bytes} bytes"
            )
            raise DataError(msg)
        record, block_bytes = self.records.get(location), self.means.block_bytes
        if record is not None and byte_range is not None:
            begin = begin // block_bytes * block_bytes  # checksums are of whole blocks
            end = min(-(-end // block_bytes) * block_bytes, reader.size_bytes)
        try:
            out.extend(bytes(end - begin))
        except MemoryError as error:
            msg = f"{path}: expected memory for the {end - begin} bytes of {location}, found too little"
            raise DataError(msg) from error
        with memoryview(out) as view:
            for start in range(begin, end, block_bytes):
                with view[start - begin : min(start + block_bytes, end) - begin] as block:
                    self._read(reader, start, block)
                    self._check(block, location, start, self._digest(record, start), [path])
        if record is not None and byte_range is not None:
            del out[byte_range[1] - begin :]
            del out[: byte_range[0] - begin]

    def _open(self, location: str, path: str) -> Reader:
        return open_checked(self.storage, self.records, location, path)

    def _digest(self, record: FileRecord | None, begin: int) -> str:
        if record is None or not self.verify:
            return ""
        index = begin // self.means.block_bytes
        return record.hashes[16 * index : 16 * index + 16]

    def _read_stretch(self, file: _OpenFile, begin: int, end: int, moves: Sequence["_Move"], digest: str) -> None:
        self.means.check()
        location = moves[0].fetch.location
        with file as reader:
            address = moves[0].address_of_all(begin, end) if len(moves) == 1 else 0
            if address:
                block = memory_at(address, end - begin)
                self._read(reader, begin, block)
                self._check(block, location, begin, digest, [moves[0].fetch.path])
                return
            with self.means.pool.buffer() as buffer, self.means.meter.staging(self.means.pool.block_bytes):
                block = buffer.view[: end - begin]
                self._read(reader, begin, block)
                self._check(block, location, begin, digest, [move.fetch.path for move in moves])
                with self.means.meter.time("copy"):
                    self._scatter(buffer, begin, end, moves)

    def _read(self, reader: Reader, begin: int, block: memoryview) -> None:
        with self.means.meter.time("device"):
            reader.read_into(begin, block)
        self.means.meter.count(data_bytes=len(block))

    def _scatter(self, buffer: Buffer, begin: int, end: int, moves: Sequence["_Move"]) -> None:
        for move in moves:
            fetch = move.fetch
            start, stop = max(fetch.begin_bytes, begin), min(fetch.end_bytes, end)
            if move.address:
                copy_memory(move.address + start - fetch.begin_bytes, buffer.address + start - begin, stop - start)
                continue
            with self.means.streams.beside_training(move.target.tensor.device, buffer):
                move.target.scatter(fetch, start, buffer.tensor[start - begin : stop - begin])

    def _check(self, block: memoryview, location: str, begin: int, digest: str, paths: Sequence[str]) -> None:
        if not digest:
            return
        with self.means.meter.time("hash"):
            found = xxhash.xxh3_64_hexdigest(block)
        if found != digest:
            shown = ", ".join(paths[:_MAX_NAMED]) + (" and more" if len(paths) > _MAX_NAMED else "")
            msg = (
                f"{shown}: the bytes {begin} to {begin + len(block)} of {location} in {self.storage.url} changed since "
                f"they were written: expected checksum {digest}, found {found}"
            )
            raise ChecksumError(msg)


def open_checked(storage: Storage, records: Mapping[str, FileRecord], location: str, path: str) -> Reader:
    """Open a data file of a snapshot.

    Raises:
        DataError: It is missing, or not as long as its record says; the message names the tensor at ``path``.
    """
    try:
        reader = storage.open(location)
    except MissingDataError as error:
        msg = f"{path}: {error}"
        raise MissingDataError(msg) from error
    record = records.get(location)
    if record is not None and record.size_bytes != reader.size_bytes:
        reader.close()
        msg = f"{path}: expected {record.size_bytes} bytes in {location}, found {reader.size_bytes} bytes"
        raise DataError(msg)
    return reader


def check_range(fetch: Fetch, size_bytes: int) -> None:
    """Compare the length of a file with what is fetched from it.

    Raises:
        DataError: The file is too short, or too long for a tensor that is alone in it.
    """
    expected = size_bytes if fetch.file_size_bytes is None else fetch.file_size_bytes
    if size_bytes != expected or fetch.end_bytes > size_bytes:
        needed = f"{fetch.end_bytes} bytes or more" if fetch.file_size_bytes is None else f"{expected} bytes"
        msg = f"{fetch.path}: expected {needed} in {fetch.location}, found {size_bytes} bytes"
        raise DataError(msg)


class _Move(msgspec.Struct, frozen=True, gc=False):
    """A fetch and where it goes; ``address`` is where its first element goes in a row of the CPU's memory, or 0."""

    fetch: Fetch
    target: TensorTarget
    address: int

    def address_of_all(self, begin: int, end: int) -> int:
        """Where a stretch of the file goes without being staged; 0 if it holds more than this, or if it cannot be."""
        if not self.address or begin < self.fetch.begin_bytes or end > self.fetch.end_bytes:
            return 0
        address = self.address + begin - self.fetch.begin_bytes
        return 0 if address % PAGE_BYTES else address


_Stretch: TypeAlias = tuple[int, int, list[_Move]]
"""Begin and end in a file, and what lies in it, wholly or in part."""


def _blocks(moves: Sequence[_Move], block_bytes: int) -> list[_Stretch]:
    """The blocks with a checksum that hold something wanted."""
    members: dict[int, list[_Move]] = {}
    for move in moves:
        for index in range(move.fetch.begin_bytes // block_bytes, -(-move.fetch.end_bytes // block_bytes)):
            members.setdefault(index, []).append(move)
    return [(index * block_bytes, (index + 1) * block_bytes, members[index]) for index in sorted(members)]


def _merged(moves: Sequence[_Move], limit_bytes: int) -> list[_Stretch]:
    """Stretches of whole elements: large fetches cut, small neighbours merged."""
    stretches: list[_Stretch] = []
    for move in moves:
        fetch, last = move.fetch, stretches[-1] if stretches else None
        is_near = last and last[0] <= fetch.begin_bytes <= last[1] + _MERGE_GAP_BYTES
        if last and is_near and fetch.end_bytes - last[0] <= limit_bytes:
            last[2].append(move)
            stretches[-1] = (last[0], max(last[1], fetch.end_bytes), last[2])
            continue
        begins = range(fetch.begin_bytes, fetch.end_bytes, limit_bytes)
        stretches.extend((begin, min(begin + limit_bytes, fetch.end_bytes), [move]) for begin in begins)
    return stretches
