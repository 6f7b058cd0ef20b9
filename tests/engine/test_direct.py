"""Data that goes between the memory of a tensor and the disk directly, past staging memory or past the page cache."""

import errno
import json
import mmap
import os
from pathlib import Path

import pytest
import torch

from lightning_snapshot.manifest import EXTENSION_KEY, seal
from lightning_snapshot.options import Options
from lightning_snapshot.restore import load
from lightning_snapshot.save import save
from lightning_snapshot.session import Session
from lightning_snapshot.storage import METADATA_NAME
from lightning_snapshot.storage.local import LocalStorage
from lightning_snapshot.storage.memory import MemoryStorage
from lightning_snapshot.storage.posix import Posix
from tests.engine.strategies import new_storage

MIB = 1024 * 1024
PAGE = 4096


def around(*sizes: int) -> set[int]:
    return {size + step for size in sizes for step in (-1, 0, 1)}


def random_bytes(size: int) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(os.urandom(size)), dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
    )


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# --- past the page cache ----------------------------------------------------------------------------------------------


class DirectPosix(Posix):
    """Tells what goes past the page cache.

    Args:
        is_able: Whether the file system knows direct access.
        refuses: ``"read"`` or ``"write"``: refused past the page cache, as file systems do that want other alignments.
        most_bytes: How much one read or write transfers at most.
    """

    def __init__(self, *, is_able: bool = True, refuses: str = "", most_bytes: int = 2**31) -> None:
        self.is_able = is_able
        self.refuses = refuses
        self.most_bytes = most_bytes
        self.direct: set[int] = set()
        self.was_opened = False
        self.moves = 0

    def sync(self, descriptor: int) -> None:
        """Waits for nothing."""

    sync_folder = sync

    def open_direct(self, path: Path, *, writable: bool) -> int | None:
        descriptor = super().open_direct(path, writable=writable) if self.is_able else None
        if descriptor is not None:
            self.was_opened = True
            self.direct.add(descriptor)
        return descriptor

    def close(self, descriptor: int) -> None:
        self.direct.discard(descriptor)
        super().close(descriptor)

    def write(self, descriptor: int, buffer: memoryview, offset_bytes: int) -> int:
        self._look("write", descriptor, buffer, offset_bytes)
        return super().write(descriptor, buffer[: self.most_bytes], offset_bytes)

    def read(self, descriptor: int, buffer: memoryview, offset_bytes: int) -> int:
        self._look("read", descriptor, buffer, offset_bytes)
        return super().read(descriptor, buffer[: self.most_bytes], offset_bytes)

    def _look(self, name: str, descriptor: int, buffer: memoryview, offset_bytes: int) -> None:
        if descriptor in self.direct:
            assert offset_bytes % PAGE == len(buffer) % PAGE == 0
            self.moves += 1
            if self.refuses == name:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


SYSTEMS = {
    "direct": DirectPosix,
    "no direct access": lambda: DirectPosix(is_able=False),
    "writes refused": lambda: DirectPosix(refuses="write"),
    "reads refused": lambda: DirectPosix(refuses="read"),
    "short": lambda: DirectPosix(most_bytes=73 * PAGE),
    "short by odd numbers": lambda: DirectPosix(is_able=False, most_bytes=300_001),
}
LAYOUTS = {
    "defaults": Options(),
    "file per tensor": Options(file_bytes=1),
    "small blocks": Options(block_bytes=3 * PAGE, chunk_bytes=MIB, file_bytes=1),
    "odd blocks": Options(block_bytes=48 * 1024 + 16, chunk_bytes=MIB, memory_budget_bytes=1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_tensors_of_all_sizes_come_back(tmp_path, system, layout):
    options, posix = LAYOUTS[layout], SYSTEMS[system]()
    sizes = around(1, 512, PAGE, 64 * 1024, MIB, MIB + PAGE, options.block_bytes)
    state = {str(size): random_bytes(size) for size in sorted(sizes)}
    storage = LocalStorage(tmp_path / "s", "s", posix)
    save(state, storage, save_id="a", options=options)
    assert equal(load(storage, rank=0, options=options), state)
    targets = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    load(storage, rank=0, options=options, targets=targets)
    assert equal(targets, state)
    assert (posix.moves > 0) == posix.was_opened
    assert not posix.direct


# --- past staging memory ----------------------------------------------------------------------------------------------


def tensor_on_page(size: int, shift_bytes: int) -> tuple[torch.Tensor, mmap.mmap]:
    """A tensor that begins some bytes behind the begin of a page, and the memory around it."""
    memory = mmap.mmap(-1, size + 3 * PAGE)
    memory[:] = b"\xee" * len(memory)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=shift_bytes), memory


@pytest.mark.parametrize("size", [2 * MIB, 2 * MIB + 1, 2 * MIB + PAGE + 7, 300_000, PAGE - 1])
@pytest.mark.parametrize("shift_bytes", [0, 64, PAGE])
@pytest.mark.parametrize("block_bytes", [4 * MIB, 64 * 1024])
def test_memory_that_begins_on_a_page_is_not_staged(tmp_path, size, shift_bytes, block_bytes):
    options, session, posix = Options(block_bytes=block_bytes), Session(), DirectPosix()
    storage = LocalStorage(tmp_path / "s", "s", posix)
    source, _ = tensor_on_page(size, shift_bytes)
    source.copy_(random_bytes(size))
    is_staged = shift_bytes % PAGE != 0
    stats = save({"t": source}, storage, save_id="a", options=options, session=session)
    assert (stats.staging_bytes > 0) == is_staged
    target, memory = tensor_on_page(size, shift_bytes)
    found = load(storage, rank=0, options=options, targets={"t": target}, session=session)["t"]
    assert (session.last_load.staging_bytes > 0) == is_staged
    assert found is target
    assert torch.equal(target, source)
    assert set(memory[:shift_bytes] + memory[shift_bytes + size :]) == {0xEE}


def test_neighbours_of_memory_on_a_page_are_not_touched():
    # The blocks in which one tensor ends and the next begins are staged, the others are not.
    options, storage, sizes = Options(block_bytes=2 * PAGE), new_storage(), [5 * PAGE + 100, 3, 70_000, 65_536]
    sources, targets = ([tensor_on_page(size, 0) for size in sizes] for _ in range(2))
    for source, _ in sources:
        source.copy_(random_bytes(len(source)))
    state = {str(number): source for number, (source, _) in enumerate(sources)}
    save(state, storage, save_id="a", options=options)
    given = {str(number): target for number, (target, _) in enumerate(targets)}
    assert equal(load(storage, rank=0, options=options, targets=given), state)
    assert equal(given, state)
    assert all(set(memory[size:]) == {0xEE} for (_, memory), size in zip(targets, sizes, strict=True))


def with_twins(storage: MemoryStorage, *paths: str, has_checksums: bool) -> MemoryStorage:
    """Further entries for the stretch of a file that ``t`` has, as a snapshot from elsewhere may have them."""
    metadata = json.loads(storage.files[METADATA_NAME])
    if has_checksums:
        extension = json.loads(metadata["manifest"][EXTENSION_KEY]["content"])
        extension["ranks"]["0"]["roots"] += paths
        metadata["manifest"][EXTENSION_KEY]["content"] = json.dumps(extension)
    else:
        del metadata["manifest"][EXTENSION_KEY]
    metadata["manifest"] |= {f"0/{path}": metadata["manifest"]["0/t"] for path in paths}
    storage.files[METADATA_NAME] = seal(json.dumps(metadata).encode())
    return storage


@pytest.mark.parametrize("has_checksums", [True, False])
@pytest.mark.parametrize("size", [10 * PAGE, 10 * PAGE + 100, PAGE, 100])
def test_several_entries_for_one_stretch_of_a_file_all_get_it(size, has_checksums):
    options, storage, source = Options(block_bytes=2 * PAGE), new_storage(), random_bytes(size)
    save({"t": source}, storage, save_id="a", options=options)
    with_twins(storage, "u", "v", has_checksums=has_checksums)
    expected = dict.fromkeys("tuv", source)
    assert equal(load(storage, rank=0, options=options), expected)
    targets = {"t": tensor_on_page(size, 0)[0], "u": tensor_on_page(size, 0)[0], "v": tensor_on_page(size, 64)[0]}
    assert equal(load(storage, rank=0, options=options, targets=targets), expected)
    assert equal(targets, expected)
