"""Plans of saves. Several ranks are several specs in one call."""

import dataclasses
import os
import subprocess
import sys
from collections import Counter, defaultdict
from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from lightning_snapshot.errors import UnsupportedValueError
from lightning_snapshot.geometry import Box, whole
from lightning_snapshot.manifest import (
    ChunkedTensorEntry,
    DictEntry,
    ObjectEntry,
    PrimitiveEntry,
    Shard,
    ShardedTensorEntry,
    TensorEntry,
)
from lightning_snapshot.write_plan import BlobSpec, FilePlan, Layout, Piece, Planner, TensorSpec, plan_write

SMALL = Layout("s", chunk_bytes=256, file_bytes=1024)
LARGE = Layout("s", chunk_bytes=2**29, file_bytes=2**30)


def tensor(*shape: int, **fields) -> TensorSpec:
    return TensorSpec("torch.float32", 4, shape, **fields)


def cut(size: int, parts: int) -> list[tuple[int, int]]:
    """Offset and size of each of some parts, of which the last ones may be smaller or empty."""
    step = -(-size // parts)
    return [(min(size, step * index), max(0, min(step, size - step * index))) for index in range(parts)]


@st.composite
def worlds(draw):
    """Specs of all ranks: own, replicated, tied and sharded tensors, blobs, primitives and containers."""
    size = draw(st.integers(1, 4))
    shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple)
    specs: list[dict] = [
        {"m": DictEntry(["…"]), "m/i": PrimitiveEntry("int", str(rank), False)} for rank in range(size)
    ]
    for number in range(draw(st.integers(0, 4))):
        item_bytes = draw(st.sampled_from([1, 2, 4, 8, 16]))
        shape = draw(shapes)
        spec = TensorSpec(f"torch.bits{item_bytes}", item_bytes, shape)
        kind = draw(st.sampled_from(["own", "replicated", "tied", "sharded"]))
        for rank, spec_of in enumerate(specs):
            path = f"m/{number}"
            if kind == "replicated":
                spec_of[path] = replace(spec, replicated=True)
            elif kind == "own" and draw(st.booleans()):
                spec_of[path] = spec
            elif kind == "tied":
                spec_of[path] = replace(spec, is_tied=True)
                spec_of[f"{path}b"] = replace(spec, is_tied=True, tied_to=path)
            elif kind == "sharded" and shape:
                # Two groups of ranks: within a group, dimension 0 is spread; the groups hold replicas.
                groups = 2 if size == 4 and number % 2 else 1
                offset, extent = cut(shape[0], size // groups)[rank % (size // groups)]
                spec_of[path] = replace(spec, box=Box((offset, *[0] * (len(shape) - 1)), (extent, *shape[1:])))
    for number in range(draw(st.integers(0, 3))):
        size_bytes = draw(st.integers(1, 600))
        for rank, spec_of in enumerate(specs):
            spec_of[f"b/{number}"] = BlobSpec(
                size_bytes, f"{rank}/{draw(st.integers(0, 1))}/{size_bytes}", "builtins.set"
            )
        blob = BlobSpec(size_bytes, str(number), "builtins.set", replicated=True)
        for spec_of in specs:
            spec_of[f"r/{number}"] = blob
    return specs


LAYOUTS = st.builds(Layout, st.just("s"), chunk_bytes=st.integers(1, 400), file_bytes=st.integers(1, 1500)) | st.just(
    LARGE
)


def pieces_of(entry) -> list[tuple[Box, TensorEntry]]:
    if isinstance(entry, TensorEntry):
        return [(whole(entry.shape), entry)]
    shards = entry.chunks if isinstance(entry, ChunkedTensorEntry) else entry.shards
    return [(Box(shard.offsets, shard.sizes), shard.tensor) for shard in shards]


def elements(box: Box):
    return product(*(range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True)))


@given(worlds(), LAYOUTS)
def test_every_element_of_every_tensor_is_written_by_exactly_one_rank(specs, layout):
    plan = plan_write(specs, layout)
    writer_of = {file.location: (rank, file) for rank, files in enumerate(plan.files) for file in files}
    assert len(writer_of) == sum(map(len, plan.files))
    written: dict[tuple, Counter] = defaultdict(Counter)
    expected: dict[tuple, set] = {}
    for rank, spec_of in enumerate(specs):
        for path, spec in spec_of.items():
            if not isinstance(spec, TensorSpec) or spec.tied_to:
                continue
            owner = (path, -1 if spec.replicated or spec.box is not None else rank)
            expected[owner] = set(elements(whole(spec.shape)))
            entry = plan.entries.get(f"{rank}/{path}")
            for box, stored in pieces_of(entry) if entry else []:
                written[owner].update(elements(box))
                by, file = writer_of[stored.location]
                begin, end = stored.byte_range or (0, file.size_bytes)
                (piece,) = [p for p in file.pieces if p.path == path and p.offset_bytes == begin]
                assert piece.size_bytes == end - begin == box.volume * spec.item_bytes
                # The bytes that the writing rank takes from what it holds are those of the box.
                held = specs[by][path].box or whole(spec.shape)
                row_bytes = prod(held.sizes[1:]) * spec.item_bytes
                assert box.offsets[1:] == held.offsets[1:]
                assert piece.begin_bytes == ((box.offsets[0] - held.offsets[0]) * row_bytes if box.offsets else 0)
    assert {owner: set(counts) for owner, counts in written.items()} == expected
    assert all(set(counts.values()) == {1} for counts in written.values())


@given(worlds(), LAYOUTS)
def test_files_hold_their_pieces_in_order_and_aligned(specs, layout):
    for rank, files in enumerate(plan_write(specs, layout).files):
        for file in files:
            assert file.location.startswith(f".data/s/{rank}_")
            end = 0
            for piece in file.pieces:
                assert piece.size_bytes > 0
                assert end <= piece.offset_bytes < end + 64
                assert piece.offset_bytes % 64 == 0
                end = piece.offset_bytes + piece.size_bytes
            assert file.size_bytes == end > 0
            assert end <= layout.file_bytes or len(file.pieces) == 1


@given(worlds(), LAYOUTS)
def test_no_two_entries_have_the_same_range_of_a_file(specs, layout):
    ranges = [
        (stored.location, stored.byte_range)
        for entry in plan_write(specs, layout).entries.values()
        if isinstance(entry, (TensorEntry, ChunkedTensorEntry, ShardedTensorEntry))
        for _, stored in pieces_of(entry)
        if stored.byte_range is not None
    ]
    assert len(set(ranges)) == len(ranges)


@given(worlds(), LAYOUTS)
def test_every_path_has_its_entry_on_its_rank_or_once_on_rank_0(specs, layout):
    entries = plan_write(specs, layout).entries
    expected = [
        f"{rank}/{path}"
        for rank, spec_of in enumerate(specs)
        for path, spec in spec_of.items()
        if not rank or not getattr(spec, "replicated", False)
    ]
    assert list(entries) == expected


@given(worlds(), LAYOUTS)
def test_every_file_is_named_by_an_entry(specs, layout):
    plan = plan_write(specs, layout)
    named = set()
    for entry in plan.entries.values():
        if isinstance(entry, ObjectEntry):
            named.add(entry.location)
        elif not isinstance(entry, (DictEntry, PrimitiveEntry)):
            named.update(stored.location for _, stored in pieces_of(entry))
    assert named == {file.location for files in plan.files for file in files}


def test_large_pieces_start_on_pages_and_small_ones_on_64_bytes():
    sizes = {"a": 1, "b": 64 * 1024 - 1, "c": 64 * 1024, "d": 3, "e": 64 * 1024}
    plan = plan_write([{path: TensorSpec("torch.uint8", 1, (size,)) for path, size in sizes.items()}], LARGE)
    assert plan.files == (
        (
            FilePlan(
                ".data/s/0_0",
                204_800,
                (
                    Piece("a", 0, 1, 0),
                    Piece("b", 0, 65_535, 64),
                    Piece("c", 0, 65_536, 69_632),
                    Piece("d", 0, 3, 135_168),
                    Piece("e", 0, 65_536, 139_264),
                ),
            ),
        ),
    )


def test_a_file_is_closed_before_it_grows_too_large_but_takes_any_single_piece():
    specs = {path: tensor(size) for path, size in {"a": 100, "b": 150, "c": 40, "d": 256, "e": 1}.items()}
    files = plan_write([specs], Layout("s", chunk_bytes=2048, file_bytes=1000)).files[0]
    assert [(file.location, [piece.path for piece in file.pieces]) for file in files] == [
        (".data/s/0_0", ["a"]),
        (".data/s/0_1", ["b", "c"]),
        (".data/s/0_2", ["d"]),
        (".data/s/0_3", ["e"]),
    ]


def test_tensors_above_the_limit_are_chunked_by_rows():
    plan = plan_write(
        [{"w": tensor(10, 3), "v": TensorSpec("torch.int64", 8, (33,)), "x": tensor(16)}], Layout("s", 64, 4096)
    )
    chunked = plan.entries["0/w"]
    assert isinstance(chunked, ChunkedTensorEntry)
    assert [(chunk.offsets, chunk.sizes) for chunk in chunked.chunks] == [((0, 0), (5, 3)), ((5, 0), (5, 3))]
    assert chunked.chunks[1].tensor == TensorEntry(
        ".data/s/0_0", "buffer_protocol", "torch.float32", (5, 3), replicated=False, byte_range=(64, 124)
    )
    assert plan.files[0][0].pieces[1] == Piece("w", 60, 120, 64)
    chunked = plan.entries["0/v"]
    assert isinstance(chunked, ChunkedTensorEntry)
    assert [chunk.sizes for chunk in chunked.chunks] == [(7,), (7,), (7,), (7,), (5,)]
    assert isinstance(plan.entries["0/x"], TensorEntry)  # exactly the limit


def test_tied_tensors_share_a_file_of_their_own():
    specs = {"a": tensor(3, is_tied=True), "b": tensor(3), "c": tensor(3, tied_to="a", is_tied=True)}
    plan = plan_write([specs], LARGE)
    assert plan.entries["0/a"] == plan.entries["0/c"]
    assert plan.entries["0/a"] == TensorEntry(
        ".data/s/0_0", "buffer_protocol", "torch.float32", (3,), replicated=False, byte_range=None
    )
    assert [(file.location, file.size_bytes) for file in plan.files[0]] == [(".data/s/0_0", 12), (".data/s/0_1", 12)]


def test_equal_blobs_share_a_file():
    specs = {
        "a": BlobSpec(5, "x", "builtins.set"),
        "b": BlobSpec(5, "y", dtype="torch.qint8", shape=(3,)),
        "c": BlobSpec(5, "x", "builtins.set"),
    }
    plan = plan_write([specs, specs], LARGE)
    for rank in "01":
        entry = ObjectEntry(".data/s/0_0", "torch_save", "builtins.set", False)
        assert plan.entries[f"{rank}/c"] == plan.entries[f"{rank}/a"] == entry
        assert plan.entries[f"{rank}/b"] == TensorEntry(".data/s/0_1", "torch_save", "torch.qint8", (3,), False)
    assert [[file.pieces for file in files] for files in plan.files] == [
        [(Piece("a", 0, 5, 0),), (Piece("b", 0, 5, 0),)],
        [],
    ]


def test_what_is_tied_to_a_replicated_tensor_shows_the_one_copy_on_every_rank():
    specs = {
        "shared": tensor(3, replicated=True, is_tied=True),
        "own": tensor(3, tied_to="shared", is_tied=True),
        "first": tensor(4, is_tied=True),
        "again": tensor(4, replicated=True, tied_to="first", is_tied=True),
    }
    alone = {**specs, "own": tensor(3)}  # ties need not be the same everywhere
    plan = plan_write([specs, specs, alone], LARGE)
    place = plan.entries["0/shared"].location
    assert [plan.entries[f"{rank}/own"].location == place for rank in range(3)] == [True, True, False]
    assert plan.entries["0/again"].location == plan.entries["0/first"].location
    assert sum(file.size_bytes for files in plan.files for file in files) == 3 * 4 + 3 * 4 * 4 + 3 * 4


def test_replicated_values_have_one_entry_under_rank_0():
    specs = {
        "m": DictEntry(["t", "i", "o"]),
        "m/t": tensor(3, replicated=True),
        "m/i": PrimitiveEntry("int", "5", replicated=True),
        "m/o": BlobSpec(5, "x", "builtins.set", replicated=True),
    }
    plan = plan_write([specs, specs, specs], LARGE)
    assert list(plan.entries) == ["0/m", "0/m/t", "0/m/i", "0/m/o", "1/m", "2/m"]
    assert plan.entries["0/m/t"].replicated
    assert sum(len(files) for files in plan.files) == 2


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=40), st.integers(1, 8), st.data())
def test_replicated_tensors_are_spread_evenly(sizes, world_size, data):
    own = [data.draw(st.integers(1, 3000)) for _ in range(world_size)]
    specs = [
        {"own": TensorSpec("torch.uint8", 1, (own[rank],))}
        | {str(i): TensorSpec("torch.uint8", 1, (size,), replicated=True) for i, size in enumerate(sizes)}
        for rank in range(world_size)
    ]
    plan = plan_write(specs, Layout("s", 10**6, 10**6))
    loads = [sum(piece.size_bytes for file in files for piece in file.pieces) for files in plan.files]
    assert sum(loads) == sum(own) + sum(sizes)
    # Greedy: who writes most has at most what a fair share would be, and its last tensor; or nothing but its own.
    busiest = max(range(world_size), key=lambda rank: loads[rank])
    assert loads[busiest] == own[busiest] or loads[busiest] - max(sizes) <= sum(loads) / world_size


def test_the_largest_replicated_tensors_are_given_out_first():
    sizes = {"a": 200, "b": 200, "c": 300}
    spec = {path: TensorSpec("torch.uint8", 1, (size,), replicated=True) for path, size in sizes.items()}
    files = plan_write([spec] * 2, LARGE).files
    assert [[piece.path for file in of_rank for piece in file.pieces] for of_rank in files] == [["c"], ["a", "b"]]


def test_chunks_of_a_replicated_tensor_are_spread_over_ranks():
    spec = {"w": tensor(64, 4, replicated=True)}
    plan = plan_write([spec] * 4, SMALL)
    ranges = [[(piece.begin_bytes, piece.end_bytes) for file in files for piece in file.pieces] for files in plan.files]
    assert ranges == [[(0, 256)], [(256, 512)], [(512, 768)], [(768, 1024)]]
    entry = plan.entries["0/w"]
    assert isinstance(entry, ChunkedTensorEntry)
    assert entry.replicated
    assert [chunk.tensor.location for chunk in entry.chunks] == [f".data/s/{rank}_0" for rank in range(4)]


def test_uneven_and_empty_shards():
    # Three rows on four ranks.
    specs = [{"w": tensor(3, 2, box=Box((rank, 0), (1 if rank < 3 else 0, 2)))} for rank in range(4)]
    plan = plan_write(specs, LARGE)
    assert plan.entries["1/w"] == ShardedTensorEntry(
        [Shard((1, 0), (1, 2), TensorEntry(".data/s/1_0", "buffer_protocol", "torch.float32", (1, 2), False, (0, 8)))]
    )
    assert plan.entries["3/w"] == ShardedTensorEntry([])
    assert plan.files[3] == ()


def test_large_shards_are_cut_and_keep_global_offsets():
    specs = [{"w": tensor(20, 8, box=Box((10 * rank, 0), (10, 8)))} for rank in range(2)]
    plan = plan_write(specs, Layout("s", chunk_bytes=128, file_bytes=4096))
    entry = plan.entries["1/w"]
    assert isinstance(entry, ShardedTensorEntry)
    assert [(shard.offsets, shard.sizes) for shard in entry.shards] == [
        ((10, 0), (4, 8)),
        ((14, 0), (4, 8)),
        ((18, 0), (2, 8)),
    ]
    assert [(p.begin_bytes, p.end_bytes) for p in plan.files[1][0].pieces] == [(0, 128), (128, 256), (256, 320)]


def test_replicas_of_a_shard_are_written_once_and_evenly():
    # A mesh of 2 by 2: rows are spread over pairs of ranks, both pairs hold the same.
    specs = [{name: tensor(4, 4, box=Box((2 * (rank % 2), 0), (2, 4))) for name in ("v", "w")} for rank in range(4)]
    plan = plan_write(specs, LARGE)
    shards = {path: entry.shards for path, entry in plan.entries.items() if isinstance(entry, ShardedTensorEntry)}
    assert {path: [shard.offsets for shard in held] for path, held in shards.items()} == {
        "0/v": [(0, 0)], "1/v": [(2, 0)], "2/v": [], "3/v": [],
        "0/w": [], "1/w": [], "2/w": [(0, 0)], "3/w": [(2, 0)],
    }  # fmt: skip


def test_tied_shards_are_stored_once():
    specs = [
        {
            "a": tensor(4, box=Box((2 * rank,), (2,)), is_tied=True),
            "b": tensor(4, box=Box((2 * rank,), (2,)), is_tied=True, tied_to="a"),
        }
        for rank in range(2)
    ]
    plan = plan_write(specs, LARGE)
    assert plan.entries["0/a"] == plan.entries["0/b"]
    assert plan.entries["1/a"] == plan.entries["1/b"]
    assert [[file.size_bytes for file in files] for files in plan.files] == [[8], [8]]
    ((_, stored),) = pieces_of(plan.entries["1/b"])
    assert stored.byte_range is None


def blob(obj_type: str) -> BlobSpec:
    return BlobSpec(1, "a", obj_type, replicated=True)


def shard(size: int, offset: int, extent: int) -> TensorSpec:
    return tensor(size, box=Box((offset,), (extent,)))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (tensor(3, replicated=True), tensor(4, replicated=True), r"w: marked replicated, .*\(3,\).* rank 1 .*\(4,\)"),
        (tensor(3, replicated=True), None, "w: marked replicated, .* rank 1 has None"),
        (None, tensor(3, replicated=True), "w: marked replicated, but rank 0 has None"),
        (tensor(3), tensor(3, replicated=True), "w: marked replicated"),
        (PrimitiveEntry("int", "5", True), PrimitiveEntry("int", "6", True), "w: marked replicated, .*'5'.*'6'"),
        (blob("builtins.set"), blob("x.Y"), "w: marked replicated"),
        (shard(4, 0, 2), shard(5, 2, 2), r"w: expected one dtype and shape .*\(4,\).*\(5,\)"),
        (shard(4, 0, 3), shard(4, 2, 2), r"w: the shards .* \[0\] and \[2\] overlap"),
        (shard(4, 0, 1), shard(4, 2, 2), "w: the shards .* hold 3 of 4 elements"),
    ],
)  # fmt: skip
def test_ranks_that_disagree_are_told_so(first, second, message):
    specs = [{} if spec is None else {"w": spec} for spec in (first, second)]
    with pytest.raises(UnsupportedValueError, match=message):
        plan_write(specs, LARGE)


def test_replicated_blobs_may_differ_in_their_bytes():
    specs = [{"o": BlobSpec(size, digest, "builtins.set", replicated=True)} for size, digest in ((5, "a"), (6, "b"))]
    plan = plan_write(specs, LARGE)
    assert [[file.size_bytes for file in files] for files in plan.files] == [[5], []]


def test_no_rank_and_no_values_give_an_empty_plan():
    assert plan_write([{}, {}], LARGE).files == ((), ())
    assert plan_write([{}], LARGE).entries == {}


@given(
    st.integers(2, 8),
    st.lists(st.tuples(st.integers(1, 60_000), st.sampled_from([256, 1000, 4096])), min_size=1, max_size=12),
    st.integers(0, 2**20),
)
def test_what_all_ranks_hold_is_cut_so_that_each_writes_the_same(world_size, sizes, surplus):
    specs = {str(number): TensorSpec("torch.uint8", 1, size, replicated=True) for number, size in enumerate(sizes)}
    missing = world_size * 32 * 2**20 - sum(map(prod, sizes)) + surplus
    if missing > 0:
        specs["rest"] = TensorSpec("torch.uint8", 1, (-(-missing // 512), 512), replicated=True)
    plan = plan_write([specs] * world_size, LARGE)
    loads = [sum(piece.size_bytes for file in files for piece in file.pieces) for files in plan.files]
    assert sum(loads) == sum(prod(spec.shape) for spec in specs.values())
    assert max(loads) <= 1.1 * min(loads)


# --- one save after another -------------------------------------------------------------------------------------------


def with_other_values(specs: list[dict], value: str) -> list[dict]:
    """The same structure and data, as after some steps of a training."""
    changed = {DictEntry: DictEntry([value, 7]), PrimitiveEntry: PrimitiveEntry("int", value, False)}
    shared = PrimitiveEntry("str", f"shared {value}", True)
    return [{**{path: changed.get(type(spec), spec) for path, spec in of.items()}, "shared": shared} for of in specs]


@given(worlds(), LAYOUTS, st.lists(st.tuples(st.sampled_from(["s", "t", "0_0"]), st.sampled_from("123")), max_size=4))
def test_a_plan_that_is_used_again_is_the_plan_of_the_new_specs(specs, layout, steps):
    planner, pieces = Planner(), None
    for save_id, value in [("s", "0"), *steps]:
        now, layout = with_other_values(specs, value), dataclasses.replace(layout, save_id=save_id)
        plan = planner.plan(now, layout)
        assert plan == plan_write(now, layout)
        assert list(plan.entries) == list(plan_write(now, layout).entries)
        before, pieces = pieces, [id(file.pieces) for files in plan.files for file in files]
        assert before in (None, pieces)  # it was not made anew


def change_first(kind: type, **fields):
    """A change of the first spec of a kind on the last rank."""

    def change(specs: list[dict]) -> None:
        for path, spec in specs[-1].items():
            if type(spec) is kind:
                specs[-1][path] = replace(spec, **fields)
                return

    return change


CHANGES = {
    "a value less": lambda specs: specs[-1].popitem(),
    "a value more": lambda specs: specs[-1].update(new=tensor(3)),
    "a primitive more": lambda specs: specs[0].update(new=PrimitiveEntry("int", "1", False)),
    "another name": lambda specs: specs[-1].update(new=specs[-1].pop("m/i")),
    "another order": lambda specs: specs[-1].update(m=specs[-1].pop("m")),
    "another kind": lambda specs: specs[-1].update({"m/i": DictEntry([])}),
    "a tensor now": lambda specs: specs[-1].update({"m/i": tensor(5)}),
    "replicated now": lambda specs: [of.update({"m/i": PrimitiveEntry("int", "1", True)}) for of in specs],
    "a rank more": lambda specs: specs.append({}),
    "one rank": lambda specs: specs.__delitem__(slice(1, None)),
    "another shape": change_first(TensorSpec, shape=(7, 3), box=None),
    "another dtype": change_first(TensorSpec, dtype="torch.uint16"),
    "wider elements": change_first(TensorSpec, item_bytes=32),
    "tied": change_first(TensorSpec, is_tied=True),
    "replicated": change_first(TensorSpec, replicated=True),
    "another blob": change_first(BlobSpec, digest="new"),
    "a longer blob": change_first(BlobSpec, size_bytes=601),
    "an object of another class": change_first(BlobSpec, obj_type="x.Y"),
}


def outcome(plan, *arguments):
    try:
        return plan(*arguments)
    except UnsupportedValueError as error:
        return str(error)


@pytest.mark.parametrize("change", CHANGES)
@settings(max_examples=30)
@given(specs=worlds(), layout=LAYOUTS)
def test_a_change_of_the_structure_gives_a_new_plan(change, specs, layout):
    planner = Planner()
    planner.plan(specs, layout)
    changed = [dict(of) for of in specs]
    CHANGES[change](changed)
    expected = outcome(plan_write, changed, layout)
    assert outcome(planner.plan, changed, layout) == expected
    # An error changes nothing for the saves after it.
    assert planner.plan(specs, layout) == plan_write(specs, layout)


@given(worlds(), st.lists(LAYOUTS, min_size=2, max_size=3))
def test_another_layout_gives_a_new_plan(specs, layouts):
    planner = Planner()
    for layout in layouts:
        assert planner.plan(specs, layout) == plan_write(specs, layout)


def test_replicated_values_that_differ_are_noticed_also_when_a_plan_is_used_again():
    planner = Planner()
    planner.plan([{"epoch": PrimitiveEntry("int", "1", True)}] * 2, LARGE)
    with pytest.raises(UnsupportedValueError, match=r"epoch: marked replicated, but rank 0 has .*'2'.* 1 has .*'3'"):
        planner.plan([{"epoch": PrimitiveEntry("int", value, True)} for value in "23"], LARGE)


PROGRAM = """
from lightning_snapshot.geometry import Box
from lightning_snapshot.manifest import Manifest, encode
from lightning_snapshot.write_plan import BlobSpec, Layout, TensorSpec, plan_write
specs = [
    {f"r/{i}": TensorSpec("torch.float32", 4, (7 + i % 3, 5), replicated=True) for i in range(30)}
    | {f"s/{i}": TensorSpec("torch.int8", 1, (8, 9), box=Box((4 * (rank % 2), 0), (4, 9))) for i in range(9)}
    | {f"b/{i}": BlobSpec(40, f"{i % 4}", "builtins.set") for i in range(9)}
    for rank in range(4)
]
plan = plan_write(specs, Layout("s", 64, 512))
print(encode(Manifest("0.1.0", 4, plan.entries)).decode())
print(plan.files)
"""


def test_the_plan_does_not_depend_on_the_hash_seed():
    plans = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert plans[0] == plans[1]
    assert "FilePlan" in plans[0]
