"""Taking states apart and putting them together again. A dummy class stands in for tensors."""

import collections
import enum
import math
import pickle
import struct
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_snapshot.errors import MetadataError, UnsupportedValueError
from lightning_snapshot.manifest import (
    ContainerNote,
    DictEntry,
    Entry,
    Extension,
    ListEntry,
    Manifest,
    ObjectEntry,
    OrderedDictEntry,
    PrimitiveEntry,
    RankNotes,
    decode,
    encode,
)
from lightning_snapshot.rebuild import StateTree, read_primitive
from lightning_snapshot.tree import FlatState, Leaf, decode_key, encode_key, flatten


class Tensor:
    """Stands in for a tensor: equal only to itself, and usable as a key."""

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise AssertionError("a tensor went into a pickle")


class Point(NamedTuple):
    x: Any
    y: Any


class Colour(enum.IntEnum):
    RED = 1


class OwnDict(dict[str, Any]):
    pass


CLASSES = {f"{__name__}:Point": Point}


def is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def split(state) -> tuple[FlatState, dict[str, Entry], RankNotes]:
    """Entries and notes of a state, as they come out of the text of a manifest."""
    flat = flatten(state, is_tensor=is_tensor)
    stand_in = ObjectEntry("f", "torch_save", "x", replicated=False)
    entries = {f"0/{path}": stand_in if isinstance(item, Leaf) else item for path, item in flat.items.items()}
    notes = RankNotes(tuple(flat.roots), flat.containers, same=flat.same, moved=flat.moved)
    manifest = decode(
        encode(Manifest("0.1.0", 1, entries, Extension("s", "test", 1, {}, {"0": notes}))), source="the test"
    )
    assert manifest.extension is not None
    seen = {path.partition("/")[2]: entry for path, entry in manifest.entries.items()}
    return flat, seen, manifest.extension.ranks["0"]


def round_trip(state):
    flat, entries, notes = split(state)
    tree = StateTree(entries, notes)
    wanted = tree.leaf_paths(tree.roots.values(), with_root_attributes=True)
    assert len(set(wanted)) == len(wanted)
    items = flat.items
    leaves = {path: items[path].value if items[path].is_tensor else reload(items[path].value) for path in wanted}
    values = tree.build(tree.roots.values(), leaves.__getitem__, lambda _, name: CLASSES[name])
    return tree.root_container(dict(zip(tree.roots, values, strict=True)), leaves.__getitem__)


def reload(value):
    return pickle.loads(pickle.dumps(value))


def same(a, b) -> bool:
    """Equal in type, order and bits; tensors are the very same."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, dict):
        same_kind = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        same_attributes = same(getattr(a, "__dict__", None), getattr(b, "__dict__", None))
        return same_kind and same_attributes and same([*a], [*b]) and same([*a.values()], [*b.values()])
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a is b if is_tensor(a) else a == b


def aliases(value) -> list[int]:
    """For each mutable object met on the way, in order, the number of the first place where it was met."""
    first: dict[int, int] = {}
    found: list[int] = []

    def visit(item) -> None:
        if isinstance(item, (list, dict, tuple, Tensor)):
            if not isinstance(item, tuple):
                found.append(first.setdefault(id(item), len(first)))
            children = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ()
            for child in children:
                visit(child)

    visit(value)
    return found


CJK_LONG = "漢字" * 400
ODD_TEXTS = [
    *(
        "",
        ".",
        "..",
        "/",
        "//",
        "%",
        "%2F",
        "%25",
        "a/b",
        "a\\b",
        "0",
        "1",
        "-1",
        "+1",
        "01",
        "1_0",
        "true",
        "True",
        "None",
    ),
    *(
        "²",
        "٣",
        "+٣",
        "x-lightning-snapshot",
        "x-lightning-snapshot/1",
        "\0",
        "\x85",
        "\u2028",
        "\ufeff",
        "\ufffe",
        "𐀀",
    ),
    *("\ud800", "a\udfffb", "k" * 999, "k" * 1001, "/" * 500, "\x01" * 170, '"' * 600, CJK_LONG, "漢" * 999),
]
TEXTS = st.one_of(st.sampled_from(ODD_TEXTS), st.text(st.characters(exclude_categories=()), max_size=5))
# Python refuses to print integers of more than 4300 digits, so they are made only when they are drawn.
HUGE_INTEGERS = st.integers(13_990, 20_000).map(lambda bits: -1 << bits)
INTEGERS = st.one_of(st.integers(-3, 3), st.sampled_from([2**63, -(2**64), 10**300]), HUGE_INTEGERS)
KEYS = st.one_of(
    TEXTS,
    TEXTS,
    INTEGERS,
    st.sampled_from([True, False, None, 1.5, -0.0, math.nan, math.inf, (), (1, "a"), b"b", frozenset({1}), Colour.RED]),
)
FLOATS = st.floats().map(lambda x: x) | st.sampled_from(
    [-0.0, 5e-324, struct.unpack("d", b"\x01\0\0\0\0\0\xf0\x7f")[0], struct.unpack("d", b"\x05\0\0\0\0\0\xf8\xff")[0]]
)
LEAVES = st.one_of(
    st.builds(Tensor),
    INTEGERS,
    TEXTS,
    FLOATS,
    st.booleans(),
    st.none(),
    st.binary(max_size=5) | st.just(b"x" * 70_000),
    st.sampled_from(
        [{1, 2}, frozenset({"a"}), 1j, Colour.RED, range(3), "é" * 40_000, b"\xff\0", int, collections.deque([1])]
    ),
)


def containers(values):
    return st.one_of(
        st.lists(values, max_size=3),
        st.lists(values, max_size=3).map(tuple),
        st.builds(Point, values, values),
        st.dictionaries(TEXTS, values, max_size=3),
        st.dictionaries(KEYS, values, max_size=3),
        st.dictionaries(KEYS, values, max_size=3).map(OrderedDict),
        st.dictionaries(KEYS, values, max_size=3).map(lambda items: defaultdict(list, items)),
        st.builds(with_attribute, st.dictionaries(TEXTS, values, max_size=2)),
    )


def with_attribute(items):
    ordered = OrderedDict(items)
    ordered._metadata = {"": {"version": 1}}
    return ordered


VALUES = st.recursive(LEAVES, containers, max_leaves=12)
APP_KEYS = TEXTS.filter(lambda key: not any("\ud800" <= c <= "\udfff" for c in key))
STATES = st.dictionaries(APP_KEYS, VALUES, max_size=3)


@given(STATES | STATES.map(with_attribute))
def test_a_state_comes_back_as_it_was(state):
    assert same(round_trip(state), state)


@given(st.dictionaries(APP_KEYS, VALUES, max_size=3))
def test_objects_that_were_distinct_stay_so(state):
    before, after = aliases(state), aliases(round_trip(state))
    assert len(after) == len(before)
    assert len(set(after)) >= len(set(before))


@st.composite
def states_with_shared_parts(draw):
    pool: list[Any] = [Tensor()]
    flattened = st.deferred(lambda: st.lists(parts, max_size=3) | st.dictionaries(TEXTS.map(repr), parts, max_size=3))
    parts = st.builds(Tensor) | st.deferred(lambda: st.sampled_from(pool))
    for _ in range(draw(st.integers(1, 4))):
        pool.append(draw(flattened))  # noqa: PERF401  # the strategy draws from the pool itself
    holders = st.lists(parts, min_size=1, max_size=4)
    with_tensor = holders.map(lambda items: (*items, pool[0])) | holders.map(lambda items: Point(items, pool[0]))
    return {"a": draw(holders), "b": draw(with_tensor), "c": draw(parts), "d": {1.5: draw(parts), None: pool[0]}}


@given(states_with_shared_parts())
def test_objects_that_were_shared_are_shared_again(state):
    assert aliases(round_trip(state)) == aliases(state)


def test_what_is_inside_a_shared_list_is_read_once():
    shared = [Tensor(), None, {"k": Tensor()}]
    _, entries, notes = split({"a": shared, "b": {"again": shared}})
    tree = StateTree(entries, notes)
    assert tree.leaf_paths(tree.roots.values()) == ["a/0", "a/1", "a/2/k"]
    assert tree.leaf_paths([tree.roots["b"]]) == ["b/again/0", "b/again/1", "b/again/2/k"]


def test_one_of_two_places_of_a_shared_object_can_be_built_alone():
    shared = [Tensor()]
    flat, entries, notes = split({"a": shared, "b": shared})
    tree = StateTree(entries, notes)
    (built,) = tree.build([tree.roots["b"]], lambda path: flat.items[path].value, lambda *_: None)
    assert same(built, shared)


def test_values_that_the_state_makes_up_on_the_way_are_not_taken_for_one():
    class Fresh(collections.UserDict):
        def __getitem__(self, key):
            return [int(key)]

    state = Fresh({str(number): None for number in range(50)})
    assert same(round_trip(state), {str(number): [number] for number in range(50)})


@given(TEXTS)
def test_a_key_becomes_one_part_of_a_path(key):
    token = encode_key(key)
    assert "/" not in token
    assert decode_key(token) == key


def test_paths_are_those_of_torchsnapshot():
    state = {
        "m": OrderedDict([("a/b", Tensor()), ("a%2Fb", [Tensor(), 5]), (5, 0.5), (-7, b"a"), ("", "t"), ("..", True)])
    }
    flat = flatten(state, is_tensor=is_tensor)
    assert list(flat.items) == ["m", "m/a%2Fb", "m/a%252Fb", "m/a%252Fb/0", "m/a%252Fb/1", "m/5", "m/-7", "m/", "m/.."]
    assert flat.items["m"] == OrderedDictEntry(["a/b", "a%2Fb", 5, -7, "", ".."])
    assert flat.items["m/a%252Fb"] == ListEntry()
    assert flat.items["m/5"] == PrimitiveEntry("float", "AAAAAAAA4D8=", replicated=False, readable="0.5")
    assert flat.items["m/-7"] == PrimitiveEntry("bytes", "YQ==", replicated=False)
    assert flat.items["m/.."] == PrimitiveEntry("bool", "True", replicated=False)
    assert (flat.containers, flat.same, flat.moved) == ({}, {}, {})


@pytest.mark.parametrize(
    "keys",
    [
        [True],
        [1.5],
        [None],
        [5, "5"],
        [5, "+5"],
        [7, "07"],
        ["²"],
        ["٣"],
        [Colour.RED],
        ["\ud800"],
        [(1,)],
        [1 << 14_001],
    ],
    ids=ascii,
)
def test_keys_that_torchsnapshot_would_lose_are_kept_beside_the_values(keys):
    tensors = [Tensor() for _ in keys]
    flat = flatten({"m": dict(zip(keys, tensors, strict=True)), "n": dict.fromkeys(keys, 1)}, is_tensor=is_tensor)
    assert flat.items["m"] == ListEntry()
    assert [flat.items[f"m/{index}"].value for index in range(len(keys) + 1)] == [tuple(keys), *tensors]
    assert flat.items["n"] == Leaf(dict.fromkeys(keys, 1), is_tensor=False, place="n")


def test_text_keys_that_only_look_like_numbers_are_plain():
    state = {"m": {"5": 1, "+6": 2, "07": 3, 8: 4}}
    assert flatten(state, is_tensor=is_tensor).items["m"] == DictEntry(["5", "+6", "07", 8])


def test_only_what_holds_a_tensor_leaves_the_object_form():
    state = {"t": (1, [2]), "d": defaultdict(list, a=1), "p": Point(1, 2), "o": OwnDict(a=Tensor())}
    assert all(isinstance(item, Leaf) for item in flatten(state, is_tensor=is_tensor).items.values())
    state = {"t": (1, [Tensor()]), "d": defaultdict(list, a=Tensor()), "p": Point(1, (Tensor(),))}
    flat = flatten(state, is_tensor=is_tensor)
    assert [type(flat.items[path]) for path in state] == [ListEntry, DictEntry, ListEntry]


@pytest.mark.parametrize("key", ["k" * 995, "漢" * 997, "𐀀" * 997, "/" * 332, '"' * 498, "\x01" * 166])
def test_paths_are_kept_as_long_as_they_fit(key):
    assert not flatten({"m": {key: Tensor()}}, is_tensor=is_tensor).moved


@pytest.mark.parametrize("key", ["k" * 999, "漢" * 999, "/" * 334, '"' * 500, "\x01" * 167, "\u2028" * 167])
def test_too_long_paths_move_to_an_alias_with_all_that_is_below(key):
    state = {"m": {key: {"w": [Tensor()]}, "b": Tensor()}}
    flat, entries, notes = split(state)
    assert list(entries) == [
        "m",
        "x-lightning-snapshot",  # torchsnapshot looks for what an entry is in
        "x-lightning-snapshot/1",
        "x-lightning-snapshot/1/w",
        "x-lightning-snapshot/1/w/0",
        "m/b",
    ]
    assert notes.moved == {f"m/{encode_key(key)}": "x-lightning-snapshot/1"}
    place = flat.items["x-lightning-snapshot/1/w/0"].place
    assert place == f"m/{encode_key(key)}/w/0"
    assert same(round_trip(state), state)


@pytest.mark.parametrize("key", ["", "x-lightning-snapshot"])
def test_app_keys_that_are_no_file_name_or_our_own_move_to_an_alias(key):
    state = {key: [Tensor(), 1], "m": 1}
    _, entries, _ = split(state)
    root = "x-lightning-snapshot"
    assert list(entries) == [root, f"{root}/1", f"{root}/1/0", f"{root}/1/1", "m"]
    assert entries[root] == ListEntry()
    assert same(round_trip(state), state)


@pytest.mark.parametrize("depth", [1, 198])
@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: {"k": x}, lambda x: (x,), lambda x: {1.5: x}])
def test_deep_states_come_back(depth, wrap):
    value: Any = Tensor()
    for _ in range(depth):
        value = wrap(value)
    assert same(round_trip({"a": value}), {"a": value})


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: {"k": x}, lambda x: (x,)])
def test_states_that_are_too_deep_are_refused_with_their_place(wrap):
    value: Any = Tensor()
    for _ in range(5000):
        value = wrap(value)
    with pytest.raises(UnsupportedValueError, match=r"^a(/0|/k){200}: nested more than 200 levels deep"):
        flatten({"a": value}, is_tensor=is_tensor)


def cyclic_list():
    value: list[Any] = [Tensor()]
    value.append({"k": value})
    return value


def cyclic_dict():
    value: dict[str, Any] = {"t": Tensor()}
    value["k"] = [value, 1]
    return value


@pytest.mark.parametrize(
    ("value", "place"), [(cyclic_list(), "m/x%2Fy/1/k: this list"), (cyclic_dict(), "m/x%2Fy/k/0: this dict")]
)
def test_values_that_contain_themselves_are_refused_with_their_place(value, place):
    with pytest.raises(UnsupportedValueError, match=f"^{place} contains itself"):
        flatten({"m": {"x/y": value}}, is_tensor=is_tensor)


@pytest.mark.parametrize(
    ("key", "message"), [(5, "must be str, found 5 of type int"), ("\udc80", r"'\\udc80' holds a lone surrogate")]
)
def test_app_keys_that_cannot_be_written_are_refused(key, message):
    with pytest.raises(UnsupportedValueError, match=message):
        flatten({key: 1}, is_tensor=is_tensor)


# --- entries of torchsnapshot, damaged and hostile ones ---------------------------------------------------------------

OBJECT = ObjectEntry("f", "torch_save", "x", replicated=False)
FIVE = PrimitiveEntry("int", "5", replicated=False)


def build(entries, notes=None, leaf=lambda path: path):
    tree = StateTree(entries, notes)
    tree.leaf_paths(tree.roots.values())
    return dict(zip(tree.roots, tree.build(tree.roots.values(), leaf, lambda *_: Point), strict=True))


def test_snapshots_of_torchsnapshot_are_put_together_by_their_keys():
    entries = {
        "m": DictEntry(["5", 5, True, "gone", "a/b", "l"]),
        "m/5": OBJECT,
        "m/True": FIVE,
        "m/a/b": OBJECT,  # before keys were escaped
        "m/l": ListEntry(),
        **{f"m/l/{index}": PrimitiveEntry("int", str(index), replicated=False) for index in (10, 2, 0)},
        "m/unlisted": FIVE,
        "n%2Fo": FIVE,
    }
    expected = {"m": {"5": "m/5", 5: "m/5", True: 5, "a/b": "m/a/b", "l": [0, 2, 10]}, "n/o": 5}
    assert same(build(entries), expected)


@pytest.mark.parametrize(
    ("entries", "notes", "message"),
    [
        ({"m": DictEntry(["k"])}, RankNotes(("m",)), "m: the key 'k' is listed but has no entry"),
        ({}, RankNotes(("m",)), "m: expected an entry, found none"),
        (
            {"m": FIVE},
            RankNotes(("m",), moved={"m": "x-lightning-snapshot/1"}),
            "x-lightning-snapshot/1: expected an entry",
        ),
        ({"m": DictEntry(["k"]), "m/k": OBJECT}, RankNotes(("m",), same={"m/k": "m"}), "m/k: .* contains itself"),
        ({"m": ListEntry()}, RankNotes(("m",), moved={"m/0": "m"}), "m: .* contains itself"),
        (
            {"m": ListEntry(), "m/0": OBJECT},
            RankNotes(("m",), {"m": ContainerNote("items")}),
            "m: expected a tuple of keys .*, found 1 items",
        ),
        (
            {"m": ListEntry()},
            RankNotes(("m",), {"m": ContainerNote("items")}),
            "m: expected a tuple of keys .*, found 0 items",
        ),
        (
            {"m": OrderedDictEntry([]), "e": OBJECT},
            RankNotes(("m",), {"m": ContainerNote(extra="e")}),
            "m: expected the attributes of an OrderedDict, found str",
        ),
        (
            {"m": DictEntry([]), "e": OBJECT},
            RankNotes(("m",), {"m": ContainerNote("defaultdict", extra="e")}),
            "m: expected the factory of a defaultdict, found str",
        ),
        (
            {"m": ListEntry(), "m/0": OBJECT},
            RankNotes(("m",), {"m": ContainerNote("namedtuple", "a:Point")}),
            r"m: expected a:Point to be a named tuple of 1 fields, found the fields \('x', 'y'\)",
        ),
        (
            {"m": DictEntry([])},
            RankNotes(("m",), {"m": ContainerNote(extra="gone")}),
            "gone: expected an entry, found none",
        ),
    ],
)
def test_entries_that_contradict_each_other_are_refused(entries, notes, message):
    with pytest.raises(MetadataError, match=f"^{message}"):
        build(entries, notes)


@settings(max_examples=250)
@given(st.data())
def test_hostile_notes_never_lead_to_anything_but_a_metadata_error(data):
    paths = ["m", "m/0", "m/0/0", "m/1", "n", "n/k", "x-lightning-snapshot/1"]
    entry_kinds = st.sampled_from([ListEntry(), DictEntry(["k", 0]), OrderedDictEntry([1]), FIVE, OBJECT])
    some_paths = st.dictionaries(st.sampled_from(paths), st.sampled_from(paths), max_size=4)
    entries = data.draw(st.dictionaries(st.sampled_from(paths), entry_kinds))
    kinds = st.sampled_from(["", "tuple", "namedtuple", "defaultdict", "items", "OrderedDict", "?"])
    classes = st.sampled_from(["", "collections:OrderedDict", "collections:defaultdict", "os:system"])
    some_notes = st.builds(ContainerNote, kinds, classes, st.sampled_from(["", "m/1", "gone"]))
    containers = data.draw(st.dictionaries(st.sampled_from(["", *paths]), some_notes, max_size=4))
    notes = RankNotes(("m", "n"), containers, same=data.draw(some_paths), moved=data.draw(some_paths))
    tree = StateTree(entries, notes)
    try:
        leaves = {path: path for path in tree.leaf_paths(tree.roots.values(), with_root_attributes=True)}
        values = tree.build(tree.roots.values(), leaves.__getitem__, lambda *_: Point)
        tree.root_container(dict(zip(tree.roots, values, strict=True)), leaves.__getitem__)
    except MetadataError:
        pass


def test_a_registered_class_that_is_no_named_tuple_is_refused():
    tree = StateTree({"m": ListEntry()}, RankNotes(("m",), {"m": ContainerNote("namedtuple", "a:B")}))
    with pytest.raises(MetadataError, match=r"^m: expected a:B to be a named tuple of 0 fields, found no named tuple"):
        tree.build(["m"], lambda path: path, lambda *_: dict)


def test_keys_that_no_dictionary_can_have_are_refused():
    entries: dict[str, Entry] = {"m": ListEntry(), "m/0": OBJECT, "m/1": FIVE}
    tree = StateTree(entries, RankNotes(("m",), {"m": ContainerNote("items")}))
    with pytest.raises(MetadataError, match=r"^m: expected keys that a dictionary can have, .*unhashable"):
        tree.build(["m"], lambda path: ([],), lambda *_: None)


def test_metadata_that_is_nested_too_deeply_is_refused():
    entries: dict[str, Entry] = {"/".join(["m"] + ["0"] * depth): ListEntry() for depth in range(400)}
    with pytest.raises(MetadataError, match="expected at most 200 levels of nesting"):
        build(entries)


def test_absurd_list_indices_are_no_items():
    assert build({"m": ListEntry(), "m/" + "1" * 5000: FIVE, "m/+1": FIVE, "m/٣": FIVE, "m/1": FIVE}) == {"m": [5]}


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("int", " +1_0 ", 10),
        ("bool", "False", False),
        ("str", "", ""),
        ("bytes", "YWI=", b"ab"),
        ("float", "AAAAAAAAAIA=", -0.0),
    ],
)
def test_primitives_are_read(kind, text, value):
    assert same(read_primitive("m", PrimitiveEntry(kind, text, replicated=False)), value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("int", "0x1"),
        ("int", ""),
        ("int", "1" * 5000),
        ("bool", "true"),
        ("bytes", "YQ"),
        ("float", "AAAA"),
        ("float", "!"),
    ],
)
def test_texts_that_are_no_primitive_are_refused_with_path_and_text(kind, text):
    with pytest.raises(MetadataError, match=f"^0/m/k: expected the text of a {kind}, found '{text[:80]}'$"):
        read_primitive("0/m/k", PrimitiveEntry(kind, text, replicated=False))
