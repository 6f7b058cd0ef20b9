"""The text of ``.snapshot_metadata``."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_snapshot.errors import MetadataError
from lightning_snapshot.manifest import (
    EXTENSION_KEY,
    ChunkedTensorEntry,
    ContainerNote,
    DictEntry,
    DTensorEntry,
    Entry,
    Extension,
    FileRecord,
    ListEntry,
    Manifest,
    ObjectEntry,
    OrderedDictEntry,
    PrimitiveEntry,
    RankNotes,
    Shard,
    ShardedTensorEntry,
    TensorEntry,
    TensorNote,
    decode,
    encode,
    escaped_length,
    seal,
    split_rank,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "data"
GOLDEN_NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/.snapshot_metadata"))
YAML_LOADERS = [yaml.SafeLoader, *([yaml.CSafeLoader] if hasattr(yaml, "CSafeLoader") else [])]


def golden_text(name: str) -> bytes:
    return (GOLDEN / name / ".snapshot_metadata").read_bytes()


TENSOR = TensorEntry("f", "buffer_protocol", "torch.float32", (2, 3), True, (8, 32))
PIECE = TensorEntry("g", "buffer_protocol", "torch.float32", (1, 3), False)
EXTENSION = Extension(
    save_id="s1",
    writer="lightning-snapshot 1",
    block_bytes=4,
    files={"f": FileRecord(5, "0123456789abcdef" * 2), "g": FileRecord(0, "")},
    ranks={
        "0": RankNotes(
            roots=("m",),
            containers={"m/l": ContainerNote("tuple")},
            tensors={"m/t": TensorNote(dtype="torch.uint16", dim_order=(1, 0))},
            tied={"m/a": "m/t"},
            same={"m/b": "m/l"},
            moved={"": "x-lightning-snapshot/1"},
        )
    },
)
EVERYTHING = Manifest(
    version="0.1.0",
    world_size=2,
    entries={
        "0/m": OrderedDictEntry(["t", 5, -(10**30), True]),
        "0/m/l": ListEntry(),
        "0/m/d": DictEntry([]),
        "0/m/t": TENSOR,
        "0/m/c": ChunkedTensorEntry("torch.float32", (2, 3), [Shard((0, 0), (1, 3), PIECE)], False),
        "0/m/s": ShardedTensorEntry([Shard((1, 0), (1, 3), PIECE)]),
        "1/m/dt": DTensorEntry([Shard((1, 0), (1, 3), PIECE)], [[0, 1], [2, 3]], [[0, 1], [-1]]),
        "0/m/i": PrimitiveEntry(type="int", serialized_value="5", replicated=False, readable=None),
        "0/m/f": PrimitiveEntry(type="float", serialized_value="AAAAAAAA4D8=", replicated=True, readable="0.5"),
        "0/m/y": PrimitiveEntry(type="bytes", serialized_value="", replicated=True),
        "0/m/b": PrimitiveEntry(type="bool", serialized_value="True", replicated=True),
        "0/m/z": PrimitiveEntry(type="str", serialized_value="é", replicated=True),
        "0/m/o": ObjectEntry("0/m/o", "torch_save", "builtins.tuple", False),
    },
    extension=EXTENSION,
)


# --- writing --------------------------------------------------------------------------------------------------------


def test_the_exact_bytes_of_every_kind_of_entry() -> None:
    content = (
        '{"save_id":"s1","writer":"lightning-snapshot 1","block_bytes":4,'
        '"files":{"f":{"size_bytes":5,"hashes":"0123456789abcdef0123456789abcdef"},"g":{"size_bytes":0,"hashes":""}},'
        '"ranks":{"0":{"roots":["m"],"containers":{"m/l":{"kind":"tuple"}},'
        '"tensors":{"m/t":{"dtype":"torch.uint16","dim_order":[1,0]}},'
        '"tied":{"m/a":"m/t"},"same":{"m/b":"m/l"},"moved":{"":"x-lightning-snapshot/1"}}},"format":1}'
    )
    piece = (
        '{"offsets":[%s,0],"sizes":[1,3],"tensor":{"type":"Tensor","location":"g","serializer":"buffer_protocol",'
        '"dtype":"torch.float32","shape":[1,3],"replicated":false,"byte_range":null}}'
    )
    expected = (
        '{"version":"0.1.0","world_size":2,"manifest":{'
        '"0/m":{"type":"OrderedDict","keys":["t",5,-1000000000000000000000000000000,true]},'
        '"0/m/l":{"type":"list"},'
        '"0/m/d":{"type":"dict","keys":[]},'
        '"0/m/t":{"type":"Tensor","location":"f","serializer":"buffer_protocol","dtype":"torch.float32",'
        '"shape":[2,3],"replicated":true,"byte_range":[8,32]},'
        f'"0/m/c":{{"type":"ChunkedTensor","dtype":"torch.float32","shape":[2,3],"chunks":[{piece % 0}],'
        '"replicated":false},'
        f'"0/m/s":{{"type":"ShardedTensor","shards":[{piece % 1}]}},'
        f'"1/m/dt":{{"type":"DTensor","shards":[{piece % 1}],"mesh":[[0,1],[2,3]],"dim_map":[[0,1],[-1]]}},'
        '"0/m/i":{"type":"int","serialized_value":"5","replicated":false,"readable":null},'
        '"0/m/f":{"type":"float","serialized_value":"AAAAAAAA4D8=","replicated":true,"readable":"0.5"},'
        '"0/m/y":{"type":"bytes","serialized_value":"","replicated":true,"readable":null},'
        '"0/m/b":{"type":"bool","serialized_value":"True","replicated":true,"readable":null},'
        '"0/m/z":{"type":"str","serialized_value":"é","replicated":true,"readable":null},'
        '"0/m/o":{"type":"object","location":"0/m/o","serializer":"torch_save","obj_type":"builtins.tuple",'
        '"replicated":false},'
        f'"x-lightning-snapshot":{{"type":"x-lightning-snapshot","checksum":"{"0" * 32}",'
        f'"content":{json.dumps(content)}}}'
        "}}"
    )
    assert encode(EVERYTHING) == seal(expected.encode())


def test_any_change_of_our_own_metadata_is_noticed() -> None:
    data = encode(EVERYTHING)
    for position in range(len(data)):
        for bit in (0x01, 0x20):
            damaged = bytearray(data)
            damaged[position] ^= bit
            with pytest.raises(MetadataError, match=r"^here: "):
                decode(bytes(damaged), source="here")


def test_our_own_metadata_with_another_key_or_type_of_the_extension_is_damaged() -> None:
    data = encode(EVERYTHING)
    for name in (b'"x-lightning-snapshot":', b'"type":"x-lightning-snapshot"'):
        damaged = data.replace(name, name.replace(b"shot", b"shoT"))
        with pytest.raises(MetadataError, match="expected an entry 'x-lightning-snapshot', found none"):
            decode(damaged, source="here")


def test_every_kind_of_entry_comes_back() -> None:
    assert decode(encode(EVERYTHING), source="here") == EVERYTHING


TEXTS = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from('\0\b\t\n\v\f\r\x1b"\\/ #:%\x7f\x80\x85\x9f\xa0\u2028\u2029\ufeff\ufffe\uffff\U0001f600'),
    ),
    max_size=12,
)
SIZES = st.integers(0, 2**63 - 1)


@st.composite
def tensors(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> TensorEntry:
    begin, end = sorted((draw(SIZES), draw(SIZES)))
    return TensorEntry(
        draw(TEXTS),
        draw(st.sampled_from(["buffer_protocol", "torch_save"])),
        draw(TEXTS),
        tuple(draw(st.lists(SIZES, max_size=3))) if shape is None else shape,
        draw(st.booleans()),
        draw(st.sampled_from([None, (begin, end)])),
    )


@st.composite
def shards(draw: st.DrawFn) -> list[Shard]:
    result = []
    for _ in range(draw(st.integers(0, 2))):
        dimensions = draw(st.integers(0, 3))
        offsets = tuple(draw(st.lists(SIZES, min_size=dimensions, max_size=dimensions)))
        sizes = tuple(draw(st.lists(SIZES, min_size=dimensions, max_size=dimensions)))
        result.append(Shard(offsets, sizes, draw(tensors(sizes))))
    return result


KEYS = st.lists(st.one_of(TEXTS, st.integers(), st.booleans()), max_size=4)
ENTRIES: st.SearchStrategy[Entry] = st.one_of(
    st.just(ListEntry()),
    st.builds(DictEntry, KEYS),
    st.builds(OrderedDictEntry, KEYS),
    st.builds(
        PrimitiveEntry,
        st.sampled_from(["int", "str", "bool", "bytes", "float"]),
        TEXTS,
        st.booleans(),
        st.none() | TEXTS,
    ),
    tensors(),
    st.builds(ChunkedTensorEntry, TEXTS, st.lists(SIZES, max_size=3).map(tuple), shards(), st.booleans()),
    st.builds(ShardedTensorEntry, shards()),
    st.builds(
        DTensorEntry,
        shards(),
        st.sampled_from([[], [0, 1], [[0, 1], [2, 3]]]),
        st.lists(st.lists(st.integers(-1, 3)), max_size=2),
    ),
    st.builds(ObjectEntry, TEXTS, TEXTS, TEXTS, st.booleans()),
)
MANIFESTS = st.builds(
    Manifest,
    TEXTS,
    st.just(3),
    st.dictionaries(st.builds("{}/{}".format, st.integers(0, 2), TEXTS), ENTRIES, max_size=5),
    st.none()
    | st.builds(
        Extension,
        TEXTS,
        TEXTS,
        st.integers(1, 8),
        st.dictionaries(TEXTS, st.just(FileRecord(0, "")), max_size=2),
        st.just({}) | st.builds(lambda moved: {"0": RankNotes(moved=moved)}, st.dictionaries(TEXTS, TEXTS, max_size=2)),
    ),
)


@given(MANIFESTS)
def test_what_is_written_is_read_back_by_json_and_yaml_parsers_alike(manifest: Manifest) -> None:
    data = encode(manifest)
    assert decode(data, source="here") == manifest
    assert list(decode(data, source="here").entries) == list(manifest.entries)
    content = json.loads(data)
    for loader in YAML_LOADERS:
        # As torchsnapshot does it; and ours with the same parser, from a text that is no JSON.
        assert yaml.load(data.decode(), Loader=loader) == content  # noqa: S506  # both are safe loaders
    assert decode(seal(data + b"\n# YAML"), source="here") == manifest


@given(TEXTS)
def test_escaped_length_is_what_the_file_takes(text: str) -> None:
    data = encode(Manifest("", 1, {f"0/{text}": ListEntry()})).decode()
    key = data.removeprefix('{"version":"","world_size":1,"manifest":{"').removesuffix('":{"type":"list"}}}')
    assert escaped_length(f"0/{text}") == len(key)


def test_only_what_a_yaml_parser_does_not_take_is_escaped() -> None:
    raw = "é中\u00a0\ufeff\U0001f600"
    data = encode(Manifest("0.1.0", 1, {f"0/{raw}\x7f\x85\u2028\uffff": ListEntry()})).decode()
    assert f'"0/{raw}\\u007f\\u0085\\u2028\\uffff"' in data


@pytest.mark.parametrize("character", ["a", "中", '"', "\0"])
def test_a_path_that_yaml_would_refuse_is_refused(character: str) -> None:
    width = escaped_length(character)
    longest = "0/" + character * (1020 // width)
    data = encode(Manifest("0.1.0", 1, {longest: ListEntry()}))
    for loader in YAML_LOADERS:
        content = yaml.load(data.decode(), Loader=loader)  # noqa: S506  # both are safe loaders
        assert list(content["manifest"]) == [longest]
    with pytest.raises(MetadataError, match=r"at most 1022 characters as escaped, found 102[3-8]"):
        encode(Manifest("0.1.0", 1, {longest + character: ListEntry()}))


@pytest.mark.parametrize(
    ("manifest", "place"),
    [
        (Manifest("0.1.0", 1, {"0/a": ListEntry(), "0/\ud83d": ListEntry()}), r"'0/\ud83d'"),
        (Manifest("0.1.0", 1, {"0/a": DictEntry(["\udfff"])}), "'0/a'"),
        (Manifest("0.1.0", 1, {}, Extension("\ud800", "", 1, {})), "'x-lightning-snapshot'"),
    ],
)
def test_a_lone_surrogate_is_refused_with_its_place(manifest: Manifest, place: str) -> None:
    with pytest.raises(MetadataError, match="lone surrogate") as caught:
        encode(manifest)
    assert place in str(caught.value)


# --- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_goldens_keep_all_their_entries(name: str) -> None:
    manifest = decode(golden_text(name), source=name)
    content = yaml.safe_load(golden_text(name)) if name.startswith("legacy") else json.loads(golden_text(name))
    assert list(manifest.entries) == list(content["manifest"])
    assert manifest.world_size == content["world_size"]
    assert manifest.version == content["version"]
    # Modern forms only: what is written from it says the same.
    assert decode(encode(manifest), source=name) == manifest


@pytest.mark.parametrize("name", [name for name in GOLDEN_NAMES if not name.startswith("legacy")])
def test_a_modern_file_loses_nothing(name: str) -> None:
    assert json.loads(encode(decode(golden_text(name), source=name))) == json.loads(golden_text(name))


def variations(content: Any) -> dict[str, bytes]:
    compact = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    tabs = json.dumps(content, indent="\t").encode()
    return {
        "compact": compact,
        "byte order mark": b"\xef\xbb\xbf" + compact,
        "tabs, line ends, escaped slashes": tabs.replace(b"\n", b"\r\n").replace(b"/", b"\\/"),
        "other order": json.dumps(content, sort_keys=True).encode(),
        "block YAML": yaml.safe_dump(content, sort_keys=False, allow_unicode=True).encode(),
        "flow YAML": yaml.safe_dump(content, default_flow_style=True, width=10**9).encode(),
        "comments": b"# first\n" + json.dumps(content, indent=2).replace("\n", " # more\n").encode() + b"\n# last",
    }


@pytest.mark.parametrize("kind", sorted(variations({})))
@pytest.mark.parametrize("name", ["w1-odd-keys", "w4-dtensor-2d", "w1-primitives"])
def test_the_same_content_in_another_dress(name: str, kind: str) -> None:
    expected = decode(golden_text(name), source=name)
    data = variations(json.loads(golden_text(name)))[kind]
    assert decode(data, source=name) == Manifest(expected.version, expected.world_size, dict(expected.entries))


@pytest.mark.parametrize("version", [None, 5, {"a": 1}, ["x"]])
def test_the_version_can_be_anything(version: object) -> None:
    data = json.dumps({"version": version, "world_size": 1, "manifest": {"0/a": {"type": "list"}}}).encode()
    assert decode(data, source="here").entries == {"0/a": ListEntry()}


def one(entry: object, path: str = "0/a") -> bytes:
    """A file with one entry."""
    return json.dumps({"version": "0.1.0", "world_size": 2, "manifest": {path: entry}}).encode()


def test_unknown_types_are_dropped() -> None:
    manifest = {
        "0/a": {"type": "list"},
        "0/b": {"type": "x-other", "location": "f", "replicated": False},
        "nowhere": {"type": "x-other", "anything": [1]},
        "0/c": {"type": "x-of-somebody-else", "content": "not known"},
    }
    data = json.dumps({"version": "0.1.0", "world_size": 1, "manifest": manifest}).encode()
    assert decode(data, source="here") == Manifest("0.1.0", 1, {"0/a": ListEntry()})


@pytest.mark.parametrize("readable", [5, {"a": 1}, [True], True])
def test_readable_can_be_anything_or_missing(readable: object) -> None:
    entry = {"type": "int", "serialized_value": "5", "replicated": False}
    expected = {"0/a": PrimitiveEntry(type="int", serialized_value="5", replicated=False)}
    assert decode(one(entry), source="here").entries == expected
    assert decode(one({**entry, "readable": readable}), source="here").entries == expected


BARE_PIECE = {"offsets": [3, 0], "sizes": [2, 2], "location": "sharded/st_3_0"}
OLD_TENSOR = {"location": "f", "serializer": "torch_save", "dtype": "torch.int8", "shape": [1], "replicated": True}
OLD_PIECE = {"offsets": [0], "sizes": [1], "tensor": OLD_TENSOR}
READ_PIECE = Shard((0,), (1,), TensorEntry("f", "torch_save", "torch.int8", (1,), True))


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (
            {"type": "torch.Tensor", "location": "f", "replicated": True},
            ObjectEntry("f", "torch_save", "torch.Tensor", True),
        ),
        (
            {"type": "builtins.int", "location": "f", "replicated": False},
            ObjectEntry("f", "torch_save", "builtins.int", False),
        ),
        (
            {"type": "Tensor", "location": "f", "replicated": False},
            ObjectEntry("f", "torch_save", "torch.Tensor", False),
        ),
        ({"type": "Tensor", **OLD_TENSOR}, TensorEntry("f", "torch_save", "torch.int8", (1,), True)),
        (
            {"type": "ShardedTensor", "shards": [BARE_PIECE]},
            ShardedTensorEntry([Shard((3, 0), (2, 2), TensorEntry("sharded/st_3_0", "torch_save", "", (2, 2), False))]),
        ),
        ({"type": "ShardedTensor", "shards": [OLD_PIECE]}, ShardedTensorEntry([READ_PIECE])),
        (
            {"type": "ChunkedTensor", "dtype": "torch.int8", "shape": [], "chunks": [OLD_PIECE]},
            ChunkedTensorEntry("torch.int8", (), [READ_PIECE], True),
        ),
        (
            {"type": "ChunkedTensor", "dtype": "torch.int8", "shape": [], "chunks": [OLD_PIECE], "replicated": False},
            ChunkedTensorEntry("torch.int8", (), [READ_PIECE], False),
        ),
    ],
)
def test_old_forms_become_modern_ones(entry: dict[str, object], expected: Entry) -> None:
    assert decode(one(entry), source="here").entries == {"0/a": expected}
    as_yaml = yaml.safe_dump({"version": "0.0.1", "world_size": 1, "manifest": {"0/a": entry}}).encode()
    assert decode(as_yaml, source="here").entries == {"0/a": expected}


def test_both_halves_of_a_surrogate_pair_are_one_character() -> None:
    assert "0/h/k\U0001f680" in decode(golden_text("hazard-emoji"), source="here").entries


# --- defects --------------------------------------------------------------------------------------------------------

GOOD_TENSOR = {
    "type": "Tensor",
    "location": "f",
    "serializer": "buffer_protocol",
    "dtype": "torch.float32",
    "shape": [2],
    "replicated": False,
    "byte_range": [0, 8],
}
GOOD_PIECE = {"offsets": [0], "sizes": [2], "tensor": GOOD_TENSOR}
GOOD_DTENSOR = {"type": "DTensor", "shards": [GOOD_PIECE], "mesh": [0, 1], "dim_map": [[0]]}
GOOD_FILE = {"version": "0.1.0", "world_size": 2, "manifest": {"0/a": GOOD_TENSOR}}


def piece(**changes: object) -> dict[str, object]:
    return {"type": "ShardedTensor", "shards": [{**GOOD_PIECE, **changes}]}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("text", ["a mapping with a 'type'", "'text'"]),
        ({"keys": []}, ["a mapping with a 'type'"]),
        ({"type": 5}, ["a mapping with a 'type'"]),
        ({"type": "dict"}, ["keys"]),
        ({"type": "dict", "keys": [None]}, ["$.keys[0]", "null"]),
        ({"type": "dict", "keys": "ab"}, ["array", "$.keys"]),
        ({**GOOD_TENSOR, "shape": [-1]}, [">= 0", "$.shape[0]", "-1"]),
        ({**GOOD_TENSOR, "shape": [2**63]}, ["<= 9223372036854775807", str(2**63)]),
        ({**GOOD_TENSOR, "shape": [10**40]}, ["<= 9223372036854775807", str(10**40)]),
        ({**GOOD_TENSOR, "shape": [1.5]}, ["float", "1.5"]),
        ({**GOOD_TENSOR, "shape": [True]}, ["bool"]),
        ({**GOOD_TENSOR, "shape": ["2"]}, ["str"]),
        ({**GOOD_TENSOR, "shape": 2}, ["$.shape"]),
        ({**GOOD_TENSOR, "byte_range": [8, 4]}, ["byte_range", "[8, 4]"]),
        ({**GOOD_TENSOR, "byte_range": [-8, 4]}, [">= 0"]),
        ({**GOOD_TENSOR, "byte_range": [8]}, ["length 2"]),
        ({**GOOD_TENSOR, "replicated": "no"}, ["bool", "$.replicated"]),
        ({**GOOD_TENSOR, "location": None}, ["$.location"]),
        ({key: GOOD_TENSOR[key] for key in GOOD_TENSOR if key != "dtype"}, ["`dtype`"]),
        ({"type": "int", "serialized_value": 5, "replicated": False}, ["$.serialized_value"]),
        ({"type": "object", "location": "f", "replicated": False}, ["`serializer`"]),
        (piece(offsets=[0, 0]), ["'offsets'", "(0, 0)"]),
        (piece(sizes=[3]), ["'sizes'", "(3,)"]),
        (piece(tensor={**GOOD_TENSOR, "byte_range": [1, 0]}), ["byte_range", "[1, 0]"]),
        (piece(tensor=None), ["$.shards[0].tensor"]),
        ({"type": "ShardedTensor", "shards": [5]}, ["$.shards[0]"]),
        ({"type": "ShardedTensor", "shards": {}}, ["$.shards"]),
        ({**GOOD_DTENSOR, "mesh": [[0], [-1]]}, ["'mesh'", "-1"]),
        ({**GOOD_DTENSOR, "mesh": ["x"]}, ["'mesh'", "'x'"]),
        ({**GOOD_DTENSOR, "mesh": 5}, ["$.mesh"]),
        ({**GOOD_DTENSOR, "dim_map": [[-2]]}, ["$.dim_map[0][0]"]),
        ({**GOOD_DTENSOR, "dim_map": [0]}, ["$.dim_map[0]"]),
    ],
)
def test_a_defect_is_named(entry: object, words: list[str]) -> None:
    with pytest.raises(MetadataError) as caught:
        decode(one(entry), source="/the/place")
    for word in ["/the/place", "'0/a'", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world_size": 0}, ["'world_size'", "0"]),
        ({"world_size": -1}, ["'world_size'", "-1"]),
        ({"world_size": True}, ["'world_size'", "True"]),
        ({"world_size": 2**63}, ["'world_size'", str(2**63)]),
        ({"world_size": "2"}, ["'world_size'", "'2'"]),
        ({"manifest": []}, ["'manifest'", "[]"]),
        ({"manifest": {"2/a": GOOD_TENSOR}}, ["'2/a'", "world size 2", "rank 2"]),
        ({"manifest": {"-1/a": GOOD_TENSOR}}, ["'-1/a'", "a rank and a slash"]),
        ({"manifest": {"00/a": GOOD_TENSOR}}, ["'00/a'", "a rank and a slash"]),
        ({"manifest": {"²/a": GOOD_TENSOR}}, ["'²/a'", "a rank and a slash"]),
        ({"manifest": {"/a": GOOD_TENSOR}}, ["'/a'", "a rank and a slash"]),
        ({"manifest": {"0": GOOD_TENSOR}}, ["'0'", "a rank and a slash"]),
        ({"manifest": {EXTENSION_KEY: GOOD_TENSOR}}, [EXTENSION_KEY, "found none"]),
    ],
)
def test_a_defect_of_the_file_is_named(changes: dict[str, object], words: list[str]) -> None:
    assert decode(json.dumps(GOOD_FILE).encode(), source="here").entries
    with pytest.raises(MetadataError) as caught:
        decode(json.dumps({**GOOD_FILE, **changes}).encode(), source="/the/place")
    for word in ["/the/place", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("field", ["version", "world_size", "manifest"])
def test_a_missing_field_of_the_file_is_named(field: str) -> None:
    with pytest.raises(MetadataError, match=f"/the/place: .*'{field}'"):
        decode(json.dumps({key: GOOD_FILE[key] for key in GOOD_FILE if key != field}).encode(), source="/the/place")


TEXT = json.dumps(GOOD_FILE)
HEADER = b"version: 1\nworld_size: 1\n"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cut off"),
        (TEXT[:100].encode(), r"100 bytes.*cut off"),
        (b"\xff" * 10, "neither"),
        (TEXT.encode("utf-16"), "neither"),
        (TEXT.encode() + b"\0", "neither"),
        (b"\0" * 4096, "neither"),
        (b"PK\x03\x04" + bytes(100), "neither"),
        (b"a: [1\n- b: {", "neither"),
        (TEXT.encode() + b"\n---\n{}", "neither"),
        (b"[1]", r"a mapping with 'version'.*\[1\]"),
        (b"plain text", "a mapping with 'version'.*plain text"),
        (b"# nothing", "a mapping with 'version'.*None"),
        (b"[" * 100_000 + b"]" * 100_000, "nested"),
        (b"{a: " * 5_000 + b"}" * 5_000, "neither"),
        (b"- " * 100_000, "neither"),
        (TEXT.replace('"version": "0.1.0"', '"version": ' + "9" * 5_000).encode(), "here"),
        (b"version: 0x" + b"f" * 10_000 + b"\nworld_size: 0\nmanifest: {}", "'world_size'"),
        (b"version: 1\nworld_size: 0x" + b"f" * 10_000 + b"\nmanifest: {}", "cannot be shown"),
        (b"version: 2022-99-99\nworld_size: 1\nmanifest: {}", "neither"),
        (b"version: !!int ''\nworld_size: 1\nmanifest: {}", "neither"),
        (b"version: !!timestamp x\nworld_size: 1\nmanifest: {}", "neither"),
        (b"version: !!python/object:os.system x\nworld_size: 1\nmanifest: {}", "neither"),
        (HEADER + b"manifest: {5: {type: list}}", "entry 5: "),
        (HEADER + b"manifest: {0/a: {type: dict, 5: 6}}", "'0/a'.*5: 6"),
        (
            HEADER + b"manifest: {0/a: {type: dict, keys: [0x" + b"f" * 4000 + b"]}}",
            "'0/a'.*14284 bits",
        ),
        (TEXT.replace('"f"', '"\\ud83d\\ud83d"').encode(), "neither"),
    ],
)
def test_what_is_no_manifest_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(MetadataError, match=f"(?s)^here: .*{words}|{words}"):
        decode(data, source="here")


def test_deep_nesting_inside_an_entry_is_refused() -> None:
    mesh: object = 0
    for _ in range(900):
        mesh = [mesh]
    decode(one({**GOOD_DTENSOR, "mesh": mesh}), source="here")
    data = one({**GOOD_DTENSOR, "mesh": "MESH"}).replace(b'"MESH"', b"[" * 50_000 + b"0" + b"]" * 50_000)
    with pytest.raises(MetadataError, match=r"here: .*nested"):
        decode(data, source="here")


def test_yaml_aliases_are_refused() -> None:
    lines = ["version: &a0 [x, x]", *(f"v{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60))]
    data = "\n".join([*lines, "world_size: 1", "manifest: {}"]).encode()
    with pytest.raises(MetadataError, match=r"here: .*an alias.*line 2"):
        decode(data, source="here")
    with pytest.raises(MetadataError, match=r"here: .*alias"):
        decode(b"version: &a [*a]\nworld_size: 1\nmanifest: {}", source="here")


def with_extension(content: object) -> bytes:
    manifest = {
        "0/a": {"type": "list"},
        EXTENSION_KEY: {"type": EXTENSION_KEY, "checksum": "0" * 32, "content": content},
    }
    return seal(json.dumps({"version": "0.1.0", "world_size": 1, "manifest": manifest}).encode())


EXTENSION_CONTENT = {"format": 1, "save_id": "s", "writer": "w", "block_bytes": 4, "files": {}}


def test_a_newer_format_is_refused_before_anything_else_of_it_is_read() -> None:
    with pytest.raises(MetadataError, match=r"here: .*format 1 or older, found format 2; install a newer"):
        decode(with_extension(json.dumps({"format": 2, "files": "all different"})), source="here")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 0}, ">= 1"),
        ({"format": None}, "null"),
        ({"save_id": 5}, r"\$.save_id"),
        ({"block_bytes": 0}, r"\$.block_bytes"),
        ({"block_bytes": -4}, r"\$.block_bytes"),
        ({"files": {"f": {"size_bytes": -1, "hashes": ""}}}, ">= 0"),
        ({"files": {"f": {"size_bytes": 2**63, "hashes": ""}}}, "<= 9223372036854775807"),
        ({"files": {"f": {"size_bytes": 5, "hashes": "0" * 16}}}, "32 hexadecimal digits .*'f'.*'0000"),
        ({"files": {"f": {"size_bytes": 4, "hashes": "g" * 16}}}, "16 hexadecimal digits .*'f'.*'gggg"),
        ({"ranks": {"0": {"moved": {"a": 5}}}}, r"\$.ranks"),
    ],
)
def test_a_defect_of_the_extension_is_named(changes: dict[str, object], words: str) -> None:
    assert decode(with_extension(json.dumps(EXTENSION_CONTENT)), source="here").extension
    with pytest.raises(MetadataError, match=f"here: entry 'x-lightning-snapshot': .*{words}"):
        decode(with_extension(json.dumps({**EXTENSION_CONTENT, **changes})), source="here")


@pytest.mark.parametrize("content", [None, 5, "", "[", '{"format":1', "[" * 50_000, '"\\ud800"', "\ud800"])
def test_an_unreadable_extension_is_refused(content: object) -> None:
    with pytest.raises(MetadataError, match=r"here: "):
        decode(with_extension(content), source="here")


@pytest.mark.parametrize("path", ["0/a/b", "12/x-lightning-snapshot/1", "0/", "3//"])
def test_split_rank(path: str) -> None:
    rank, logical_path = split_rank(path)
    assert f"{rank}/{logical_path}" == path


@pytest.mark.parametrize("path", ["", "0", "a/b", "-1/a", "+1/a", "01/a", "1 /a", "\u0663/a", "9" * 5000 + "/a"])
def test_split_rank_refuses_what_is_no_manifest_path(path: str) -> None:
    with pytest.raises(MetadataError, match="a rank and a slash"):
        split_rank(path)


def decode_or_refuse(data: bytes) -> None:
    """Any other exception than `MetadataError` is a failure."""
    try:
        manifest = decode(data, source="/the/place")
    except MetadataError as error:
        assert str(error).startswith("/the/place: ")  # noqa: PT017  # either outcome is right
    else:
        # What was let through is sound enough to be written and read again.
        try:
            again = encode(manifest)
        except MetadataError:
            return
        assert decode(again, source="/the/place") == manifest


SEEDS = [
    encode(EVERYTHING),
    *(golden_text(name) for name in ("legacy-003-w2", "legacy-20221002-w2", "w4-dtensor-2d", "hazard-emoji")),
]
SYNTAX = rb'" \ { } [ ] : , - 0 -1 1e999 null true \ud800 ~ .inf 1:2:3 = 0b2 2022-13-01 type Tensor list &a *a | ? << #'
TAGS = b"!!int !!bool !!float !!null !!str !!binary !!timestamp !!set !!omap !!pairs !!map !!seq !x %YAML --- ..."
BYTES = [b"\n", b"\xed\xa0\x80", b"\0", b"\xff", b"9" * 25, b"9" * 5000, b"0x" + b"f" * 5000]
FRAGMENTS = st.builds(
    bytes.__add__,
    st.binary(max_size=8) | st.sampled_from(SYNTAX.split()) | st.sampled_from(TAGS.split()) | st.sampled_from(BYTES),
    st.sampled_from([b"", b" ", b"\n"]),
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.data())
def test_mutated_text_is_read_or_refused(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(SEEDS))
    for _ in range(data.draw(st.integers(1, 3))):
        begin = data.draw(st.integers(0, len(text)))
        end = min(len(text), begin + data.draw(st.sampled_from([0, 0, 1, 2, 8, 64, len(text)])))
        text = text[:begin] + data.draw(FRAGMENTS) + text[end:]
    decode_or_refuse(text)


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 3),
        st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 0.5, 1e300]),
        st.text(max_size=3),
        st.sampled_from(["list", "Tensor", "DTensor", "torch.Tensor", "int", EXTENSION_KEY, "0/a", '{"format":1}']),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "a", "location"]), inner),
    max_leaves=4,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.data())
def test_mutated_structure_is_read_or_refused(data: st.DataObject) -> None:
    content = yaml.safe_load(data.draw(st.sampled_from(SEEDS[:3])).decode())
    for _ in range(data.draw(st.integers(1, 2))):
        parent, node = None, content
        while isinstance(node, (dict, list)) and node and (parent is None or data.draw(st.integers(0, 3))):
            key = data.draw(st.sampled_from(sorted(node, key=str) if isinstance(node, dict) else range(len(node))))
            parent, node = node, node[key]
        if parent is None:
            break
        match data.draw(st.sampled_from(["replace", "remove", "rename"])):
            case "replace":
                parent[key] = data.draw(VALUES)
            case "remove":
                del parent[key]
            case "rename" if isinstance(parent, dict):
                parent[data.draw(st.text(max_size=4))] = parent.pop(key)
    decode_or_refuse(json.dumps(content).encode())
    decode_or_refuse(yaml.safe_dump(content).encode())
