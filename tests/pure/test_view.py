"""What one rank sees."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_snapshot.errors import EntryNotFoundError, MetadataError
from lightning_snapshot.manifest import (
    ChunkedTensorEntry,
    ContainerNote,
    DictEntry,
    DTensorEntry,
    Entry,
    Extension,
    ListEntry,
    Manifest,
    ObjectEntry,
    OrderedDictEntry,
    PrimitiveEntry,
    RankNotes,
    Shard,
    ShardedTensorEntry,
    TensorEntry,
    decode,
    encode,
)
from lightning_snapshot.view import Located, kept_back, ranks_with, values_of_ranks, view_of_rank, with_asked

GOLDEN = Path(__file__).parents[1] / "golden" / "data"
SHARDED = (ShardedTensorEntry, DTensorEntry)


def number(value: int, *, replicated: bool = False) -> PrimitiveEntry:
    return PrimitiveEntry(type="int", serialized_value=str(value), replicated=replicated)


def shard(begin: int, end: int) -> Shard:
    entry = TensorEntry(f"f{begin}", "buffer_protocol", "torch.float32", (end - begin,), False)
    return Shard((begin,), (end - begin,), entry)


def manifest_of(world_size: int, entries: dict[str, Entry], **notes: Any) -> Manifest:
    extension = Extension("s", "w", 4, {}, {"0": RankNotes(**notes)}) if notes else None
    return Manifest("0.1.0", world_size, entries, extension)


def located(path: str, entry: Entry) -> Located:
    return Located(path, entry, path.partition("/")[0])


def entries_of(view: dict[str, Located]) -> dict[str, Entry]:
    return {path: located.entry for path, located in view.items()}


# --- by example ------------------------------------------------------------------------------------------------------

TENSOR = TensorEntry("f", "buffer_protocol", "torch.float32", (2,), True)
CHUNKED = ChunkedTensorEntry("torch.float32", (2,), [shard(0, 1), shard(1, 2)], True)
OBJECT = ObjectEntry("o", "torch_save", "builtins.tuple", True)
KEYS = ["n", "t", "c", "o", "i", "s"]
SHARED = manifest_of(
    2,
    {
        "1/m": DictEntry(KEYS),
        "1/m/n": number(1),
        "1/m/s": ShardedTensorEntry([shard(3, 5)]),
        "0/m": OrderedDictEntry(KEYS),
        "0/m/n": number(0),
        "0/m/t": TENSOR,
        "0/m/c": CHUNKED,
        "0/m/o": OBJECT,
        "0/m/i": number(7, replicated=True),
        "0/m/s": ShardedTensorEntry([shard(1, 3), shard(0, 1)]),
    },
)


def test_a_rank_sees_its_own_entries_what_is_replicated_and_whole_sharded_tensors() -> None:
    whole = ShardedTensorEntry([shard(0, 1), shard(1, 3), shard(3, 5)])
    view = view_of_rank(SHARED, 1)
    assert view == {
        "m": located("1/m", DictEntry(KEYS)),
        "m/n": located("1/m/n", number(1)),
        "m/s": located("1/m/s", whole),
        "m/t": located("0/m/t", TENSOR),
        "m/c": located("0/m/c", CHUNKED),
        "m/o": located("0/m/o", OBJECT),
        "m/i": located("0/m/i", number(7, replicated=True)),
    }
    # First what the rank has itself, in the order of the file.
    assert list(view) == ["m", "m/n", "m/s", "m/t", "m/c", "m/o", "m/i"]
    assert view_of_rank(SHARED, 0)["m/s"] == located("0/m/s", whole)
    assert view_of_rank(SHARED, 0)["m/n"] == located("0/m/n", number(0))


@pytest.mark.parametrize("rank", [2, 3, 10**6])
def test_a_new_rank_sees_what_is_shared(rank: int) -> None:
    view = view_of_rank(SHARED, rank)
    assert list(view) == ["m", "m/t", "m/c", "m/o", "m/i", "m/s"]
    assert view["m"] == located("0/m", OrderedDictEntry(["t", "c", "o", "i", "s"]))
    assert view["m/s"] == located("0/m/s", ShardedTensorEntry([shard(0, 1), shard(1, 3), shard(3, 5)]))
    # What was in the manifest is as it was.
    assert SHARED.entries["0/m"] == OrderedDictEntry(KEYS)


def test_a_negative_rank_is_refused() -> None:
    with pytest.raises(EntryNotFoundError, match="from 0 on, found -1"):
        view_of_rank(SHARED, -1)


def test_replicated_entries_of_old_snapshots_are_repeated_under_every_rank() -> None:
    entries: dict[str, Entry] = {f"{rank}/m/t": TENSOR for rank in (1, 0)}
    assert view_of_rank(manifest_of(2, entries), 1) == {"m/t": located("0/m/t", TENSOR)}


def test_a_replicated_entry_counts_only_under_rank_0() -> None:
    entries: dict[str, Entry] = {"0/m": DictEntry([]), "1/m": DictEntry(["t"]), "1/m/t": TENSOR}
    assert list(view_of_rank(manifest_of(2, entries), 0)) == ["m"]
    assert list(view_of_rank(manifest_of(2, entries), 1)) == ["m", "m/t"]


def test_a_replicated_dtensor_is_used_as_it_is() -> None:
    replicated = DTensorEntry([shard(0, 2)], [0, 1], [[-1], [-1]])
    scalar = DTensorEntry([Shard((), (), TensorEntry("f", "torch_save", "torch.int8", (), False))], [0, 1], [])
    entries: dict[str, Entry] = {"0/r": replicated, "0/0d": scalar}
    for rank in range(3):
        view = view_of_rank(manifest_of(2, entries), rank)
        assert view == {"r": located("0/r", replicated), "0d": located("0/0d", scalar)}


def hsdp(*pieces: Shard) -> DTensorEntry:
    return DTensorEntry(list(pieces), [[0, 1], [2, 3]], [[1], [-1]])


def test_a_rank_sees_a_sharded_tensor_that_it_lists_but_others_keep() -> None:
    entries: dict[str, Entry] = {f"{rank}/m": DictEntry(["a/b", 5, True]) for rank in range(4)}
    entries["3/m"] = DictEntry([5])
    for path in ("m/a%2Fb", "m/5", "m/True", "m/unlisted"):
        entries |= {f"1/{path}": hsdp(shard(2, 4)), f"0/{path}": hsdp(shard(0, 2))}
    manifest = manifest_of(4, entries)
    merged = hsdp(shard(0, 2), shard(2, 4))
    assert view_of_rank(manifest, 2) == {
        "m": located("2/m", DictEntry(["a/b", 5, True])),
        "m/a%2Fb": located("0/m/a%2Fb", merged),
        "m/5": located("0/m/5", merged),
        "m/True": located("0/m/True", merged),
    }
    assert list(view_of_rank(manifest, 3)) == ["m", "m/5"]
    # Ranks that keep an entry have it, listed or not.
    assert view_of_rank(manifest, 1)["m/unlisted"] == located("1/m/unlisted", merged)


def test_a_list_has_the_items_that_other_ranks_of_the_mesh_keep() -> None:
    entries: dict[str, Entry] = {f"{rank}/l": ListEntry() for rank in range(5)}
    entries |= {"0/l/0": hsdp(shard(0, 2)), "1/l/0": hsdp(shard(2, 4)), "0/l/1": ShardedTensorEntry([])}
    manifest = manifest_of(5, entries)
    assert view_of_rank(manifest, 3)["l/0"] == located("0/l/0", hsdp(shard(0, 2), shard(2, 4)))
    assert list(view_of_rank(manifest, 4)) == ["l"]
    assert list(view_of_rank(manifest, 1)) == ["l", "l/0"]


def test_shards_of_equal_place_all_stay_in_the_order_of_ranks() -> None:
    copies = [Shard((0,), (2,), TensorEntry(f"f{rank}", "torch_save", "torch.int8", (2,), False)) for rank in range(3)]
    entries: dict[str, Entry] = {f"{rank}/s": ShardedTensorEntry([copies[rank]]) for rank in (2, 0, 1)}
    assert view_of_rank(manifest_of(3, entries), 1)["s"].entry == ShardedTensorEntry(copies)


def test_a_value_that_is_sharded_elsewhere_only_stays_what_it_is() -> None:
    entries: dict[str, Entry] = {"0/m": DictEntry(["s"]), "0/m/s": number(1), "1/m/s": ShardedTensorEntry([])}
    assert view_of_rank(manifest_of(2, entries), 0)["m/s"] == located("0/m/s", number(1))


def test_ranks_that_disagree_are_named() -> None:
    entries: dict[str, Entry] = {"0/s": ShardedTensorEntry([shard(0, 2)]), "1/s": hsdp(shard(2, 4))}
    with pytest.raises(MetadataError, match=r"'s': .*ShardedTensorEntry at '0/s', DTensorEntry at '1/s'"):
        view_of_rank(manifest_of(2, entries), 0)


def test_a_new_rank_keeps_keys_of_raw_paths() -> None:
    entries: dict[str, Entry] = {"0/m": DictEntry(["a/b%41", "c/d"]), "0/m/a/b%41": OBJECT, "0/m/c/d": number(1)}
    assert view_of_rank(manifest_of(1, entries), 1)["m"].entry == DictEntry(["a/b%41"])


def test_a_new_rank_keeps_the_keys_of_moved_values() -> None:
    entries: dict[str, Entry] = {
        "0/m": DictEntry(["long", "own"]),
        "0/x-lightning-snapshot/1": TENSOR,
        "0/x-lightning-snapshot/2": number(1),
    }
    moved = {"m/long": "x-lightning-snapshot/1", "m/own": "x-lightning-snapshot/2"}
    view = view_of_rank(manifest_of(1, entries, moved=moved), 1)
    assert entries_of(view) == {"m": DictEntry(["long"]), "x-lightning-snapshot/1": TENSOR}


def test_a_new_rank_gets_the_objects_that_belong_to_its_containers() -> None:
    factory = ObjectEntry("f", "torch_save", "builtins.type", False)
    entries: dict[str, Entry] = {
        "0/d": DictEntry(["t"]),
        "0/d/t": TENSOR,
        "0/x-lightning-snapshot/1": factory,
        "0/x-lightning-snapshot/2": factory,
        "0/x-lightning-snapshot/3": factory,
    }
    containers = {
        "": ContainerNote("OrderedDict", extra="x-lightning-snapshot/2"),
        "d": ContainerNote("defaultdict", extra="x-lightning-snapshot/1"),
        "gone": ContainerNote("defaultdict", extra="x-lightning-snapshot/3"),
    }
    view = view_of_rank(manifest_of(1, entries, containers=containers), 1)
    assert list(view) == ["d", "d/t", "x-lightning-snapshot/1", "x-lightning-snapshot/2"]


@pytest.mark.parametrize("kind", ["tuple", "namedtuple", "items"])
def test_a_new_rank_gets_no_halves(kind: str) -> None:
    entries: dict[str, Entry] = {
        "0/m": DictEntry(["whole", "half", "outer", "list"]),
        "0/m/whole": ListEntry(),
        "0/m/whole/0": TENSOR,
        "0/m/whole/1": number(1, replicated=True),
        "0/m/half": ListEntry(),
        "0/m/half/0": TENSOR,
        "0/m/half/1": number(1),
        "0/m/outer": ListEntry(),
        "0/m/outer/0": TENSOR,
        "0/m/outer/2": DictEntry([]),
        "0/m/outer/3": ListEntry(),
        # The item of `outer` that lacks one itself was moved, and so was the value that it lacks.
        "0/x-lightning-snapshot/1": ListEntry(),
        "0/x-lightning-snapshot/2": number(1),
        "0/m/list": ListEntry(),
        "0/m/list/0": TENSOR,
        "0/m/list/1": number(1),
    }
    moved = {"m/outer/1": "x-lightning-snapshot/1", "x-lightning-snapshot/1/0": "x-lightning-snapshot/2"}
    special = ("m/whole", "m/half", "m/outer", "x-lightning-snapshot/1")
    containers = dict.fromkeys(special, ContainerNote(kind))
    view = view_of_rank(manifest_of(1, entries, containers=containers, moved=moved), 1)
    assert entries_of(view) == {
        "m": DictEntry(["whole", "list"]),
        "m/whole": ListEntry(),
        "m/whole/0": TENSOR,
        "m/whole/1": number(1, replicated=True),
        "m/list": ListEntry(),
        "m/list/0": TENSOR,
    }


def test_hostile_aliases_end() -> None:
    entries: dict[str, Entry] = {"0/a": ListEntry(), "0/b": ListEntry(), "0/a/0": number(1)}
    moved = {"a/1": "b", "b/1": "a"}
    containers = dict.fromkeys("ab", ContainerNote("tuple"))
    assert view_of_rank(manifest_of(1, entries, containers=containers, moved=moved), 1) == {}


# --- simulated ranks -------------------------------------------------------------------------------------------------


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Ranks that hold one dictionary, each key of it shared in its own way."""
    world_size = draw(st.integers(1, 4))
    kinds = draw(st.dictionaries(st.text("ab/%5", max_size=3), st.sampled_from(["own", "shared", "cut", "kept"])))
    entries: dict[str, Entry] = {f"{rank}/m": DictEntry(list(kinds)) for rank in range(world_size)}
    for key, kind in kinds.items():
        path = "m/" + key.replace("%", "%25").replace("/", "%2F")
        cuts = sorted(draw(st.lists(st.integers(0, 9), min_size=world_size + 1, max_size=world_size + 1)))
        for rank in range(world_size):
            if kind == "own" and draw(st.booleans()):
                entries[f"{rank}/{path}"] = number(rank)
            elif kind == "shared" and rank == 0:
                entries[f"{rank}/{path}"] = TENSOR
            elif kind == "cut":
                begin, end = cuts[rank : rank + 2]
                entries[f"{rank}/{path}"] = ShardedTensorEntry([shard(begin, end)] if begin < end else [])
            elif kind == "kept" and rank % 2 == world_size % 2:
                entries[f"{rank}/{path}"] = DTensorEntry([shard(rank, rank + 1)], [0, 1, 2, 3], [[0], [-1]])
    order = draw(st.permutations(list(entries)))
    return Manifest("0.1.0", world_size, {path: entries[path] for path in order})


@given(manifests())
def test_all_ranks_see_the_same_sharded_tensors_and_only_their_own_values(manifest: Manifest) -> None:
    before = encode(manifest)
    views = [view_of_rank(manifest, rank) for rank in range(manifest.world_size + 1)]
    assert encode(manifest) == before
    for rank, view in enumerate(views):
        sharded = {path: entry for path, entry in entries_of(view).items() if isinstance(entry, SHARDED)}
        assert sharded == {path: entry for path, entry in entries_of(views[0]).items() if isinstance(entry, SHARDED)}
        for path, located in view.items():
            owner, _, logical_path = located.path.partition("/")
            assert logical_path == path
            if isinstance(located.entry, SHARDED):
                parts = [manifest.entries.get(f"{other}/{path}") for other in range(manifest.world_size)]
                pieces = [piece for part in parts if part for piece in part.shards]  # type: ignore[union-attr]  # the entry is known to be of that kind
                assert sorted(pieces, key=lambda piece: piece.offsets) == located.entry.shards
                assert owner == str(rank) or f"{rank}/{path}" not in manifest.entries
            elif isinstance(located.entry, TensorEntry):
                assert owner == "0"
            else:
                assert owner == str(rank if rank < manifest.world_size else 0)
                if rank < manifest.world_size:
                    assert located.entry == manifest.entries[located.path]
    own = [path.partition("/")[2] for path in manifest.entries if path.startswith("0/")]
    assert [path for path in views[0] if f"0/{path}" in manifest.entries] == own
    new = views[-1]
    keys = {"m/" + str(key).replace("%", "%25").replace("/", "%2F") for key in new["m"].entry.keys}  # type: ignore[union-attr]  # the entry is known to be of that kind
    assert keys == new.keys() - {"m"}
    assert not any(isinstance(located.entry, PrimitiveEntry) for located in new.values())


@given(manifests(), st.randoms())
def test_the_order_of_the_file_changes_only_the_order_of_the_view(manifest: Manifest, random: Any) -> None:
    paths = list(manifest.entries)
    random.shuffle(paths)
    shuffled = Manifest("0.1.0", manifest.world_size, {path: manifest.entries[path] for path in paths})
    for rank in range(manifest.world_size + 1):
        assert view_of_rank(shuffled, rank) == view_of_rank(manifest, rank)


# --- snapshots of torchsnapshot --------------------------------------------------------------------------------------


def read_golden(name: str) -> Manifest:
    return decode((GOLDEN / name / ".snapshot_metadata").read_bytes(), source=name)


EXPECTED = {path.parent.name: json.loads(path.read_text()) for path in sorted(GOLDEN.glob("*/expected.json"))}
RANKS = [(name, rank) for name, expected in EXPECTED.items() for rank in range(expected["world_size"])]
# The versions before 0.1.0 do not tell what a rank sees.
ITS_VIEWS = [(name, int(rank)) for name, expected in EXPECTED.items() for rank in expected["library_views"] or {}]


def type_of(entry: Entry) -> str:
    return entry.type if isinstance(entry, PrimitiveEntry) else str(type(entry).__struct_config__.tag)


# Views that torchsnapshot fails to compute, and what they are.
ITS_DEFECTS: dict[tuple[str, int], dict[str, str]] = {
    # Its YAML parser refuses the surrogate pairs that it has written itself.
    ("hazard-emoji", 0): {"h": "dict", "h/text": "str", "h/k\U0001f680": "Tensor"},
    ("hazard-emoji", 1): {"h": "dict"},
    ("hazard-emoji", 2): {"h": "dict"},
    # It looks for the text of a key, not for the key itself (here a boolean), in the list from which it takes it out.
    ("w1-lossy-keys", 1): {"k": "dict", "k/bools": "dict", "k/alias": "dict", "k/alias2": "dict"},
    ("w1-lossy-keys", 2): {"k": "dict", "k/bools": "dict", "k/alias": "dict", "k/alias2": "dict"},
    # … or for the encoded key.
    ("w1-odd-keys", 1): {
        "app%2Fkey %25": "dict",
        "k": "dict",
        "k/nested": "dict",
        "k/nested/": "dict",
        "k/nested//x%2Fy": "list",
        "k/nested//x%2Fy/1": "dict",
    },
    # It leaves replicated DTensors out of what it merges, and then misses them.
    ("w2-dtensor-replicated", 0): {"m": "dict", "m/x": "int", "m/r": "DTensor"},
    ("w2-dtensor-replicated", 1): {"m": "dict", "m/x": "int", "m/r": "DTensor"},
}
ITS_DEFECTS["w1-odd-keys", 2] = ITS_DEFECTS["w1-odd-keys", 1]


@pytest.mark.parametrize(("name", "rank"), ITS_VIEWS)
def test_a_golden_shows_what_torchsnapshot_shows(name: str, rank: int) -> None:
    manifest = read_golden(name)
    theirs = EXPECTED[name]["library_views"][str(rank)]
    ours = {path: type_of(entry) for path, entry in entries_of(view_of_rank(manifest, rank)).items()}
    if "error" in theirs:
        assert ours == ITS_DEFECTS[name, rank]
        return
    # It adds sharded tensors that the rank did not save later, when a target asks for them.
    added = {path: kind for path, kind in ours.items() if kind in {"ShardedTensor", "DTensor"} and path not in theirs}
    assert {path: kind for path, kind in ours.items() if path not in added} == theirs
    assert all(rank >= manifest.world_size or f"{rank}/{path}" not in manifest.entries for path in added)


def paths_in(node: dict[str, Any], path: str, *, raw: bool) -> dict[str, str]:
    """Logical path → kind of all that a state consists of."""
    found = {path: node["kind"]}
    if node["kind"] in {"dict", "OrderedDict"}:
        for key, item in node["items"]:
            token = str(key) if raw else str(key).replace("%", "%25").replace("/", "%2F")
            found |= paths_in(item, f"{path}/{token}", raw=raw)
    elif node["kind"] == "list":
        for index, item in enumerate(node["items"]):
            found |= paths_in(item, f"{path}/{index}", raw=raw)
    return found


@pytest.mark.parametrize(("name", "rank"), RANKS)
def test_a_golden_shows_all_that_the_rank_had(name: str, rank: int) -> None:
    manifest = read_golden(name)
    raw = name in {"legacy-003-w2", "legacy-20220628-w1"}
    wanted: dict[str, str] = {}
    for key, node in EXPECTED[name]["ranks"][rank].items():
        wanted |= paths_in(node, key if raw else key.replace("%", "%25").replace("/", "%2F"), raw=raw)
    view = entries_of(view_of_rank(manifest, rank))
    # Early versions kept all values as objects.
    assert set(view) == set(wanted)
    kinds = {"Tensor": "tensor", "ChunkedTensor": "tensor", "ShardedTensor": "sharded_tensor", "DTensor": "dtensor"}
    for path, entry in view.items():
        if not isinstance(entry, ObjectEntry):
            kind = wanted[path].replace("qtensor", "tensor")
            assert kinds.get(type_of(entry), type_of(entry)) == kind


# --- what a reader asks for ------------------------------------------------------------------------------------------

TABLES = manifest_of(
    3,
    {
        "0/m": DictEntry(["a", 5]),
        "0/m/a": ShardedTensorEntry([shard(0, 2)]),
        "0/m/5": number(0),
        "1/m": OrderedDictEntry([7, "b/c"]),
        "1/m/7": ShardedTensorEntry([shard(0, 3)]),
        "1/m/b%2Fc": ShardedTensorEntry([shard(0, 1)]),
        "2/m": DictEntry(["b/c"]),
        "2/m/b%2Fc": ShardedTensorEntry([shard(1, 4)]),
        "2/n": DictEntry(["only"]),
        "2/n/only": ShardedTensorEntry([shard(0, 1)]),
        "0/l": ListEntry(),
        "0/l/0": ShardedTensorEntry([shard(0, 1)]),
    },
)


@pytest.mark.parametrize("rank", [0, 3])
def test_tensors_spread_over_ranks_come_if_they_are_asked_for_whoever_had_them(rank: int) -> None:
    asked = ["m/7", "m/b%2Fc", "n/only", "m/none"]
    found = entries_of(with_asked(TABLES, view_of_rank(TABLES, rank), asked))
    assert found == {
        "m": DictEntry([*([] if rank else [5]), 7, "b/c"]),  # the keys as those ranks had them
        **({} if rank else {"m/5": number(0)}),
        "m/7": ShardedTensorEntry([shard(0, 3)]),
        "m/b%2Fc": ShardedTensorEntry([shard(0, 1), shard(1, 4)]),
        "l": ListEntry(),
        "l/0": ShardedTensorEntry([shard(0, 1)]),  # a list cannot do without
    }


def test_what_a_new_rank_lacks_is_told() -> None:
    assert kept_back(TABLES, 3, "m") == ["m/5"]
    assert kept_back(TABLES, 2, "n") == kept_back(TABLES, 3, "n") == []
    assert values_of_ranks(TABLES, [0, 1], "m") == ["0/m/5"]
    assert values_of_ranks(TABLES, [], "m") == []
    assert ranks_with(TABLES, "n") == [2]
