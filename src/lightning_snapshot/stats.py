"""What a save or load did, and how long it took: measured on the way, handed to callers, logged in one line."""

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Meter", "Stats"]

_logger = logging.getLogger("lightning_snapshot")


@dataclass(frozen=True, slots=True)
class Stats:
    """The record of one save or load on one rank.

    Attributes:
        operation: ``"save"`` or ``"load"``.
        path: The snapshot, as the caller named it.
        data_bytes: Bytes written to or read from data files by this rank. A load of a part reads whole blocks.
        files: Data files that were written or read.
        seconds: From the call to its end.
        stage_seconds: Its parts: ``plan``, ``write`` or ``read``, then ``commit`` or ``rebuild``.
        copy_seconds: Spent copying between tensors and staging memory, summed over threads.
        hash_seconds: Spent on checksums, summed over threads.
        device_seconds: Spent waiting for the storage to read or write, summed over threads.
        staging_bytes: Staging memory that was in use at the worst moment.
        stall_seconds: For how long the caller had to wait: all the time, except in saves that go on behind training.
    """

    operation: str
    path: str
    data_bytes: int
    files: int
    seconds: float
    stage_seconds: Mapping[str, float]
    copy_seconds: float
    hash_seconds: float
    device_seconds: float
    staging_bytes: int
    stall_seconds: float

    @property
    def gigabytes_per_second(self) -> float:
        """Data bytes over the whole time, in units of 10⁹ bytes per second."""
        return self.data_bytes / self.seconds / 1e9 if self.seconds else 0.0

    def __str__(self) -> str:
        """One line for a log."""
        verb = "saved" if self.operation == "save" else "loaded"
        waited = f" of which training waited {self.stall_seconds:.2f} s" if self.stall_seconds < self.seconds else ""
        stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.stage_seconds.items())
        return (
            f"{verb} {self.path}: {self.data_bytes / 1e6:,.1f} MB in {self.files} files, {self.seconds:.2f} s{waited}, "
            f"{self.gigabytes_per_second:.2f} GB/s ({stages}; threads: copy {self.copy_seconds:.2f}, hash "
            f"{self.hash_seconds:.2f}, device {self.device_seconds:.2f}; staging {self.staging_bytes / 2**20:.0f} MiB)"
        )


class Meter:
    """Collects the `Stats` of one save or load. Any thread may add to it."""

    def __init__(self, operation: str, path: str) -> None:
        self._operation = operation
        self._path = path
        self._begin = time.perf_counter()
        self._stages: dict[str, float] = {}
        self._threads = dict.fromkeys(("copy", "hash", "device"), 0.0)
        self._lock = threading.Lock()
        self._data_bytes = self._files = self._staging_bytes = self._peak_bytes = 0
        self._stall_seconds: float | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure a part of the operation; the thread that runs it calls this."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._stages[name] = self._stages.get(name, 0.0) + time.perf_counter() - begin

    @contextmanager
    def stalling(self) -> Iterator[None]:
        """Measure what the caller waits for, if not for all of it; for the first time, from the beginning on."""
        begin = self._begin if self._stall_seconds is None else time.perf_counter()
        try:
            yield
        finally:
            self._stall_seconds = (self._stall_seconds or 0.0) + time.perf_counter() - begin

    def add_wait(self, seconds: float) -> None:
        """The caller has waited before that."""
        self._begin -= seconds

    @contextmanager
    def time(self, what: str) -> Iterator[None]:
        """Measure ``"copy"``, ``"hash"`` or ``"device"`` on a thread."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            taken = time.perf_counter() - begin
            with self._lock:
                self._threads[what] += taken

    @contextmanager
    def staging(self, size_bytes: int) -> Iterator[None]:
        """Count staging memory that is in use for the duration of the ``with`` block."""
        with self._lock:
            self._staging_bytes += size_bytes
            self._peak_bytes = max(self._peak_bytes, self._staging_bytes)
        try:
            yield
        finally:
            with self._lock:
                self._staging_bytes -= size_bytes

    def count(self, *, data_bytes: int = 0, files: int = 0) -> None:
        """Add to the counters."""
        with self._lock:
            self._data_bytes += data_bytes
            self._files += files

    def finish(self) -> Stats:
        """The record, which is also logged at level INFO."""
        seconds = time.perf_counter() - self._begin
        stats = Stats(
            operation=self._operation,
            path=self._path,
            data_bytes=self._data_bytes,
            files=self._files,
            seconds=seconds,
            stage_seconds=dict(self._stages),
            copy_seconds=self._threads["copy"],
            hash_seconds=self._threads["hash"],
            device_seconds=self._threads["device"],
            staging_bytes=self._peak_bytes,
            stall_seconds=seconds if self._stall_seconds is None else self._stall_seconds,
        )
        _logger.info("%s", stats)
        return stats
