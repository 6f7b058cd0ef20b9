"""Plans of loads: what is read, and what is refused before anything is read."""

from itertools import product
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_snapshot.errors import MetadataError
from lightning_snapshot.geometry import Box, intersect, whole
from lightning_snapshot.manifest import ChunkedTensorEntry, DTensorEntry, Shard, ShardedTensorEntry, TensorEntry
from lightning_snapshot.read_plan import Blob, Fetch, plan_read, stored_tensor
from lightning_snapshot.write_plan import Layout, TensorSpec, plan_write


def entry(*shape: int, location: str = "f", dtype: str = "torch.float32", **fields: Any) -> TensorEntry:
    fields = {"serializer": "buffer_protocol", "replicated": False, **fields}
    return TensorEntry(location=location, dtype=dtype, shape=shape, **fields)


def rows(*pieces: tuple[int, int], columns: int = 3, **fields: Any) -> list[Shard]:
    """Shards of whole rows: (first row, number of rows)."""
    return [
        Shard((first, 0), (count, columns), entry(count, columns, location=f"f{first}", **fields))
        for first, count in pieces
    ]


def chunked(*pieces: tuple[int, int], shape: tuple[int, ...] = (4, 3), **fields: Any) -> ChunkedTensorEntry:
    return ChunkedTensorEntry("torch.float32", shape, rows(*pieces, **fields), replicated=False)


def fetches_of(tensor_entry, wanted: Box | None = None, item_bytes: int = 4) -> tuple[Fetch, ...]:
    tensor = stored_tensor("m/w", tensor_entry)
    plan = plan_read({"m/w": (tensor, item_bytes, wanted or whole(tensor.shape))}, {})
    assert not plan.blobs
    return plan.fetches


def split_rows(total: int, ranks: int) -> list[tuple[int, int]]:
    step = -(-total // ranks)
    return [(first, min(step, total - first)) for first in range(0, total, step)]


def elements_of(fetch: Fetch) -> list[tuple[int, ...]]:
    """Global index of each element of the stretch that a fetch reads, in the order of the file."""
    count = (fetch.end_bytes - fetch.begin_bytes) // fetch.item_bytes
    found = []
    for position in range(fetch.first_element, fetch.first_element + count):
        index, rest = [], position
        for size in reversed(fetch.piece.sizes):
            rest, place = divmod(rest, size)
            index.append(place)
        found.append(tuple(o + i for o, i in zip(fetch.piece.offsets, reversed(index), strict=True)))
    return found


def inside(element: tuple[int, ...], box: Box) -> bool:
    return all(o <= e < o + s for e, o, s in zip(element, box.offsets, box.sizes, strict=True))


@given(
    st.data(),
    st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple),
    st.integers(1, 5),
    st.sampled_from([1, 2, 8]),
    st.integers(1, 64),
)
def test_read_boxes_tile_what_is_wanted_exactly_once(data, shape, ranks, item_bytes, chunk_bytes):
    dim = data.draw(st.integers(0, len(shape) - 1))
    specs = []
    for first, count in split_rows(shape[dim], ranks):
        offsets = tuple(first if d == dim else 0 for d in range(len(shape)))
        sizes = tuple(count if d == dim else size for d, size in enumerate(shape))
        specs.append({"m/w": TensorSpec("torch.x", item_bytes, shape, box=Box(offsets, sizes))})
    entries = plan_write(specs, Layout("s", chunk_bytes, 100)).entries.values()
    merged = ShardedTensorEntry([shard for held in entries for shard in held.shards])
    extents = [data.draw(st.integers(1, size)) for size in shape]
    wanted = Box(tuple(data.draw(st.integers(0, s - e)) for s, e in zip(shape, extents, strict=True)), tuple(extents))
    taken: list[tuple[int, ...]] = []
    for fetch in fetches_of(merged, wanted, item_bytes):
        stretch = elements_of(fetch)
        hits = [element for element in stretch if inside(element, fetch.wanted)]
        assert len(hits) == fetch.wanted.volume
        assert inside(stretch[0], wanted)  # nothing is read for nothing at either end
        assert inside(stretch[-1], wanted)
        assert intersect(fetch.piece, wanted) == fetch.wanted
        taken += hits
    everything = product(*(range(size) for size in shape))
    assert sorted(taken) == [element for element in everything if inside(element, wanted)]


@pytest.mark.parametrize(
    ("saved", "loaded", "expected"),
    [
        # Rows of a tensor of shape (16, 3): for each loading rank the stretches (file, first and last byte).
        (8, 4, [[("f0", 0, 24), ("f2", 0, 24)], [("f4", 0, 24), ("f6", 0, 24)],
                [("f8", 0, 24), ("f10", 0, 24)], [("f12", 0, 24), ("f14", 0, 24)]]),
        (4, 8, [[("f0", 0, 24)], [("f0", 24, 48)], [("f4", 0, 24)], [("f4", 24, 48)],
                [("f8", 0, 24)], [("f8", 24, 48)], [("f12", 0, 24)], [("f12", 24, 48)]]),
        (4, 3, [[("f0", 0, 48), ("f4", 0, 24)], [("f4", 24, 48), ("f8", 0, 48)], [("f12", 0, 48)]]),
        (3, 4, [[("f0", 0, 48)], [("f0", 48, 72), ("f6", 0, 24)], [("f6", 24, 72)], [("f12", 0, 48)]]),
    ],
)  # fmt: skip
def test_rows_saved_by_some_ranks_are_loaded_by_others(saved, loaded, expected):
    tensor_entry = ShardedTensorEntry(rows(*split_rows(16, saved)))
    found = []
    for first, count in split_rows(16, loaded):
        fetches = fetches_of(tensor_entry, Box((first, 0), (count, 3)))
        stretches = [(fetch.location, fetch.begin_bytes, fetch.end_bytes) for fetch in fetches]
        found.append(sorted(stretches, key=lambda stretch: int(stretch[0][1:])))
    assert found == expected


def test_columns_of_row_shards_are_read_from_the_first_to_the_last_element_that_is_wanted():
    first, second = fetches_of(ShardedTensorEntry(rows((0, 2), (2, 2))), Box((1, 1), (3, 1)))
    assert first == Fetch("m/w", "f0", 16, 20, 24, Box((0, 0), (2, 3)), 4, 4, Box((1, 1), (1, 1)))
    assert second == Fetch("m/w", "f2", 4, 20, 24, Box((2, 0), (2, 3)), 1, 4, Box((2, 1), (2, 1)))


def test_fetches_are_in_the_order_of_files_and_offsets():
    tensors = {
        path: (stored_tensor(path, entry(3, location=at, byte_range=(begin, begin + 12))), 4, whole((3,)))
        for path, at, begin in [("a", "g", 0), ("b", "f", 24), ("c", "f", 12), ("d", "e", 5)]
    }
    plan = plan_read(tensors, {})
    assert [(f.path, f.location, f.begin_bytes, f.end_bytes) for f in plan.fetches] == [
        ("d", "e", 5, 17), ("c", "f", 12, 24), ("b", "f", 24, 36), ("a", "g", 0, 12),
    ]  # fmt: skip
    assert {f.file_size_bytes for f in plan.fetches} == {None}


def test_a_tensor_with_a_file_of_its_own_says_how_long_that_must_be():
    (fetch,) = fetches_of(entry(2, 3), Box((1, 0), (1, 3)))
    assert (fetch.begin_bytes, fetch.end_bytes, fetch.file_size_bytes) == (12, 24, 24)


def test_replicas_are_read_once():
    shards = rows((0, 2), (2, 2))
    replicas = [Shard(s.offsets, s.sizes, entry(*s.sizes, location="other")) for s in shards]
    assert [f.location for f in fetches_of(ShardedTensorEntry(shards + replicas))] == ["f0", "f2"]


def test_nothing_is_read_for_tensors_without_elements():
    tensor = stored_tensor("m/w", entry(0, 3, serializer="torch_save"))
    assert plan_read({"m/w": (tensor, 4, whole((0, 3)))}, {}) == plan_read({}, {})


def test_zips_and_objects_are_read_in_one_piece():
    tensor = stored_tensor("m/w", entry(2, 3, serializer="torch_save", byte_range=(5, 900)))
    plan = plan_read({"m/w": (tensor, 4, Box((1, 0), (1, 3)))}, {"m/o": ("g", None), "m/q": ("h", (1, 9))})
    assert not plan.fetches
    assert plan.blobs == (
        Blob("m/o", "g", None, None),
        Blob("m/q", "h", (1, 9), None),
        Blob("m/w", "f", (5, 900), whole((2, 3))),
    )


@pytest.mark.parametrize(
    ("tensor_entry", "shape"),
    [
        (entry(2, 3), (2, 3)),
        (entry(), ()),
        (chunked((0, 3), (3, 1)), (4, 3)),
        (ShardedTensorEntry(rows((2, 3), (0, 2))), (5, 3)),
        (DTensorEntry(rows((0, 2), (2, 1)), [0, 1], [[0], [-1]]), (3, 3)),
        (ShardedTensorEntry([Shard((), (), entry())]), ()),
        (ShardedTensorEntry([Shard((0, 0), (0, 3), entry(0, 3))]), (0, 3)),
        (ChunkedTensorEntry("torch.float32", (), [Shard((0,), (1,), entry(1))], replicated=False), ()),
    ],
)
def test_all_kinds_of_entries_come_down_to_pieces_that_tile_the_shape(tensor_entry, shape):
    tensor = stored_tensor("m/w", tensor_entry)
    assert (tensor.dtype, tensor.shape) == ("torch.float32", shape)
    assert sum(piece.box.volume for piece in tensor.pieces) == prod(shape)
    assert all(len(piece.box.sizes) == len(shape) for piece in tensor.pieces)


def test_pieces_of_old_snapshots_have_no_dtype_of_their_own():
    pieces = rows((0, 4), dtype="", serializer="torch_save")
    assert (
        stored_tensor("m/w", ChunkedTensorEntry("torch.int8", (4, 3), pieces, replicated=False)).dtype == "torch.int8"
    )
    assert stored_tensor("m/w", ShardedTensorEntry(pieces)).dtype == ""


@pytest.mark.parametrize(
    ("tensor_entry", "message"),
    [
        (chunked((0, 3), (2, 2)), r"make up the tensor of shape \[4, 3\]: the pieces at \[0, 0\] and \[2, 0\] overlap"),
        (chunked((0, 1), (2, 2)), r"of shape \[4, 3\]: the pieces hold 9 of 12 elements"),
        (chunked((0, 4), (4, 1)), r"the piece at \[4, 0\] of sizes \[1, 3\] leaves the shape \[4, 3\]"),
        (chunked((0, 4), shape=(4,)), r"of shape \[4\]: a piece has 2 dimensions, the tensor 1"),
        (ShardedTensorEntry(rows((0, 1), (2, 1))), r"of shape \[3, 3\]: the pieces hold 6 of 9 elements"),
        (ShardedTensorEntry([]), "a tensor without any piece"),
        (ShardedTensorEntry(rows((0, 1)) + rows((1, 1), dtype="torch.int8")), "found .*'torch.float32', 'torch.int8'"),
        (chunked((0, 4), dtype="torch.int32"), r"one dtype in all pieces, found \['torch.float32', 'torch.int32'\]"),
        (
            ShardedTensorEntry([Shard((0,), (3,), entry(4))]),
            r"found offsets \[0\], sizes \[3\] and shape \[4\]",
        ),
        (
            ShardedTensorEntry([Shard((0,), (3, 1), entry(3, 1))]),
            r"found offsets \[0\], sizes \[3, 1\] and shape \[3, 1\]",
        ),
        (entry(3, serializer="pickle"), "expected the serializer buffer_protocol or torch_save, found 'pickle'"),
        (chunked((0, 4), serializer=""), "expected the serializer buffer_protocol or torch_save, found ''"),
    ],
)  # fmt: skip
def test_entries_that_contradict_themselves_are_refused_with_path_and_values(tensor_entry, message):
    with pytest.raises(MetadataError, match=f"^m/w: .*{message}"):
        stored_tensor("m/w", tensor_entry)


@pytest.mark.parametrize("byte_range", [(8, 31), (8, 33), (8, 8)])
def test_ranges_of_the_wrong_length_are_refused(byte_range):
    tensor = stored_tensor("m/w", entry(2, 3, byte_range=byte_range))
    size = byte_range[1] - byte_range[0]
    message = (
        rf"^m/w: expected 24 bytes for shape \[2, 3\], found the range \[8, {byte_range[1]}\] of {size} bytes in f$"
    )
    with pytest.raises(MetadataError, match=message):
        plan_read({"m/w": (tensor, 4, whole((2, 3)))}, {})
