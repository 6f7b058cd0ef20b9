"""What the device can: the same bytes past the page cache, in large aligned pieces, by one, two and four threads."""

import json
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

THREADS = (1, 2, 4)
_BLOCK_BYTES = 8 * 2**20
_ALIGNMENT_BYTES = 4096


class RawDevice:
    """Writes and reads one file with ``O_DIRECT``.

    Args:
        size_bytes: Size of the file.
        threads: Each has one page-aligned buffer.
    """

    def __init__(self, size_bytes: int, threads: int) -> None:
        self.name = f"raw device, {threads} thread{'s' if threads > 1 else ''}"
        self.size_bytes = -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._threads = threads
        self._buffers = [memoryview(mmap.mmap(-1, _BLOCK_BYTES)) for _ in range(threads)]
        for index, buffer in enumerate(self._buffers):
            buffer[:] = np.random.Generator(np.random.SFC64(index)).bytes(_BLOCK_BYTES)

    def write(self, path: Path) -> None:
        """Write the file and make it durable."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o666)
        try:
            os.posix_fallocate(descriptor, 0, self.size_bytes)
            self._run(lambda buffer, offset: os.pwrite(descriptor, buffer, offset))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def read(self, path: Path) -> None:
        """Read the whole file."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            self._run(lambda buffer, offset: os.preadv(descriptor, [buffer], offset))
        finally:
            os.close(descriptor)

    def _run(self, move: Callable[[memoryview, int], int]) -> None:
        def every_nth_block(index: int) -> None:
            for offset in range(index * _BLOCK_BYTES, self.size_bytes, self._threads * _BLOCK_BYTES):
                piece = self._buffers[index][: min(_BLOCK_BYTES, self.size_bytes - offset)]
                if move(piece, offset) != len(piece):
                    raise SystemExit(f"expected to move {len(piece)} bytes at once, but fewer were moved")

        with ThreadPoolExecutor(self._threads) as executor:
            list(executor.map(every_nth_block, range(self._threads)))


def fio_is_there() -> bool:
    """Whether the raw figures can be compared with fio's."""
    return shutil.which("fio") is not None


def fio(path: Path, size_bytes: int, direction: str) -> float:
    """Bytes per second that fio moves, with four requests in flight.

    Args:
        path: File that is written, or that exists and is read.
        size_bytes: Rounded to blocks of 8 MiB.
        direction: ``write`` or ``read``.
    """
    size_bytes = max(1, size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
    options = {
        "name": "raw",
        "filename": path,
        "size": size_bytes,
        "rw": direction,
        "bs": _BLOCK_BYTES,
        "direct": 1,
        "ioengine": "libaio",
        "iodepth": 4,
        "fallocate": "posix",
        "end_fsync": 1,
        "output-format": "json",
    }
    command = ["fio", *(f"--{name}={value}" for name, value in options.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return float(job[direction]["bw_bytes"])
