"""Zip files that are larger inside than outside, or that two readers understand in two ways."""

import io
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from tests.hostile.forge import blob, blob_of, foreign, storage, tensor, value

TENSOR = (
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("
    + storage("0", 4)
    + b"K\x00K\x04\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR."
)
GOOD = blob_of(TENSOR, {"data/0": bytes(16)})


def object_of(root: Path, content: bytes) -> None:
    foreign(root, {"0/m": {"type": "dict", "keys": ["v"]}, "0/m/v": value("data")}, {"data": content})


def bomb(gibibytes: int) -> bytes:
    """A zip with a storage of zeros, compressed a thousandfold."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    zeros = bytes(2**24)
    head = packer.compress(zeros) + packer.flush(zlib.Z_FULL_FLUSH)
    packed = head * (64 * gibibytes) + packer.flush()
    size = 2**24 * 64 * gibibytes
    raw = blob_of(TENSOR.replace(b"K\x04tQ", b"\x8a\x05" + (size // 4).to_bytes(5, "little") + b"tQ"))
    return with_member(raw, b"archive/data/0", packed, size, method=8)


def with_member(archive: bytes, name: bytes, packed: bytes, size: int, method: int = 0) -> bytes:
    """A zip file with one more member, written by hand."""
    end = len(archive) - 22
    count, table_bytes, table = struct.unpack_from("<HII", archive, end + 10)
    small, extra = (0xFFFFFFFF, struct.pack("<HHQQ", 1, 16, size, len(packed))) if size >= 2**32 else (size, b"")
    packed_size = 0xFFFFFFFF if extra else len(packed)
    fields = struct.pack("<HHHHHIIIHH", 45, 0, method, 0, 33, 0, packed_size, small, len(name), len(extra))
    member = b"PK\3\4" + fields + name + extra + packed
    entry = b"PK\1\2" + b"\x2d\0" + fields + struct.pack("<HHHII", 0, 0, 0, 0, table) + name + extra
    tail = struct.pack(
        "<4s4HIIH", b"PK\5\6", 0, 0, count + 1, count + 1, table_bytes + len(entry), table + len(member), 0
    )
    return archive[:table] + member + archive[table:end] + entry + tail


def with_tables(first: bytes, second: bytes) -> bytes:
    """Two zip files, one behind the other: readers that look for the table in different places see different ones."""
    return first + second


def patched(archive: bytes, position: int, content: bytes) -> bytes:
    return archive[:position] + content + archive[position + len(content) :]


def overlapping(count: int) -> bytes:
    """Many members with the same bytes."""
    names = [f"{number:02}" for number in range(count)]
    storages = b"".join(storage(name, 2**21) for name in names)
    archive = blob_of(b"\x80\x02](" + storages + b"e.", {"data/00": bytes(2**23)})
    (table,) = struct.unpack_from("<I", archive, len(archive) - 6)
    entries = archive[table : len(archive) - 22]
    last = entries[entries.rindex(b"PK\1\2") :]
    more = b"".join(last.replace(b"data/00", b"data/" + name.encode()) for name in names[1:])
    tail = struct.pack("<4s4HIIH", b"PK\5\6", 0, 0, 3 + count, 3 + count, len(entries + more), table, 0)
    return archive[:table] + entries + more + tail


def twice(name: str, content: bytes) -> bytes:
    return with_member(GOOD, name.encode(), content, len(content))


def tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        pipe = tarfile.TarInfo("storages")
        pipe.type = tarfile.FIFOTYPE
        archive.addfile(pipe)
    return buffer.getvalue()


def legacy() -> bytes:
    buffer = io.BytesIO()
    torch.save(torch.ones(4), buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


END = len(GOOD) - 22
ARCHIVES = {
    "a bomb of 4 GiB": lambda: bomb(4),
    "compressed pickle": lambda: blob_of(TENSOR + bytes(2**28), {"data/0": bytes(16)}, zipfile.ZIP_DEFLATED),
    "bzip2": lambda: blob_of(TENSOR, {"data/0": bytes(16)}, zipfile.ZIP_BZIP2),
    "a member of 2**60 bytes": lambda: with_member(GOOD, b"archive/data/1", b"", 2**60),
    "a stored member longer than it is": lambda: with_member(GOOD, b"archive/data/1", bytes(16), 2**31),
    "overlapping members": lambda: overlapping(60),
    "two pickles": lambda: twice("archive/data.pkl", b"\x80\x02N."),
    "two pickles, one in capitals": lambda: twice("archive/DATA.PKL", b"\x80\x02N."),
    "two tables": lambda: with_tables(blob_of(b"\x80\x02N."), GOOD),
    "something in front": lambda: b"PK\3\4" + bytes(100) + GOOD,
    "something behind": lambda: GOOD + bytes(100),
    "a comment with a table in it": lambda: patched(GOOD, END + 20, b"\x16\0") + GOOD[END:],
    "a table behind the end": lambda: patched(GOOD, END + 16, b"\xff\xff\xff\x7f"),
    "a table of no length": lambda: patched(GOOD, END + 12, bytes(4)),
    "a number of entries that is wrong": lambda: patched(GOOD, END + 8, b"\xff\xff\xff\xff"),
    "zip64 that points elsewhere": lambda: (
        GOOD[:END]
        + struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, 2**40, 2**40)
        + struct.pack("<4sIQI", b"PK\6\7", 0, 0, 1)
        + GOOD[END:]
    ),
    "encrypted": lambda: GOOD.replace(b"PK\1\2\x14\x03\x14\0\0\0", b"PK\1\2\x14\x03\x14\0\1\0"),
    "no pickle": lambda: GOOD.replace(b"data.pkl", b"data.plk"),
    "no members": lambda: b"PK\3\4" + b"PK\5\6" + bytes(12) + b"\x04\0\0\0" + bytes(2),
    "names above": lambda: GOOD.replace(b"archive/", b"../../../"[:8]),
    "a pipe in a tar": tar,
    "before zip files": legacy,
    "cut": lambda: GOOD[:-1],
    "empty": lambda: b"",
    "two bytes": lambda: b"PK",
}


@pytest.mark.parametrize("kind", ["object", "tensor"])
@pytest.mark.parametrize("name", ARCHIVES)
def test_archives(root, assert_refused, name, kind) -> None:
    content = ARCHIVES[name]()
    object_of(root, content)
    if kind == "tensor":
        entry = tensor("data", [4], serializer="torch_save", byte_range=None)
        foreign(root, {"0/m": {"type": "dict", "keys": ["v"]}, "0/m/v": entry}, {"data": content})
    assert_refused("DataError", "m/v: expected a value stored by torch.save, (found|but it cannot be read)")


def test_what_the_archives_are_variations_of(root, open_hostile) -> None:
    for good in (GOOD, with_member(GOOD, b"archive/data/1", bytes(16), 16), blob(torch.ones(4))):
        object_of(root, good)
        assert open_hostile()["load"] is None
