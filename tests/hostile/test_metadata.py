"""Metadata that lies about places, sizes and structure."""

import json
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.forge import blob, chunked, foreign, own, record, tensor, text_of, value, write


def one(root: Path, entry: Any, files: dict[str, bytes] | None = None, world_size: Any = 1) -> None:
    """A snapshot of torchsnapshot that holds one value."""
    entries = {"0/m": {"type": "dict", "keys": ["v"]}, "0/m/v": entry}
    foreign(root, entries, {"data": bytes(4096)} if files is None else files, world_size)


# --- places ----------------------------------------------------------------------------------------------------------

LOCATIONS: dict[str, tuple[str, str]] = {
    "absolute": ("{outside}/secret", "an absolute path"),
    "parent": ("../outside/secret", "leads out of it"),
    "parent inside": ("x/../../outside/secret", "leads out of it"),
    "parents": ("../" * 400 + "etc/passwd", "leads out of it"),
    "backslash": ("..\\outside\\secret", "a backslash"),
    "NUL": ("data\0.png", "a NUL character"),
    "empty": ("", "an empty one"),
    "the snapshot": (".", "the root"),
    "link": ("link", "found a link to"),
    "link inside a linked folder": ("folder/secret", "found a link to"),
    "way out and back": ("folder/../../a.ckpt/folder/secret", "leads out of it|found a link to"),
}


@pytest.mark.parametrize("kind", ["tensor", "object"])
@pytest.mark.parametrize("name", LOCATIONS)
def test_places_outside(root, assert_refused, name, kind) -> None:
    location, message = LOCATIONS[name]
    location = location.format(outside=root.parent / "outside")
    one(root, tensor(location, [4]) if kind == "tensor" else value(location))
    (root / "link").symlink_to("../outside/secret")
    (root / "folder").symlink_to("../outside")
    assert_refused("MetadataError", message)


def device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("only root can make devices")


def listen(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket has to be short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)
    os.chdir(here)


NO_FILES: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "folder": (Path.mkdir, "DataError", "found a folder"),
    "pipe": (os.mkfifo, "DataError", "found a device or pipe"),
    "device": (device, "DataError", "found a device or pipe"),
    "socket": (listen, "StorageError", "could not open"),
    "link to itself": (lambda path: path.symlink_to("data"), "StorageError|MissingDataError", "data"),
    "link to nothing": (lambda path: path.symlink_to("nothing"), "MissingDataError", "data"),
}


@pytest.mark.parametrize("kind", ["tensor", "object"])
@pytest.mark.parametrize("name", NO_FILES)
def test_things_that_are_no_files(root, assert_refused, name, kind) -> None:
    make, errors, message = NO_FILES[name]
    one(root, tensor("data", [4]) if kind == "tensor" else value("data"), {})
    make(root / "data")
    assert_refused(errors, message)


@pytest.mark.parametrize("name", ["link", "pipe", "folder"])
def test_metadata_that_is_no_file(root, open_hostile, name) -> None:
    root.mkdir()
    metadata = root / ".snapshot_metadata"
    if name == "link":
        (root.parent / "outside" / "metadata").write_bytes(text_of({"0/m": {"type": "list"}}))
        metadata.symlink_to("../outside/metadata")
    elif name == "pipe":
        os.mkfifo(metadata)
    else:
        metadata.mkdir()
    outcomes = open_hostile(removable=name != "folder")
    for way in ("manifest", "load", "key", "value"):
        assert outcomes[way][0] == "MetadataError"
        assert ".snapshot_metadata" in outcomes[way][1]


def test_a_data_folder_that_is_a_link(root, assert_refused) -> None:
    own(root, {"0/m": tensor(".data/s/0_0", [4])}, {".data/s/0_0": bytes(16)}, {"roots": ["m"]})
    (root / ".data").rename(root.parent / "elsewhere")
    (root / ".data").symlink_to("../elsewhere")
    assert_refused("MetadataError", r"m: .*found a link to|found a link to .*elsewhere")


def test_the_metadata_as_data_and_names_that_no_file_can_have(root, open_hostile) -> None:
    one(root, tensor(".snapshot_metadata", [4]))
    assert open_hostile()["load"] is None
    one(root, tensor("x" * 5000, [4]))
    assert open_hostile()["load"][0] in {"StorageError", "MissingDataError"}


# --- sizes -----------------------------------------------------------------------------------------------------------

SIZES: dict[str, tuple[Any, str, str]] = {
    "huge": (tensor("data", [2**50]), "DataError", r"m/v: expected \d+ bytes or more in data, found 4096 bytes"),
    "huge, whole file": (
        tensor("data", [2**50], byte_range=None),
        "DataError",
        r"m/v: expected \d+ bytes in data, found 4096",
    ),
    "more than 64 bits": (tensor("data", [2**32, 2**32, 2**32]), "MetadataError|DataError", "m/v"),
    "wraps around to 16 bytes": (
        tensor("data", [2**62, 2**62], byte_range=[0, 16]),
        "MetadataError",
        "m/v: expected .* bytes for shape",
    ),
    "negative": (tensor("data", [-4]), "MetadataError", r"'0/m/v'.*>= 0"),
    "negative twice": (tensor("data", [-2, -2], byte_range=[0, 16]), "MetadataError", r"'0/m/v'.*>= 0"),
    "beyond 64 bits": (tensor("data", [2**63]), "MetadataError", "'0/m/v'"),
    "many digits": (tensor("data", [10**4000]), "MetadataError", ".snapshot_metadata"),
    "fraction": (tensor("data", [1.5]), "MetadataError", "'0/m/v'"),
    "infinity": (tensor("data", [float("inf")]), "MetadataError", ".snapshot_metadata"),
    "not a number": (
        tensor("data", [4], begin=0, byte_range=[float("nan"), 16]),
        "MetadataError",
        ".snapshot_metadata",
    ),
    "text": (tensor("data", ["4"]), "MetadataError", "'0/m/v'"),
    "empty and huge": (tensor("data", [0, 2**62, 2**62], byte_range=[0, 0]), "MetadataError", "m/v: cannot allocate"),
    "a million dimensions": (tensor("data", [1] * 10**6), "MetadataError", "'0/m/v'.*dimensions"),
    "behind the end": (tensor("data", [4], begin=4090), "DataError", "m/v: expected 4106 bytes or more in data, found"),
    "far behind the end": (tensor("data", [4], begin=2**62), "DataError", "m/v: expected .* or more in data, found"),
    "backwards": (tensor("data", [4], byte_range=[16, 0]), "MetadataError", "'0/m/v'.*byte_range"),
    "negative range": (tensor("data", [4], byte_range=[-16, 0]), "MetadataError", "'0/m/v'"),
    "another width": (
        tensor("data", [4], dtype="torch.float64"),
        "MetadataError",
        r"m/v: expected 32 bytes for shape \[4\]",
    ),
    "no dtype": (tensor("data", [4], dtype="torch.load"), "MetadataError", "m/v: expected the name of a dtype"),
    "half a byte": (tensor("data", [16], dtype="torch.quint4x2", byte_range=[0, 16]), "MetadataError", "m/v"),
    "quantized": (tensor("data", [16], dtype="torch.qint8", byte_range=[0, 16]), "MetadataError", "m/v"),
    "serializer": (tensor("data", [4], serializer="pickle"), "MetadataError", "m/v: expected the serializer"),
    "overlap": (chunked([4], ([0], [3]), ([2], [2])), "MetadataError", r"m/v: .*the pieces at \[0\] and \[2\] overlap"),
    "hole": (chunked([4], ([0], [1]), ([2], [2])), "MetadataError", "m/v: .*hold 3 of 4 elements"),
    "overlap that fills a hole": (chunked([4], ([0], [2]), ([1], [2])), "MetadataError", "m/v: .*overlap"),
    "piece outside": (chunked([4], ([0], [4]), ([2**62], [4])), "MetadataError", "m/v: .*leaves the shape"),
    "no pieces": (chunked([4]), "MetadataError", "m/v: a tensor without any piece"),
    "pieces of other dimensions": (chunked([4], ([0, 0], [2, 2])), "MetadataError", "m/v: .*dimensions"),
    "huge grid": (chunked([2**60, 2**60], ([0, 0], [2**60, 2**60])), "MetadataError", "'0/m/v'"),
    "no shards": ({"type": "ShardedTensor", "shards": []}, "MetadataError", "m/v: a tensor without any piece"),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes(root, assert_refused, name) -> None:
    entry, errors, message = SIZES[name]
    one(root, entry)
    assert_refused(errors, message)


@pytest.mark.parametrize("kind", ["tensor", "object", "metadata"])
def test_files_of_a_terabyte_that_take_no_disk(root, assert_refused, kind) -> None:
    one(root, tensor("data", [2**38]) if kind == "tensor" else value("data"))
    os.truncate(root / ("data" if kind != "metadata" else ".snapshot_metadata"), 2**40)
    messages = {"tensor": "m/v: cannot allocate", "object": "m/v: .*memory", "metadata": "at most"}
    assert_refused("DataError" if kind == "object" else "MetadataError", messages[kind])


def test_many_pieces(root, assert_refused) -> None:
    # Columns: comparing each with all others would take hours.
    boxes = [([0, column], [1, 1]) for column in range(30_000)]
    one(root, chunked([1, 30_001], *boxes))
    assert_refused("MetadataError", "m/v: .*hold 30000 of 30001 elements")


def test_the_same_bytes_under_many_names(root, open_hostile) -> None:
    names = [f"k{number}" for number in range(20_000)]
    entries = {"0/m": {"type": "dict", "keys": names}, **{f"0/m/{name}": tensor("data", [4]) for name in names}}
    foreign(root, entries, {"data": bytes(16)})
    assert open_hostile("0/m/k7")["load"] is None


# --- structure -------------------------------------------------------------------------------------------------------

LIST, DICT = {"type": "list"}, {"type": "dict", "keys": ["v"]}


def doubled() -> bytes:
    twice = f'"0/m":{json.dumps(tensor("data", [4]))},"0/m":{{"type":"list"}}'
    return f'{{"version":"1","version":"2","world_size":9,"world_size":1,"manifest":{{{twice}}}}}'.encode()


STRUCTURES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cut off"),
    "NULs": (bytes(10**6), "neither"),
    "deep JSON": (b"[" * 10**6 + b"]" * 10**6, "nested"),
    "deep YAML": (b"- " * 10**6, "neither"),
    "deep flow YAML": (b"{a: " * 10**5 + b"}" * 10**5, "neither"),
    "control characters": (b'{"version": "\x00\x01\x1b[2J"}', "neither"),
    "laughing aliases": (
        b"version: &a0 [x, x]\n" + b"".join(b"v%d: &a%d [*a%d, *a%d]\n" % (n, n, n - 1, n - 1) for n in range(1, 3000)),
        "an alias",
    ),
    "a hundred megabytes of aliases": (b"version: &a [x]\nv: [" + b"*a, " * (25 * 1024**2) + b"]", "an alias"),
    "base 60": (b"version: 1\nworld_size: 1" + b":59" * 10**6 + b"\nmanifest: {}", "neither"),
    "python tag": (b"version: !!python/object/apply:os.mkdir [executed]\nworld_size: 1\nmanifest: {}", "neither"),
    "infinite world": (b'{"version": 1, "world_size": Infinity, "manifest": {}}', "world_size|neither"),
    "no number as world": (b'{"version": 1, "world_size": NaN, "manifest": {}}', "world_size|neither"),
    "two roots": (b'{"version": 1, "world_size": 1, "manifest": {}}{}', "neither"),
    "manifest of lists": (b'{"version": 1, "world_size": 1, "manifest": [[]]}', "a mapping as 'manifest'"),
    "negative world": (text_of({}, -1), "'world_size'"),
    "large world": (text_of({}, 2**63), "'world_size'"),
    "rank outside": (text_of({"1/m": LIST}), "'1/m'.*below the world size 1"),
    "negative rank": (text_of({"-1/m": LIST}), "'-1/m'"),
    "huge rank": (text_of({"9" * 5000 + "/m": LIST}), "a rank and a slash"),
    "rank in other digits": (text_of({"\u0660/m": LIST}), "a rank and a slash"),
    "deep path": (text_of({"0/" + "a/" * 500_000: LIST}), "levels"),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_text(root, assert_refused, name) -> None:
    text, message = STRUCTURES[name]
    write(root, text, {})
    assert_refused("MetadataError", message)


@pytest.mark.parametrize("world_size", [2**62, 2**63 - 1])
def test_a_world_of_any_size_takes_no_memory(root, open_hostile, world_size) -> None:
    one(root, tensor("data", [4]), world_size=world_size)
    assert open_hostile()["load"] is None


def test_doubled_keys(root, open_hostile) -> None:
    write(root, doubled(), {"data": bytes(16)})
    assert open_hostile()["load"] is None


def test_unknown_types_do_no_harm(root, open_hostile) -> None:
    foreign(root, {"0/m": LIST, "0/m/0": {"type": "x" * 10**6}, "../x": {"type": "y", "location": "/etc/passwd"}})
    assert open_hostile()["load"] is None


def test_nesting_deeper_than_python_can_go(root, assert_refused) -> None:
    entries = {"0/m" + "/0" * depth: LIST for depth in range(900)}
    foreign(root, entries)
    assert_refused("MetadataError", "levels of nesting")


def test_keys_that_all_have_one_hash(root, open_hostile) -> None:
    keys = [number * (2**61 - 1) for number in range(3000)]
    entries = {"0/m": {"type": "dict", "keys": keys}, **{f"0/m/{key}": LIST for key in keys}}
    foreign(root, entries)
    assert open_hostile()["load"] is None


CIRCLES: dict[str, dict[str, Any]] = {
    "moved into its child": {"moved": {"m/v": "m"}},
    "moved in a ring": {"moved": {"m": "n", "n": "m"}},
    "moved to itself": {"moved": {"m": "m", "m/v": "m/v"}},
    "same as its parent": {"same": {"m/v": "m", "m": "m/v"}},
    "same as itself": {"same": {"m": "m", "m/v": "m/v"}},
    "same as nothing": {"same": {"m/v": "nothing"}},
    "tied in a ring": {"tied": {"m/v": "m/w", "m/w": "m/v"}},
    "extra is the container": {"containers": {"m": {"extra": "m"}}},
    "extra is a child": {"containers": {"m": {"extra": "m/v", "kind": "defaultdict"}}},
    "extra of the root": {"containers": {"": {"extra": "m", "kind": "OrderedDict"}}},
    "keys are the container": {"containers": {"m/l": {"kind": "items"}}, "moved": {"m/l/0": "m/l"}},
    "named tuple of the system": {"containers": {"m/l": {"kind": "namedtuple", "class_name": "os:terminal_size"}}},
    "named tuple with code": {"containers": {"m/l": {"kind": "namedtuple", "class_name": "antigravity:x"}}},
    "unknown kind": {"containers": {"m": {"kind": "exec", "class_name": "os:system", "extra": ""}}},
    "thousands of roots": {"roots": ["m"] * 20_000},
    "roots that are not there": {"roots": ["m", "x" * 10**5]},
    "tensor in another order": {"tensors": {"m/v": {"dim_order": [0, 0, 0]}}},
    "tensor in no order": {"tensors": {"m/v": {"dim_order": [2**62]}}},
    "tensor with another dtype": {"tensors": {"m/v": {"dtype": "torch.qint32"}}},
    "tensor with gradients": {"tensors": {"m/v": {"dtype": "torch.int32", "requires_grad": True}}},
}  # fmt: skip


@pytest.mark.parametrize("name", CIRCLES)
def test_notes(root, open_hostile, name) -> None:
    entries = {
        "0/m": {"type": "dict", "keys": ["v", "w", "l"]},
        "0/m/v": tensor("data", [4]),
        "0/m/w": tensor("data", [4]),
        "0/m/l": LIST,
        "0/m/l/0": LIST,
    }
    own(root, entries, {"data": bytes(16)}, {"roots": ["m"], **CIRCLES[name]})
    found = open_hostile()["load"]
    assert found is None or str(root) in found[1]
    if found is None:
        assert name in {"moved to itself", "same as itself", "same as nothing", "tied in a ring", "unknown kind"} | {
            "thousands of roots", "same as its parent",
        }  # fmt: skip


EXTENSIONS: dict[str, tuple[dict[str, Any], str]] = {
    "huge blocks": ({"block_bytes": 2**62}, "hashes|blocks of at most"),
    "blocks of no bytes": ({"block_bytes": 0}, "block_bytes"),
    "odd blocks": ({"block_bytes": 1001, "files": {"data": record(b"")}}, "blocks of at most|bytes in data"),
    "newer": ({"format": 2}, "install a newer"),
    "no record of the file": ({"files": {}}, "m: expected a record of its file data, found none"),
    "short hashes": ({"files": {"data": {"size_bytes": 16, "hashes": "0" * 8}}}, "hexadecimal digits"),
    "long hashes": ({"files": {"data": {"size_bytes": 16, "hashes": "0" * 10**6}}}, "hexadecimal digits"),
    "other hashes": ({"files": {"data": {"size_bytes": 16, "hashes": "0" * 16}}}, "m: .*expected checksum 0000"),
    "huge file": ({"files": {"data": {"size_bytes": 2**62, "hashes": ""}}}, "hexadecimal digits"),
    "longer file": ({"files": {"data": record(bytes(17))}}, "m: expected 17 bytes in data, found 16"),
    "files outside": ({"files": {"../outside/secret": record(b""), "data": record(bytes(16))}}, ""),
    "ranks without number": ({"ranks": {"x": {}, "0": {"roots": ["m"]}}}, ""),
}


@pytest.mark.parametrize("name", EXTENSIONS)
def test_extension(root, open_hostile, assert_refused, name) -> None:
    changes, message = EXTENSIONS[name]
    own(root, {"0/m": tensor("data", [4])}, {"data": bytes(16)}, {"roots": ["m"]}, **changes)
    if message:
        assert_refused("MetadataError|DataError|ChecksumError", message, value="0/m")
    else:
        assert open_hostile("0/m")["load"] is None


def test_blocks_of_a_few_bytes(root, open_hostile) -> None:
    own(root, {"0/m": tensor("data", [2**16])}, {"data": bytes(2**18)}, {"roots": ["m"]}, block_bytes=16)
    assert "hexadecimal digits" in open_hostile("0/m")["load"][1]


def test_an_extension_without_its_seal(root, assert_refused) -> None:
    own(root, {"0/m": tensor("data", [4])}, {"data": bytes(16)}, {"roots": ["m"]})
    metadata = root / ".snapshot_metadata"
    metadata.write_bytes(metadata.read_bytes().replace(b"[4]", b"[2]"))
    assert_refused("MetadataError", "changed since it was written")


def test_removing_takes_nothing_else_along(root, open_hostile) -> None:
    names = ["../outside/secret", "folder/secret", "link", str(root.parent / "outside" / "secret"), ".", "..", "x/.."]
    foreign(root, {f"0/m{number}": value(name) for number, name in enumerate(names)}, {"x/y": blob(1)})
    (root / "link").symlink_to("../outside/secret")
    (root / "folder").symlink_to("../outside")
    open_hostile()
    assert (root / "folder" / "secret").read_bytes() == b"secret" * 1000
    assert not (root / ".snapshot_metadata").exists()


def test_removing_folders_deeper_than_python_can_go(root, open_hostile) -> None:
    one(root, tensor("data", [4]))
    here = os.getcwd()
    (root / ".data").mkdir()
    os.chdir(root / ".data")
    for _ in range(1500):  # a path of that length could not be given in one piece
        os.mkdir("x")
        os.chdir("x")
    os.chdir(here)
    try:
        open_hostile()
        assert not root.exists()
    finally:
        subprocess.run(["/bin/rm", "-rf", str(root)], check=True)  # pytest cannot remove it, either
