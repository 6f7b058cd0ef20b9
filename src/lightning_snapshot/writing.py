"""Runs a plan in a few threads; writes: moves bytes from tensors to files, block by block, and hashes them on the way.

A block is filled from the tensors, hashed and written. With `Writing.capture`, blocks that are not filled yet are
filled at once, into memory of their own, so that the tensors may change while the rest goes on. Those that it is told
to keep are read later, and whether they have changed by then is looked at.
"""

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

import xxhash

from lightning_snapshot.errors import StateChangedError
from lightning_snapshot.execute import PAGE_BYTES, Means, run
from lightning_snapshot.manifest import FileRecord
from lightning_snapshot.memory import Buffer, BufferPool, copy_memory, memory_at
from lightning_snapshot.storage import Transaction, Writer
from lightning_snapshot.tensors import TensorSource
from lightning_snapshot.write_plan import FilePlan

__all__ = ["Keep", "Writing"]

Keep: TypeAlias = Callable[[TensorSource], bool]
"""Says of which tensors a capture makes no copy, because whoever changes them waits for another capture."""

_MAX_NAMED = 3


class Writing:
    """The files of one rank while they are written.

    Args:
        files: This rank's part of the plan.
        sources: Logical path → where the bytes of the leaf come from.
        transaction: The save that has begun.
        means: What to do it with.
    """

    def __init__(
        self,
        files: Sequence[FilePlan],
        sources: Mapping[str, TensorSource | bytes],
        transaction: Transaction,
        means: Means,
    ) -> None:
        self._means = means
        self._jobs = [_FileWrite(plan, sources, transaction, means) for plan in files]
        self._changed = threading.Condition()
        self._unread: deque[_Block] = deque(block for job in self._jobs for block in job.blocks())
        self._captured: deque[tuple[_Block, BufferPool, Buffer]] = deque()
        self._failure: BaseException | None = None  # why `run` has to stop
        self._captures = 0  # calls of `capture` that go on
        self._reading = 0  # blocks whose tensors somebody looks at just now
        self._is_over = False
        sides = {
            source.tensor.device
            for source in sources.values()
            if isinstance(source, TensorSource) and not source.address
        }
        means.streams.follow(sides)

    @property
    def unread_bytes(self) -> int:
        """How much of the tensors has still to be looked at."""
        with self._changed:
            return sum(block.end - block.begin for block in self._unread)

    def capture(self, pool: BufferPool, keep: Keep | None = None) -> None:
        """Copy what has not been read yet. When this returns, the tensors may change, except for those that are kept.

        Where the pool is too small, this waits for `run`, which must then be going on in another thread. If that fails,
        this returns, and only `run` raises. If this fails, `run` raises, too.

        Args:
            pool: Gives memory for the copies, in blocks as large as those of the staging memory.
            keep: Tensors that must stay as they are until the next call, so that they need no copy now. If one of them
                changes nevertheless, `run` raises `StateChangedError`, as far as torch counts changes.
        """
        with self._changed:
            self._captures += 1
            wanted = self._take_unread(keep)
        try:
            run(iter(partial(self._next_capture, wanted, pool), None), self._means.threads)
        except BaseException as error:
            self.cancel(error)
            raise
        finally:
            with self._changed:
                self._captures -= 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._reading)

    def note_content(self) -> None:
        """Remember a checksum of everything that is kept, and fail if it is another one when it is read."""
        with self._changed:
            blocks = list(self._unread)
        run((partial(block.job.note_content, block.begin, block.end) for block in blocks), self._means.threads)

    def _take_unread(self, keep: Keep | None) -> "deque[_Block]":
        """The unread blocks that have to be copied; the others stay."""
        blocks, self._unread = self._unread, deque()
        wanted: deque[_Block] = deque()
        for block in blocks:
            tensors = block.job.tensors(block.begin, block.end)
            if not tensors:  # bytes do not change
                self._unread.append(block)
            elif keep is not None and all(map(keep, tensors.values())):
                block.job.note_versions(tensors)
                self._unread.append(block)
            else:
                wanted.append(block)
        return wanted

    def cancel(self, error: BaseException) -> None:
        """Let `run` raise an error as soon as it can, unless it is through by then."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def run(self) -> dict[str, FileRecord]:
        """Write all files and make them durable.

        Returns:
            The receipts: location → what was written.

        Raises:
            StorageError: The storage failed; nothing is published.
        """
        try:
            run(iter(self._next_block, None), self._means.threads)
        finally:
            with self._changed:
                self._is_over = True
                self._unread.clear()
                self._forget_captured()
            for job in self._jobs:
                job.close()
        return {job.plan.location: job.record() for job in self._jobs}

    def _next_capture(self, wanted: "deque[_Block]", pool: BufferPool) -> Callable[[], None] | None:
        with self._changed:
            if self._is_over or not wanted:
                return None
            block = wanted.popleft()
            self._reading += 1
        return partial(self._capture, block, pool)

    def _capture(self, block: "_Block", pool: BufferPool) -> None:
        try:
            buffer = pool.take()
            try:
                block.job.fill(buffer, block.begin, block.end)
            except BaseException:
                pool.give_back(buffer)
                raise
            with self._changed:
                self._captured.append((block, pool, buffer))
                if self._is_over:
                    self._forget_captured()
        finally:
            self._end_of_read()

    def _next_block(self) -> Callable[[], None] | None:
        """What there is to write: first what is captured, for whose memory somebody may be waiting."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._captured or self._unread or not self._captures)
            if self._failure is not None:
                raise self._failure
            if self._captured:
                return partial(self._write_captured, *self._captured.popleft())
            if not self._unread:
                return None
            block = self._unread.popleft()
            self._reading += 1
        return partial(block.job.write, block.begin, block.end, self._end_of_read)

    def _write_captured(self, block: "_Block", pool: BufferPool, buffer: Buffer) -> None:
        try:
            block.job.write_filled(block.begin, buffer.view[: block.end - block.begin])
        finally:
            pool.give_back(buffer)

    def _end_of_read(self) -> None:
        with self._changed:
            self._reading -= 1
            self._changed.notify_all()

    def _forget_captured(self) -> None:
        for _, pool, buffer in self._captured:
            pool.give_back(buffer)
        self._captured.clear()


class _Block(NamedTuple):
    """A stretch of a file that gets one checksum."""

    job: "_FileWrite"
    begin: int
    end: int


@dataclass(slots=True)
class _FileWrite:
    plan: FilePlan
    sources: Mapping[str, TensorSource | bytes]
    transaction: Transaction
    means: Means
    lock: threading.Lock = field(default_factory=threading.Lock)
    writer: Writer | None = None
    hashes: dict[int, str] = field(default_factory=dict)
    expected_hashes: dict[int, str] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ends = [piece.offset_bytes + piece.size_bytes for piece in self.plan.pieces]

    def blocks(self) -> Iterator[_Block]:
        for begin in range(0, self.plan.size_bytes, self.means.block_bytes):
            yield _Block(self, begin, min(begin + self.means.block_bytes, self.plan.size_bytes))

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def record(self) -> FileRecord:
        return FileRecord(self.plan.size_bytes, "".join(self.hashes[begin] for begin in sorted(self.hashes)))

    def write(self, begin: int, end: int, end_of_read: Callable[[], None]) -> None:
        """Fill, hash and write a block; says when the tensors have been read."""
        with ExitStack() as stack:
            reading = stack.enter_context(ExitStack())
            reading.callback(end_of_read)
            address = self._address(begin, end)
            if address:
                block = memory_at(address, end - begin)
                stack.callback(self.check_versions, begin, end)
            else:
                buffer = stack.enter_context(self.means.pool.buffer())
                stack.enter_context(self.means.meter.staging(self.means.pool.block_bytes))
                self.fill(buffer, begin, end)
                reading.close()
                block = buffer.view[: end - begin]
            self.write_filled(begin, block)

    def write_filled(self, begin: int, block: memoryview) -> None:
        """Hash and write a block that is filled; the last one to be written finishes the file."""
        means = self.means
        means.check()
        with self.lock:
            if self.writer is None:
                self.writer = self.transaction.create(self.plan.location, self.plan.size_bytes)
            writer = self.writer
        with means.meter.time("hash"):
            digest = xxhash.xxh3_64_hexdigest(block)
        if self.expected_hashes.get(begin, digest) != digest:
            raise self._changed_error(self.tensors(begin, begin + len(block)))
        with means.meter.time("device"):
            writer.write(begin, block)
        with self.lock:
            self.hashes[begin] = digest
            is_last = len(self.hashes) * means.block_bytes >= self.plan.size_bytes
        if is_last:
            with means.meter.time("device"):
                writer.finish()
            means.meter.count(data_bytes=self.plan.size_bytes, files=1)

    def _address(self, begin: int, end: int) -> int:
        """Where the whole block lies in the memory of one tensor, so that it need not be staged; else 0."""
        piece = self.plan.pieces[bisect_right(self.ends, begin)]
        source = self.sources[piece.path]
        if not isinstance(source, TensorSource) or not source.address:
            return 0
        if begin < piece.offset_bytes or end > piece.offset_bytes + piece.size_bytes:
            return 0
        address = source.address + piece.begin_bytes + begin - piece.offset_bytes
        return 0 if address % PAGE_BYTES else address

    def fill(self, buffer: Buffer, begin: int, end: int) -> None:
        """Put the bytes of a block into a buffer."""
        with self.means.meter.time("copy"):
            self._fill(buffer.view[: end - begin], buffer, begin, end)
        self.check_versions(begin, end)

    def tensors(self, begin: int, end: int) -> dict[str, TensorSource]:
        """What a block is read from: logical path → tensor."""
        pieces = self.plan.pieces
        found = {}
        for number in range(bisect_right(self.ends, begin), len(pieces)):
            if pieces[number].offset_bytes >= end:
                break
            path = pieces[number].path
            if isinstance(source := self.sources[path], TensorSource):
                found[path] = source
        return found

    def note_versions(self, tensors: Mapping[str, TensorSource]) -> None:
        """Remember how often tensors have changed so far, as torch counts it."""
        for path, source in tensors.items():
            self.versions.setdefault(path, source.tensor._version)  # noqa: SLF001  # as torch's documentation names it

    def check_versions(self, begin: int, end: int) -> None:
        """Called when a block has been read."""
        if self.versions:
            tensors = self.tensors(begin, end)
            changed = [
                path
                for path, source in tensors.items()
                if self.versions.get(path, source.tensor._version) != source.tensor._version  # noqa: SLF001  # as above
            ]
            if changed:
                raise self._changed_error(changed)

    def note_content(self, begin: int, end: int) -> None:
        """Remember the checksum of a block."""
        with self.means.pool.buffer() as buffer:
            self._fill(buffer.view[: end - begin], buffer, begin, end)
            self.expected_hashes[begin] = xxhash.xxh3_64_hexdigest(buffer.view[: end - begin])

    def _changed_error(self, paths: Iterable[str]) -> StateChangedError:
        names = list(paths)
        more = f" or {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        return StateChangedError(
            f"{' or '.join(names[:_MAX_NAMED])}{more}: expected no change between the save and the next step of the "
            "optimizer, found one; nothing was saved. With overlap=True, only optimizers may change what they own; "
            "use async_save=True without overlap"
        )

    def _fill(self, block: memoryview, buffer: Buffer, begin: int, end: int) -> None:
        filled = begin
        for piece in self.plan.pieces[bisect_right(self.ends, begin) :]:
            start, stop = max(piece.offset_bytes, begin), min(piece.offset_bytes + piece.size_bytes, end)
            if start >= end:
                break
            if start > filled:  # gaps are zero, not old buffer content
                block[filled - begin : start - begin] = bytes(start - filled)
            source, inner = self.sources[piece.path], piece.begin_bytes + start - piece.offset_bytes
            if not isinstance(source, TensorSource):
                block[start - begin : stop - begin] = source[inner : inner + stop - start]
            elif source.address:
                copy_memory(buffer.address + start - begin, source.address + inner, stop - start)
            else:
                with self.means.streams.beside_training(source.tensor.device, buffer):
                    source.copy_into(inner, buffer.tensor[start - begin : stop - begin])
            filled = stop
        if end > filled:
            block[filled - begin :] = bytes(end - filled)
