"""Runs a plan: moves bytes between tensors and files, block by block, in a few threads, and hashes them on the way."""

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TypeAlias

import xxhash

from lightning_snapshot.errors import ChecksumError, DataError, MissingDataError
from lightning_snapshot.manifest import FileRecord
from lightning_snapshot.memory import Buffer, BufferPool
from lightning_snapshot.read_plan import Blob, Fetch, ReadPlan
from lightning_snapshot.storage import Reader, Storage, Transaction, Writer
from lightning_snapshot.tensors import TensorSource, TensorTarget
from lightning_snapshot.write_plan import FilePlan

__all__ = ["read_all", "write_all"]

# Reads of stretches that lie at most this far apart are cheaper as one.
_MERGE_GAP_BYTES = 64 * 1024
# Tensors that an error message lists.
_MAX_NAMED = 5


def _run(tasks: Iterable[Callable[[], None]], threads: int) -> None:
    """Run tasks in a thread pool. The first error cancels those that have not begun, and is raised."""
    with ThreadPoolExecutor(threads, thread_name_prefix="lightning-snapshot") as executor:
        futures: list[Future[None]] = [executor.submit(task) for task in tasks]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            executor.shutdown(wait=True, cancel_futures=True)
    for future in futures:
        if not future.cancelled():
            future.result()


# --- writing ---------------------------------------------------------------------------------------------------------


def write_all(
    files: Sequence[FilePlan],
    sources: Mapping[str, TensorSource | bytes],
    transaction: Transaction,
    pool: BufferPool,
    *,
    block_bytes: int,
    threads: int,
) -> dict[str, FileRecord]:
    """Write all files of a plan and make them durable.

    Args:
        files: This rank's part of the plan.
        sources: Logical path → where the bytes of the leaf come from.
        transaction: The save that has begun.
        pool: Staging buffers of ``block_bytes``.
        block_bytes: Stretch of a file that gets one checksum.
        threads: How many blocks are in work at once.

    Returns:
        The receipts: location → what was written.

    Raises:
        StorageError: The storage failed; nothing is published.
    """
    jobs = [_FileWrite(plan, sources, transaction, pool, block_bytes) for plan in files]
    try:
        _run((task for job in jobs for task in job.tasks()), threads)
    finally:
        for job in jobs:
            job.close()
    return {job.plan.location: job.record() for job in jobs}


@dataclass(slots=True)
class _FileWrite:
    plan: FilePlan
    sources: Mapping[str, TensorSource | bytes]
    transaction: Transaction
    pool: BufferPool
    block_bytes: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    writer: Writer | None = None
    hashes: dict[int, str] = field(default_factory=dict)

    ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ends = [piece.offset_bytes + piece.size_bytes for piece in self.plan.pieces]

    def tasks(self) -> Iterator[Callable[[], None]]:
        """One task per block; the last one to end finishes the file."""
        for begin in range(0, self.plan.size_bytes, self.block_bytes):
            yield partial(self._write_block, begin)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def record(self) -> FileRecord:
        return FileRecord(self.plan.size_bytes, "".join(self.hashes[begin] for begin in sorted(self.hashes)))

    def _open(self) -> Writer:
        with self.lock:
            if self.writer is None:
                self.writer = self.transaction.create(self.plan.location, self.plan.size_bytes)
            return self.writer

    def _write_block(self, begin: int) -> None:
        end = min(begin + self.block_bytes, self.plan.size_bytes)
        writer = self._open()
        with self.pool.buffer() as buffer:
            block = buffer.view[: end - begin]
            self._fill(block, buffer, begin, end)
            digest = xxhash.xxh3_64_hexdigest(block)
            writer.write(begin, block)
        with self.lock:
            self.hashes[begin] = digest
            is_last = len(self.hashes) * self.block_bytes >= self.plan.size_bytes
        if is_last:
            writer.finish()

    def _fill(self, block: memoryview, buffer: Buffer, begin: int, end: int) -> None:
        filled = begin
        for piece in self.plan.pieces[bisect_right(self.ends, begin) :]:
            start, stop = max(piece.offset_bytes, begin), min(piece.offset_bytes + piece.size_bytes, end)
            if start >= end:
                break
            block[filled - begin : start - begin] = bytes(start - filled)  # gaps are zero, not old buffer content
            source, inner = self.sources[piece.path], piece.begin_bytes + start - piece.offset_bytes
            if isinstance(source, TensorSource):
                source.copy_into(inner, buffer.tensor[start - begin : stop - begin])
            else:
                block[start - begin : stop - begin] = source[inner : inner + stop - start]
            filled = stop
        block[filled - begin :] = bytes(end - filled)


# --- reading ---------------------------------------------------------------------------------------------------------


def read_all(
    plan: ReadPlan,
    target_of: Callable[[str], TensorTarget],
    storage: Storage,
    records: Mapping[str, FileRecord],
    pool: BufferPool,
    *,
    block_bytes: int,
    threads: int,
    verify: bool,
) -> dict[Blob, bytearray]:
    """Read everything that a plan asks for.

    Args:
        plan: What to read.
        target_of: Gives the place of a tensor's elements, by logical path; asked when the sizes of all files are known
            to be right, from several threads.
        storage: The snapshot.
        records: Location → what each file must be; empty for snapshots of torchsnapshot.
        pool: Staging buffers of at least ``block_bytes``.
        block_bytes: Stretch of a file that has one checksum.
        threads: How many stretches are in work at once.
        verify: Compare checksums where there are some.

    Returns:
        The bytes of each blob.

    Raises:
        DataError: A file is missing, too short, too long or damaged. Targets are then partly filled.
        StorageError: The storage failed.
    """
    reads = _Reads(target_of, storage, records, pool, block_bytes, verify)
    blobs = {(blob.location, blob.byte_range): bytearray() for blob in plan.blobs}
    files = [tuple(group) for _, group in groupby(plan.fetches, key=lambda fetch: fetch.location)]
    try:
        # All files are looked at before memory is taken for the first tensor.
        tasks = [task for fetches in files for task in reads.fetch_tasks(fetches)]
        names = {(blob.location, blob.byte_range): blob.path for blob in plan.blobs}
        tasks.extend(partial(reads.read_blob, *key, names[key], out) for key, out in blobs.items())
        _run(tasks, threads)
    finally:
        reads.close()
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
    pool: BufferPool
    block_bytes: int
    verify: bool
    files: list[_OpenFile] = field(default_factory=list)

    def close(self) -> None:
        for file in self.files:
            file.close()

    def fetch_tasks(self, fetches: Sequence[Fetch]) -> Iterator[Callable[[], None]]:
        """One task per stretch of one file; ``fetches`` are all of that file, in order."""
        location, path = fetches[0].location, fetches[0].path
        with closing(self._open(location, path)) as reader:
            size_bytes = reader.size_bytes
        for fetch in fetches:
            expected = size_bytes if fetch.file_size_bytes is None else fetch.file_size_bytes
            if size_bytes != expected or fetch.end_bytes > size_bytes:
                needed = f"{fetch.end_bytes} bytes or more" if fetch.file_size_bytes is None else f"{expected} bytes"
                msg = f"{fetch.path}: expected {needed} in {location}, found {size_bytes} bytes"
                raise DataError(msg)
        record = self.records.get(location)
        stretches = _merged(fetches, self.block_bytes) if record is None else _blocks(fetches, self.block_bytes)
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
        record = self.records.get(location)
        if record is not None and byte_range is not None:
            begin = begin // self.block_bytes * self.block_bytes  # checksums are of whole blocks
            end = min(-(-end // self.block_bytes) * self.block_bytes, reader.size_bytes)
        out.extend(bytes(end - begin))
        with memoryview(out) as view:
            for start in range(begin, end, self.block_bytes):
                with view[start - begin : min(start + self.block_bytes, end) - begin] as block:
                    reader.read_into(start, block)
                    self._check(block, location, start, self._digest(record, start), [path])
        if record is not None and byte_range is not None:
            del out[byte_range[1] - begin :]
            del out[: byte_range[0] - begin]

    def _open(self, location: str, path: str) -> Reader:
        try:
            reader = self.storage.open(location)
        except MissingDataError as error:
            msg = f"{path}: {error}"
            raise MissingDataError(msg) from error
        record = self.records.get(location)
        if record is not None and record.size_bytes != reader.size_bytes:
            reader.close()
            msg = f"{path}: expected {record.size_bytes} bytes in {location}, found {reader.size_bytes} bytes"
            raise DataError(msg)
        return reader

    def _digest(self, record: FileRecord | None, begin: int) -> str:
        if record is None or not self.verify:
            return ""
        index = begin // self.block_bytes
        return record.hashes[16 * index : 16 * index + 16]

    def _read_stretch(self, file: _OpenFile, begin: int, end: int, members: Sequence[Fetch], digest: str) -> None:
        with self.pool.buffer() as buffer, file as reader:
            block = buffer.view[: end - begin]
            reader.read_into(begin, block)
            self._check(block, members[0].location, begin, digest, [fetch.path for fetch in members])
            for fetch in members:
                start, stop = max(fetch.begin_bytes, begin), min(fetch.end_bytes, end)
                self.target_of(fetch.path).scatter(fetch, start, buffer.tensor[start - begin : stop - begin])

    def _check(self, block: memoryview, location: str, begin: int, digest: str, paths: Sequence[str]) -> None:
        if not digest:
            return
        found = xxhash.xxh3_64_hexdigest(block)
        if found != digest:
            shown = ", ".join(paths[:_MAX_NAMED]) + (" and more" if len(paths) > _MAX_NAMED else "")
            msg = (
                f"{shown}: the bytes {begin} to {begin + len(block)} of {location} in {self.storage.url} changed since "
                f"they were written: expected checksum {digest}, found {found}"
            )
            raise ChecksumError(msg)


_Stretch: TypeAlias = tuple[int, int, list[Fetch]]
"""Begin and end in a file, and the fetches that lie in it, wholly or in part."""


def _blocks(fetches: Sequence[Fetch], block_bytes: int) -> list[_Stretch]:
    """The blocks with a checksum that hold something wanted."""
    members: dict[int, list[Fetch]] = {}
    for fetch in fetches:
        for index in range(fetch.begin_bytes // block_bytes, -(-fetch.end_bytes // block_bytes)):
            members.setdefault(index, []).append(fetch)
    return [(index * block_bytes, (index + 1) * block_bytes, members[index]) for index in sorted(members)]


def _merged(fetches: Sequence[Fetch], limit_bytes: int) -> list[_Stretch]:
    """Stretches of whole elements: large fetches cut, small neighbours merged."""
    stretches: list[_Stretch] = []
    for fetch in fetches:
        last = stretches[-1] if stretches else None
        if last and fetch.begin_bytes - last[1] <= _MERGE_GAP_BYTES and fetch.end_bytes - last[0] <= limit_bytes:
            stretches[-1] = (last[0], max(last[1], fetch.end_bytes), [*last[2], fetch])
            continue
        begins = range(fetch.begin_bytes, fetch.end_bytes, limit_bytes)
        stretches.extend((begin, min(begin + limit_bytes, fetch.end_bytes), [fetch]) for begin in begins)
    return stretches
