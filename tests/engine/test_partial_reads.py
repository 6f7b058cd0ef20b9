"""Parts of tensors: they are what an index of the whole tensor gives, and no more is read than they need."""

import functools
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_snapshot import Snapshot, StateDict
from lightning_snapshot.errors import EntryNotFoundError, TargetMismatchError
from lightning_snapshot.manifest import EXTENSION_KEY, ChunkedTensorEntry, TensorEntry
from lightning_snapshot.options import Options
from lightning_snapshot.read_plan import TensorLike
from lightning_snapshot.restore import load, read_manifest, read_value
from lightning_snapshot.save import save
from lightning_snapshot.session import Session
from lightning_snapshot.storage import METADATA_NAME, open_storage
from lightning_snapshot.storage.memory import MemoryStorage
from lightning_snapshot.view import view_of_rank
from tests.engine.strategies import SMALL, basic_indices, bits, from_bytes, new_storage
from tests.engine.watched import WatchedStorage

GOLDEN = Path(__file__).parent.parent / "golden" / "data"
DTYPES = [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.uint16, torch.float8_e4m3fn, torch.complex128]


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape, bits(a)) == (b.dtype, b.shape, bits(b))


# --- values -----------------------------------------------------------------------------------------------------------


def scattered(shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor whose dimensions lie in reverse order, with gaps between elements; and all of its memory."""
    width = [2 * size for size in reversed(shape)]
    memory = from_bytes(b"\1" * math.prod(width) * dtype.itemsize, dtype, tuple(width))
    return memory[tuple(slice(None, None, 2) for _ in width)].permute(tuple(reversed(range(len(width))))), memory


@st.composite
def tensors(draw) -> torch.Tensor:
    """Tensors that small blocks, chunks and files cut, in either order of dimensions."""
    dtype, shape = draw(st.sampled_from(DTYPES)), tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    size_bytes = math.prod(shape) * dtype.itemsize
    tensor = from_bytes((bytes(range(1, 252)) * (size_bytes // 251 + 1))[:size_bytes], dtype, shape)
    return tensor.permute(tuple(reversed(range(len(shape))))) if draw(st.booleans()) else tensor


@settings(max_examples=200)
@given(tensors(), st.data())
def test_an_index_gives_what_it_gives_of_the_whole_tensor(tensor, data):
    storage = new_storage()
    save({"before": torch.ones(5), "t": tensor}, storage, save_id="s", options=SMALL)
    index = data.draw(basic_indices(tuple(tensor.shape)))
    expected = tensor[index]
    assert equal(read_value(storage, "0/t", options=SMALL, index=index), expected)

    target, memory = scattered(expected.shape, tensor.dtype)
    before, content = target.clone(), bits(memory)
    assert read_value(storage, "0/t", options=SMALL, index=index, target=target) is target
    assert equal(target, expected)
    target.copy_(before)
    assert bits(memory) == content  # nothing beside the elements of the target has changed

    target = torch.empty_like(expected, memory_format=torch.contiguous_format)
    assert read_value(storage, "0/t", options=SMALL, index=index, target=target) is target
    assert equal(target, expected)


GOLDENS = [
    *("w1-basic-files", "w1-chunked-files", "w1-chunked-slab", "w1-dtypes", "w1-empty-scalar", "w1-slabs-multi"),
    *("w1-views", "w2-fsdp2", "w2-sharded-grid", "w2-sharded-subdivided", "w4-dtensor-2d", "w4-replicated-chunked"),
    *("w4-sharded", "legacy-20221002-w2", "legacy-20220628-w1"),
]


@functools.cache
def golden_tensors(name: str) -> dict[str, torch.Tensor]:
    storage = open_storage(GOLDEN / name)
    view = view_of_rank(read_manifest(storage), 0)
    paths = [f"0/{path}" for path, located in view.items() if isinstance(located.entry, TensorLike)]
    return {path: read_value(storage, path, options=Options()) for path in paths}


@pytest.mark.parametrize("name", GOLDENS)
@settings(max_examples=30)
@given(data=st.data())
def test_an_index_works_on_what_torchsnapshot_has_written(name, data):
    path, tensor = data.draw(st.sampled_from(sorted(golden_tensors(name).items())))
    index = data.draw(basic_indices(tuple(tensor.shape)))
    assert equal(Snapshot(GOLDEN / name).read_object(path, index=index), tensor[index])
    target, _ = scattered(tensor[index].shape, tensor.dtype)
    assert Snapshot(GOLDEN / name).read_object(path, target, index=index) is target
    assert equal(target, tensor[index])


def test_a_part_of_a_parameter_goes_into_a_parameter(tmp_path):
    weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
    snapshot = Snapshot.take(tmp_path / "s", {"m": StateDict(w=weight)})
    part = snapshot.read_object("0/m/w", index=1)
    assert type(part) is torch.Tensor
    assert torch.equal(part, weight[1])
    target = torch.nn.Parameter(torch.zeros(4))
    assert snapshot.read_object("0/m/w", target, index=(-1, ...)) is target
    assert torch.equal(target, weight[2])
    assert target.grad_fn is None


def test_a_part_is_read_once_more_if_the_snapshot_is_replaced_meanwhile():
    inner, new = new_storage(), torch.zeros(40)
    save({"t": torch.ones(40)}, inner, save_id="a", options=SMALL)

    def replace(operation) -> None:
        if operation.name == "open" and len(storage.operations) == 1:
            save({"t": new}, MemoryStorage(inner.url), save_id="b", options=SMALL)

    storage = WatchedStorage(inner, replace)
    assert equal(read_value(storage, "0/t", options=SMALL, index=slice(3, 30)), new[3:30])


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored() -> MemoryStorage:
    storage = new_storage()
    state = {"plain": torch.ones(4, 3), "chunked": torch.ones(40, 3), "number": 5, "object": {1}}
    save({"m": state}, storage, save_id="s", options=SMALL)
    return storage


@pytest.mark.parametrize("path", ["m/plain", "m/chunked"])
@pytest.mark.parametrize(
    "index",
    [
        *(slice(None, None, 2), slice(None, None, -1), slice(None, None, 0), (None,), (0, None), True, [0], [[0]]),
        *((0, 0, 0), (..., 0, ...), 40, -41, (0, 3), 1.0, "0", {}, torch.ones(4, dtype=torch.bool), torch.tensor(1)),
        *(numpy.array([0, 1]), numpy.ones(4, dtype=bool), (numpy.array([0]), 1)),
    ],
    ids=repr,
)  # fmt: skip
def test_other_indices_are_refused_with_path_and_shape(stored, path, index):
    with pytest.raises(TargetMismatchError, match=rf": {path}: the index .* of shape \[40?, 3\]: "):
        read_value(stored, f"0/{path}", options=SMALL, index=index)


@pytest.mark.parametrize("path", ["m/number", "m/object"])
def test_only_tensors_have_an_index(stored, path):
    with pytest.raises(TargetMismatchError, match=f": {path}: only dense tensors have an index"):
        read_value(stored, f"0/{path}", options=SMALL, index=0)


@pytest.mark.parametrize("path", ["0/m", "0/m/none"])
def test_an_index_of_nothing(stored, path):
    with pytest.raises(EntryNotFoundError, match=path):
        read_value(stored, path, options=SMALL, index=0)


@pytest.mark.parametrize("path", ["m/plain", "m/chunked"])
@pytest.mark.parametrize(
    "target",
    [
        *(torch.zeros(2), torch.zeros(1, 3), torch.zeros(2, 3), torch.zeros(()), torch.zeros(3, dtype=torch.float64)),
        *(torch.zeros(3, dtype=torch.int32), torch.zeros(1).expand(3), torch.zeros(3, device="meta")),
    ],
    ids=lambda target: f"{target.dtype} {list(target.shape)} {target.device}",
)
def test_a_target_of_the_part_must_have_its_dtype_and_shape(stored, path, target):
    with pytest.raises(
        TargetMismatchError, match=rf": {path}: the target is .*, the index selects torch.float32 \[3\]"
    ):
        read_value(stored, f"0/{path}", options=SMALL, index=1, target=target)
    assert target.is_meta or not target.any()


# --- what is read -----------------------------------------------------------------------------------------------------


def bytes_of_blocks(storage: MemoryStorage, path: str, index: Any, block_bytes: int) -> int:
    """The size of all blocks that hold an element of a part, element by element."""
    entry = read_manifest(storage).entries[path]
    assert isinstance(entry, (TensorEntry, ChunkedTensorEntry))
    whole = [((0,) * len(entry.shape), entry)]
    pieces = whole if isinstance(entry, TensorEntry) else [(chunk.offsets, chunk.tensor) for chunk in entry.chunks]
    files = sorted({tensor.location for _, tensor in pieces})
    numbers = numpy.full(entry.shape, -1)
    for offsets, tensor in pieces:
        begin, end = tensor.byte_range or (0, len(storage.files[tensor.location]))
        first_bytes = numpy.linspace(begin, end, math.prod(tensor.shape), endpoint=False, dtype=int)
        box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, tensor.shape, strict=True))
        number_of_file = files.index(tensor.location) * 2**32
        numbers[box] = number_of_file + first_bytes.reshape(tensor.shape) // block_bytes
    needed = [divmod(int(number), 2**32) for number in numpy.unique(numbers[index])]
    sizes = [len(storage.files[location]) for location in files]
    return sum(min(block_bytes, sizes[file] - block * block_bytes) for file, block in needed)


def read_bytes(storage: MemoryStorage, path: str, index: Any, options: Options) -> int:
    """What a read of a part says that it has read, which is what it did read."""
    watched, session = WatchedStorage(storage), Session()
    read_value(watched, path, options=options, index=index, session=session)
    done = sum(operation.end_bytes - operation.begin_bytes for operation in watched.operations)
    assert session.last_load.data_bytes == done
    return done


@settings(max_examples=100)
@given(st.data(), st.integers(1, 40), st.integers(1, 30), st.integers(0, 30))
def test_of_rows_only_the_blocks_are_read_that_hold_some_of_them(data, rows, columns, before):
    storage = new_storage()
    state = {"before": torch.ones(before), "t": torch.arange(rows * columns * 1.0).reshape(rows, columns)}
    save(state, storage, save_id="s", options=SMALL)
    begin = data.draw(st.integers(0, rows - 1))
    index = data.draw(st.sampled_from([begin, slice(begin, data.draw(st.integers(begin, rows)))]))
    assert read_bytes(storage, "0/t", index, SMALL) == bytes_of_blocks(storage, "0/t", index, SMALL.block_bytes)


@pytest.mark.parametrize(
    ("shape", "index"),
    [
        ((6, 40_000), (slice(None), slice(100, 103))),
        ((6, 40_000), (slice(1, 5), slice(39_990, None))),
        ((6, 40_000), (..., 0)),
        ((6, 40_000), (slice(2, 4), slice(1, None))),
        ((3, 2, 30_000), (slice(None), 1, slice(5, 7))),
        ((3, 30_000, 2), (slice(1, 3), slice(9, 12))),
        ((3, 30_000, 2), (slice(0, 2), slice(9, 12), 1)),
    ],
)
@pytest.mark.parametrize("chunk_bytes", [2**29, 400_000])
def test_of_columns_of_huge_rows_only_the_blocks_are_read_that_hold_some_of_them(shape, index, chunk_bytes):
    options, storage = Options(block_bytes=16_384, chunk_bytes=chunk_bytes), new_storage()
    save({"t": torch.arange(math.prod(shape) * 1.0).reshape(shape)}, storage, save_id="s", options=options)
    read = read_bytes(storage, "0/t", index, options)
    assert read == bytes_of_blocks(storage, "0/t", index, options.block_bytes)
    total_bytes = sum(len(content) for name, content in storage.files.items() if name != METADATA_NAME)
    assert read < total_bytes / 2 or index == (slice(2, 4), slice(1, None))


def test_an_empty_part_reads_nothing(stored):
    for index in (slice(2, 2), slice(9, 3), (slice(None), slice(3, None)), (0, slice(0, 0))):
        assert read_bytes(stored, "0/m/plain", index, SMALL) == 0
        assert read_bytes(stored, "0/m/chunked", index, SMALL) == 0


def test_of_a_file_without_checksums_only_the_bytes_of_the_rows_are_read():
    storage, tensor = new_storage(), torch.arange(5000.0).reshape(50, 100)
    save({"t": tensor}, storage, save_id="s", options=Options())
    metadata = json.loads(storage.files[METADATA_NAME])
    del metadata["manifest"][EXTENSION_KEY]
    storage.files[METADATA_NAME] = json.dumps(metadata).encode()
    assert read_bytes(storage, "0/t", slice(7, 10), SMALL) == 3 * 400
    assert read_bytes(storage, "0/t", (7, slice(3, 10)), SMALL) == 7 * 4


# --- a whole load -----------------------------------------------------------------------------------------------------


def ranges_read(storage: WatchedStorage) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for operation in storage.operations:
        if operation.name == "read":
            found.setdefault(operation.location, []).append((operation.begin_bytes, operation.end_bytes))
    return {location: sorted(ranges) for location, ranges in found.items()}


def test_a_load_reads_each_byte_exactly_once():
    tied, shared = torch.arange(100.0), [torch.ones(3), {5}]
    state = {
        "chunked": torch.arange(500, dtype=torch.float64),
        "turned": torch.arange(600.0).reshape(20, 30).t(),
        "small": [torch.full((size,), size, dtype=torch.int8) for size in range(1, 30)],
        "tied": [tied, tied, torch.nn.Parameter(tied)],
        "shared": [shared, shared],
        "equal": [{1, 2}, {1, 2}],
    }
    inner = new_storage()
    save(state, inner, save_id="s", options=SMALL)
    storage = WatchedStorage(inner)
    load(storage, rank=0, options=SMALL)
    sizes = {name: len(content) for name, content in inner.files.items() if name != METADATA_NAME}
    ranges = ranges_read(storage)
    assert {location: parts[-1][1] for location, parts in ranges.items()} == sizes
    for parts in ranges.values():
        assert [begin for begin, _ in parts] == [0, *(end for _, end in parts[:-1])]


@pytest.mark.parametrize("name", GOLDENS)
def test_a_load_of_what_torchsnapshot_has_written_reads_no_byte_twice(name):
    storage = WatchedStorage(open_storage(GOLDEN / name))
    load(storage, rank=0, options=SMALL)
    for parts in ranges_read(storage).values():
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(parts))
