"""Checks a whole snapshot, for all ranks, without loading it into anything.

First the metadata, then every data file, block by block. A problem does not end the check: the report names all.
"""

import errno
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias, TypeVar
from zipfile import BadZipFile, ZipFile

import xxhash

from lightning_snapshot.errors import MetadataError, MissingDataError, SnapshotError, StorageError
from lightning_snapshot.manifest import FileRecord, decode
from lightning_snapshot.memory import BufferPool
from lightning_snapshot.options import Options
from lightning_snapshot.storage import METADATA_NAME, Reader, Storage
from lightning_snapshot.survey import TO_THE_END, Claim, Problem, Survey

__all__ = ["Problem", "Progress", "Report", "verify"]

_T = TypeVar("_T")

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes that are checked so far and those to check, by the thread that called `verify`."""

# Checks that lose the race against other processes that save over the snapshot, before giving up.
_MAX_ATTEMPTS = 10
# The disk says that it cannot give back what was written; other failures are no fault of the snapshot.
_BAD_MEDIUM = (errno.EIO, errno.EBADMSG)
# A longer table of contents would decide how much memory is taken.
_MAX_ZIP_READ_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Report:
    """What a check has found.

    Attributes:
        problems: First those of the metadata, then those of the files; none if all is well.
        files_checked: Data files that were looked at.
        bytes_checked: Bytes whose checksum was compared.
        unverifiable_files: Files without checksums, because torchsnapshot wrote them: only their presence, length and
            structure were checked.
        seconds: How long it took.
    """

    problems: tuple[Problem, ...]
    files_checked: int
    bytes_checked: int
    unverifiable_files: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not self.problems


def verify(storage: Storage, options: Options, progress: Progress | None = None) -> Report:
    """Check everything of a snapshot: metadata, entries of all ranks, files, checksums. Nothing is unpickled.

    Args:
        storage: The snapshot.
        options: The knobs; checksums are compared whatever ``options.verify`` says.
        progress: Hears how far the check is.

    Raises:
        SnapshotNotFoundError: There is nothing.
        NotASnapshotError: There is something else.
        MetadataError: The metadata is no file.
        StorageError: The storage failed, or others kept saving over the snapshot.
    """
    begin_seconds = time.perf_counter()
    for _ in range(_MAX_ATTEMPTS):
        metadata = storage.read_metadata()
        report = _verify(storage, metadata, options, progress)
        # What looks like damage may be a snapshot that was replaced meanwhile, and whose files are gone.
        if report.ok or storage.read_metadata() == metadata:
            return replace(report, seconds=time.perf_counter() - begin_seconds)
    msg = f"{storage.url}: expected a snapshot at rest, but it was replaced during each of {_MAX_ATTEMPTS} checks"
    raise StorageError(errno.EBUSY, msg)


def _verify(storage: Storage, metadata: bytes, options: Options, progress: Progress | None) -> Report:
    try:
        manifest = decode(metadata, source=METADATA_NAME)
    except MetadataError as error:
        return Report((Problem("damaged", METADATA_NAME, None, "", str(error), ()),), 0, 0, 0, 0.0)
    survey = Survey(manifest)
    claims: dict[str, list[Claim]] = {location: [] for location in survey.records}
    for claim in survey.claims:
        claims.setdefault(claim.location, []).append(claim)
    files = [_File(location, survey.records.get(location), of_file) for location, of_file in sorted(claims.items())]
    check = _Check(storage, options, survey.block_bytes)
    check.run(files, progress)
    problems = dict.fromkeys((*survey.problems, *check.problems))
    unverifiable = sum(file.record is None for file in files)
    return Report(tuple(problems), len(files), check.checked_bytes, unverifiable, 0.0)


@dataclass(slots=True)
class _File:
    """A data file: what it must be, and what it is for. It is opened by the first task that needs it."""

    location: str
    record: FileRecord | None
    claims: list[Claim]
    lock: threading.Lock = field(default_factory=threading.Lock)
    reader: Reader | None = None

    def open(self, storage: Storage) -> Reader:
        with self.lock:
            if self.reader is None:
                self.reader = storage.open(self.location)
            return self.reader

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()

    def paths(self, begin_bytes: int = 0, end_bytes: int = TO_THE_END) -> tuple[str, ...]:
        """The values that need something of a stretch."""
        claims = (claim for claim in self.claims if claim.begin_bytes < end_bytes and claim.end_bytes > begin_bytes)
        return tuple(dict.fromkeys(claim.path for claim in claims))


@dataclass(frozen=True, slots=True)
class _Result:
    """What a task says of its file."""

    file: _File
    problems: tuple[Problem, ...] = ()
    checked_bytes: int = 0


_Task: TypeAlias = Callable[[], _Result]


class _Check:
    """Looks at all files in a few threads."""

    def __init__(self, storage: Storage, options: Options, block_bytes: int) -> None:
        self._storage = storage
        self._threads = max(options.threads, storage.min_threads)
        self._block_bytes = block_bytes
        self._pool = BufferPool(options.memory_budget_bytes, block_bytes)
        self.problems: list[Problem] = []
        self.checked_bytes = 0

    def run(self, files: Sequence[_File], progress: Progress | None) -> None:
        total_bytes = sum(file.record.size_bytes for file in files if file.record is not None)
        last: _File | None = None
        try:
            for result in _in_order(self._file_tasks(files), self._threads):
                if last is not None and last is not result.file:
                    last.close()
                last = result.file
                self.problems += result.problems
                self.checked_bytes += result.checked_bytes
                if progress is not None and result.checked_bytes:
                    progress(self.checked_bytes, total_bytes)
        finally:
            for file in files:
                file.close()
        damaged = {problem.location for problem in self.problems}
        sound = (file for file in files if file.location not in damaged)
        for result in _in_order(self._zip_tasks(sound), self._threads):
            self.problems += result.problems

    def _file_tasks(self, files: Iterable[_File]) -> Iterator[_Task]:
        for file in files:
            yield partial(self._check_length, file)
            if file.record is not None:
                for index, begin in enumerate(range(0, file.record.size_bytes, self._block_bytes)):
                    span = begin, min(begin + self._block_bytes, file.record.size_bytes)
                    yield partial(self._check_block, file, span, file.record.hashes[16 * index : 16 * index + 16])

    def _check_length(self, file: _File) -> _Result:
        try:
            reader = file.open(self._storage)
        except SnapshotError as error:
            return _Result(file, (_problem_of(error, file.location, None, file.paths()),))
        return _Result(file, tuple(_find_wrong_lengths(file, reader.size_bytes)))

    def _check_block(self, file: _File, span: tuple[int, int], expected: str) -> _Result:
        try:
            reader = file.open(self._storage)
        except SnapshotError:
            return _Result(file)  # the task before the first block says so
        if span[1] > reader.size_bytes:
            return _Result(file)
        with self._pool.buffer() as buffer:
            block = buffer.view[: span[1] - span[0]]
            try:
                reader.read_into(span[0], block)
            except SnapshotError as error:
                return _Result(file, (_problem_of(error, file.location, span, file.paths(*span)),))
            found = xxhash.xxh3_64_hexdigest(block)
        size_bytes = span[1] - span[0]
        if found == expected:
            return _Result(file, (), size_bytes)
        texts = f"checksum {expected}", f"checksum {found}"
        return _Result(file, (Problem("damaged", file.location, span, *texts, file.paths(*span)),), size_bytes)

    def _zip_tasks(self, files: Iterable[_File]) -> Iterator[_Task]:
        for file in files:
            # Equal objects share a stretch.
            for span in dict.fromkeys((claim.begin_bytes, claim.end_bytes) for claim in file.claims if claim.is_zip):
                yield partial(self._check_zip, file, span)

    def _check_zip(self, file: _File, span: tuple[int, int]) -> _Result:
        paths = file.paths(*span)
        try:
            with closing(self._storage.open(file.location)) as reader:
                defect = _find_zip_defect(_Stretch(reader, span[0], min(span[1], reader.size_bytes)))
        except SnapshotError as error:
            return _Result(file, (_problem_of(error, file.location, None, paths),))
        if not defect:
            return _Result(file)
        shown = None if span[1] == TO_THE_END else span
        expected = "a value in torch.save's format"
        return _Result(file, (Problem("damaged", file.location, shown, expected, defect, paths),))


def _in_order(tasks: Iterable[Callable[[], _T]], threads: int) -> Iterator[_T]:
    """The results of tasks that run in a few threads, in the order of the tasks; few tasks wait at a time."""
    pending: deque[Future[_T]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="lightning-snapshot") as executor:
        try:
            for task in tasks:
                pending.append(executor.submit(task))
                if len(pending) > 2 * threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _problem_of(
    error: SnapshotError, location: str, byte_range: tuple[int, int] | None, paths: tuple[str, ...]
) -> Problem:
    """The problem that an error stands for.

    Raises:
        StorageError: It is none of the snapshot.
    """
    if isinstance(error, StorageError) and error.errno not in _BAD_MEDIUM:
        raise error
    if isinstance(error, MissingDataError):
        return Problem("missing", location, None, "a file", "none", paths)
    if isinstance(error, MetadataError):
        return Problem("inconsistent", location, None, "", str(error), paths)
    return Problem("damaged", location, byte_range, "", str(error), paths)


def _find_wrong_lengths(file: _File, found_bytes: int) -> Iterator[Problem]:
    """Compare the length of a file with its record, and that with what its values want."""
    size_bytes = found_bytes
    if file.record is not None and file.record.size_bytes != found_bytes:
        size_bytes = file.record.size_bytes
        yield Problem("damaged", file.location, None, f"{size_bytes} bytes", f"{found_bytes} bytes", file.paths())
    wrong = [claim for claim in file.claims if not _fits(claim, size_bytes)]
    if wrong:
        needed = max(wrong, key=lambda claim: claim.end_bytes)
        expected = f"{needed.end_bytes} bytes" + ("" if needed.is_whole else " or more")
        paths = tuple(dict.fromkeys(claim.path for claim in wrong))
        # Without a record nobody knows which of the two is wrong; files are cut more often than metadata is mistaken.
        if file.record is None:
            yield Problem("damaged", file.location, None, expected, f"{size_bytes} bytes", paths)
        else:
            yield Problem("inconsistent", file.location, None, expected, f"a record of {size_bytes} bytes", paths)


def _fits(claim: Claim, size_bytes: int) -> bool:
    if claim.end_bytes == TO_THE_END:
        return True
    return claim.end_bytes == size_bytes if claim.is_whole else claim.end_bytes <= size_bytes


# --- values in torch.save's format -----------------------------------------------------------------------------------


class _Stretch:
    """A stretch of a file, in the way `zipfile` reads files."""

    def __init__(self, reader: Reader, begin_bytes: int, end_bytes: int) -> None:
        self._reader = reader
        self._begin = begin_bytes
        self._size = end_bytes - begin_bytes
        self._position = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            msg = f"an offset of {base + offset} bytes"
            raise BadZipFile(msg)
        self._position = base + offset
        return self._position

    def read(self, count: int = -1, /) -> bytes:
        rest = max(0, self._size - self._position)
        data = bytearray(rest if count < 0 else min(count, rest))
        if len(data) > _MAX_ZIP_READ_BYTES:
            msg = f"a table of contents of {len(data)} bytes"
            raise BadZipFile(msg)
        if data:
            self._reader.read_into(self._begin + self._position, memoryview(data))
        self._position += len(data)
        return bytes(data)


def _find_zip_defect(stretch: _Stretch) -> str:
    """Say why a stretch is nothing that ``torch.load`` could begin with; empty if it is."""
    try:
        with ZipFile(stretch) as archive:
            names = archive.namelist()
            for member in archive.infolist():
                archive.open(member).close()  # compares the member's own header with the table of contents
    except SnapshotError:
        raise
    # Damaged tables of contents make zipfile raise almost anything.
    except (ArithmeticError, BadZipFile, EOFError, LookupError, RuntimeError, ValueError, struct.error) as error:
        return f"a damaged zip file: {error}"
    return "" if any(name.endswith("/data.pkl") for name in names) else "a zip file without data.pkl"
