"""Durable saves of what all ranks hold, by 1, 2 and 4 processes: on storage with a limit per rank, and on the disk."""

import asyncio
import io
import multiprocessing
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed.checkpoint as dcp
from common import OURS, State
from peers import torchsnapshot
from torch import distributed
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torchsnapshot.storage_plugins.fs import FSStoragePlugin

from lightning_snapshot import Snapshot
from lightning_snapshot.group import Group
from lightning_snapshot.options import Options
from lightning_snapshot.save_each import save_each
from lightning_snapshot.session import Session
from lightning_snapshot.storage.local import LocalStorage
from lightning_snapshot.storage.posix import Posix
from lightning_snapshot.together import Save

_LIMIT_BYTES_PER_SECOND = 200e6
_LIMITED = "200 MB/s for each rank"
_DISK = "the disk"
_WORLD_SIZES = (1, 2, 4)
_SHARE = 0.25  # of the state of the other benchmarks, because each process has one


class Throttle:
    """Makes writing take as long as it would on a slower storage, for all threads of a process together."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def reserve(self, size_bytes: int) -> float:
        """Seconds to wait from now until so many bytes are through."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + size_bytes / self._bytes_per_second
            return self._free_at - now

    def wait(self, size_bytes: int) -> None:
        """Wait that long."""
        time.sleep(self.reserve(size_bytes))


NO_LIMIT = Throttle(float("inf"))


# --- who saves -------------------------------------------------------------------------------------------------------


class _ThrottledPosix(Posix):
    def __init__(self, throttle: Throttle) -> None:
        self._throttle = throttle

    def write(self, descriptor: int, buffer: memoryview, offset_bytes: int) -> int:
        written = super().write(descriptor, buffer, offset_bytes)
        self._throttle.wait(written)
        return written


class _AllShared:
    def is_shared(self, path: str) -> bool:
        return True

    def is_split(self, path: str, tensor: torch.Tensor) -> bool:
        return True


def _save_ours(state: State, path: Path, throttle: Throttle) -> None:
    posix = _ThrottledPosix(throttle)
    save = Save(str(path), lambda at: LocalStorage(Path(at), at, posix), "s", Options(), Session(), Group.of())
    save_each(lambda: {"state": state}, save, _AllShared())


def _save_torchsnapshot(state: State, path: Path, throttle: Throttle) -> None:
    real = FSStoragePlugin.write

    async def write(self: Any, write_io: Any) -> None:
        await real(self, write_io)
        await asyncio.sleep(throttle.reserve(len(memoryview(write_io.buf).cast("B"))))

    FSStoragePlugin.write = write
    try:
        torchsnapshot.Snapshot.take(str(path), {"state": torchsnapshot.StateDict(**state)}, replicated=["**"])
    finally:
        FSStoragePlugin.write = real


class _ThrottledStream:
    def __init__(self, stream: Any, throttle: Throttle) -> None:
        self._stream = stream
        self._throttle = throttle

    def write(self, data: Any) -> int:
        self._throttle.wait(memoryview(data).nbytes)
        return self._stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _ThrottledFileSystem(FileSystem):
    def __init__(self, throttle: Throttle) -> None:
        self._throttle = throttle

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            yield _ThrottledStream(stream, self._throttle)


def _save_dcp(state: State, path: Path, throttle: Throttle) -> None:
    writer = FileSystemWriter(path)
    writer.fs = _ThrottledFileSystem(throttle)
    dcp.save(state, storage_writer=writer)


def _save_lightning(state: State, path: Path, throttle: Throttle) -> None:
    """Rank 0 alone, through memory, as Lightning's ``TorchCheckpointIO``."""
    if distributed.get_rank() == 0:
        content = io.BytesIO()
        torch.save(state, content)
        with path.open("wb") as file:
            throttle.wait(file.write(content.getbuffer()))


SAVERS: Mapping[str, Callable[[State, Path, Throttle], None]] = {
    OURS: _save_ours,
    "torchsnapshot": _save_torchsnapshot,
    "DCP": _save_dcp,
    "Lightning's default": _save_lightning,
}


# --- measuring -------------------------------------------------------------------------------------------------------


def _measure(rank: int, world_size: int, folder: Path, scale: float, rounds: int, results: Any) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    state = common.state_a(scale * _SHARE)
    path = folder / "checkpoint"
    for saver in SAVERS.values():
        saver({"warm": torch.ones(10)}, folder / f"warm-{saver.__name__}", NO_LIMIT)
    for number in range(rounds):
        names = [*SAVERS][number % len(SAVERS) :] + [*SAVERS][: number % len(SAVERS)]
        for where, name in [(where, name) for where in (_LIMITED, _DISK) for name in names]:
            if rank == 0:
                common.drop_page_cache(folder)
            distributed.barrier()
            begin = time.perf_counter()
            SAVERS[name](state, path, Throttle(_LIMIT_BYTES_PER_SECOND) if where == _LIMITED else NO_LIMIT)
            distributed.barrier()
            if rank == 0:
                common.sync_tree(path)
                results.put((where, name, time.perf_counter() - begin))
                if name == OURS:
                    common.check_equal(
                        name, Snapshot(path, distributed.group.WORLD).get_state_dict_for_key("state"), state
                    )
                common.remove(path)
            distributed.barrier()
    distributed.destroy_process_group()


def _run(world_size: int, folder: Path, scale: float, rounds: int) -> list[tuple[str, str, float]]:
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [
        context.Process(target=_measure, args=(rank, world_size, folder, scale, rounds, results))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    found = []
    while any(process.is_alive() for process in ranks) or not results.empty():
        while not results.empty():
            found.append(results.get())
        time.sleep(0.05)
    if any(process.exitcode for process in ranks):
        raise SystemExit("a rank failed; see above")
    return found


def main() -> None:
    """Run it."""
    arguments = common.parse_arguments(__doc__ or "")
    samples: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for world_size in _WORLD_SIZES:
        print(f"{world_size} ranks", file=sys.stderr, flush=True)
        with common.scratch(arguments.dir) as folder:
            for where, name, taken in _run(world_size, folder, arguments.scale, arguments.rounds):
                samples[where, name, world_size].append(taken)
    medians = {key: common.middle(values) for key, values in samples.items()}
    rows = [
        {"storage": where, "name": name, "ranks": ranks, "save_seconds": medians[where, name, ranks], "samples": values}
        for (where, name, ranks), values in samples.items()
    ]
    ratios = {
        "two_ranks_vs_one": medians[_LIMITED, OURS, 2] / medians[_LIMITED, OURS, 1],
        "vs_torchsnapshot": medians[_LIMITED, "torchsnapshot", 2] / medians[_LIMITED, OURS, 2],
    }
    header = ["durable save s", *(f"{count} rank{'s' if count > 1 else ''}" for count in _WORLD_SIZES)]
    tables = []
    for where in (_LIMITED, _DISK):
        cells = [[name, *(common.span(samples[where, name, count], 2) for count in _WORLD_SIZES)] for name in SAVERS]
        tables += [f"On {where}:", common.table(header, cells)]
    size = common.size_of(common.state_a(arguments.scale * _SHARE)) / 1e6
    common.report("ranks", arguments, "\n\n".join([f"{size:,.0f} MB that all ranks hold.", *tables]), rows, ratios)


if __name__ == "__main__":
    main()
