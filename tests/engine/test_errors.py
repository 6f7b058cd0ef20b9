"""Damaged, incomplete and hostile snapshots."""

import dataclasses
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_snapshot.errors import (
    ChecksumError,
    DataError,
    EntryNotFoundError,
    MetadataError,
    MissingDataError,
    NotASnapshotError,
    SnapshotError,
    SnapshotNotFoundError,
    TargetMismatchError,
)
from lightning_snapshot.manifest import EXTENSION_KEY, ObjectEntry, TensorEntry, seal
from lightning_snapshot.restore import load, read_manifest, read_value
from lightning_snapshot.save import save
from lightning_snapshot.storage import METADATA_NAME, Reader, open_storage
from lightning_snapshot.storage.memory import MemoryStorage
from tests.engine.strategies import SMALL, new_storage, same

UNVERIFIED = dataclasses.replace(SMALL, verify=False)


def state() -> dict[str, Any]:
    return {
        "m": {
            "w/x": torch.arange(40.0),
            "v": torch.arange(30, dtype=torch.int16),
            "turned": torch.arange(12).reshape(3, 4).t(),
        },
        "o": {1, 2},
    }


def saved() -> MemoryStorage:
    storage = new_storage()
    save(state(), storage, save_id="first", options=SMALL)
    return storage


def place_of(storage: MemoryStorage, path: str) -> tuple[str, int]:
    """File and offset of the first byte of an entry."""
    entry = read_manifest(storage).entries[path]
    assert isinstance(entry, (TensorEntry, ObjectEntry))
    return entry.location, entry.byte_range[0] if isinstance(entry, TensorEntry) and entry.byte_range else 0


def flip(storage: MemoryStorage, location: str, offset: int) -> None:
    content = bytearray(storage.files[location])
    content[offset] ^= 0x10
    storage.files[location] = bytes(content)


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "shift"), [("0/m/w%2Fx", 0), ("0/m/w%2Fx", 159), ("0/m/v", 7), ("0/m/turned", 95), ("0/o", 300)]
)
def test_a_flipped_bit_is_found_and_named(path, shift):
    storage = saved()
    location, offset = place_of(storage, path)
    flip(storage, location, offset + shift)
    with pytest.raises(ChecksumError) as caught:
        load(storage, rank=0, options=SMALL)
    message = str(caught.value)
    begin = (offset + shift) // 64 * 64
    end = min(begin + 64, len(storage.files[location]))
    assert message.startswith(
        f"{path.removeprefix('0/')}: the bytes {begin} to {end} of {location} in {storage.url} changed"
    )
    record = read_manifest(storage).extension.files[location]
    assert f"expected checksum {record.hashes[begin // 4 : begin // 4 + 16]}, found " in message
    expected, found = re.findall("[0-9a-f]{16}", message.partition("expected checksum")[2])
    assert expected != found


def test_every_bit_counts_even_of_the_gaps_between_tensors():
    storage = saved()
    location, _ = place_of(storage, "0/m/v")
    caught = 0
    for offset in range(len(storage.files[location])):
        flip(storage, location, offset)
        with pytest.raises(ChecksumError):
            load(storage, rank=0, options=SMALL)
        flip(storage, location, offset)
        caught += 1
    assert caught > 200
    assert same(load(storage, rank=0, options=SMALL), state())


def test_damage_in_what_is_not_wanted_is_not_looked_for():
    storage = saved()
    flip(storage, *place_of(storage, "0/o"))
    assert list(load(storage, rank=0, options=SMALL, keys=["m"])) == ["m"]
    assert same(read_value(storage, "0/m/v", options=SMALL), state()["m"]["v"])
    with pytest.raises(ChecksumError, match=r"o: "):
        read_value(storage, "0/o", options=SMALL)


def test_without_verification_damage_is_read():
    storage = saved()
    location, offset = place_of(storage, "0/m/v")
    flip(storage, location, offset + 6)
    expected = state()["m"]["v"]
    expected[3] ^= 0x10
    assert torch.equal(load(storage, rank=0, options=UNVERIFIED)["m"]["v"], expected)


@pytest.mark.parametrize("options", [SMALL, UNVERIFIED], ids=["verify", "no verify"])
@pytest.mark.parametrize("path", ["0/m/w%2Fx", "0/o"])
@pytest.mark.parametrize("change", [-1, 1, -1_000_000, 64])
def test_files_of_the_wrong_length_are_named(path, change, options):
    storage = saved()
    location, _ = place_of(storage, path)
    before = len(storage.files[location])
    content = storage.files[location]
    storage.files[location] = content[:change] if change < 0 else content + bytes(change)
    after = max(0, before + change)
    message = rf"{re.escape(path[2:])}: expected {before} bytes in {location}, found {after} bytes"
    with pytest.raises(DataError, match=message) as caught:
        load(storage, rank=0, options=options)
    assert not isinstance(caught.value, (MissingDataError, ChecksumError))


@pytest.mark.parametrize("path", ["0/m/v", "0/o"])
def test_missing_files_are_named(path):
    storage = saved()
    location, _ = place_of(storage, path)
    del storage.files[location]
    reader = MemoryStorage(storage.url)
    with pytest.raises(MissingDataError, match=location) as caught:
        load(reader, rank=0, options=SMALL)
    assert isinstance(caught.value, FileNotFoundError)
    assert str(caught.value).partition(":")[0] in {"m/w%2Fx", "o"}
    # The metadata was read again, in vain, but nothing was tried twice.
    assert reader.operations.count(("read_metadata", METADATA_NAME)) == 2
    assert reader.operations.count(("open", location)) == 1


def test_missing_files_on_disk_are_named(tmp_path: Path):
    storage = open_storage(tmp_path / "a.ckpt")
    save(state(), storage, save_id="first", options=SMALL)
    location = read_manifest(storage).entries["0/o"].location
    (tmp_path / "a.ckpt" / location).unlink()
    with pytest.raises(MissingDataError, match=rf"o: .*{location}"):
        load(storage, rank=0, options=SMALL)


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_an_error_leaves_no_reader_open(damage):
    inner = saved()
    location, offset = place_of(inner, "0/m/v")
    if damage == "flip":
        flip(inner, location, offset)
    else:
        inner.files[location] = inner.files[location][:-1]
    storage = Counting(inner)
    with pytest.raises(DataError):
        load(storage, rank=0, options=SMALL)
    assert storage.readers
    assert all(reader.is_closed for reader in storage.readers)


# --- a save over the snapshot while it is read ------------------------------------------------------------------------


class Watched:
    """A storage that calls something before it opens a file."""

    def __init__(self, inner: MemoryStorage, before_open: Callable[[int], None] = lambda _: None) -> None:
        self.inner = inner
        self.before_open = before_open
        self.opens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open(self, location: str) -> Reader:
        self.opens += 1
        self.before_open(self.opens)
        return self.inner.open(location)


class Counting(Watched):
    """Remembers the readers that it gave out."""

    def __init__(self, inner: MemoryStorage) -> None:
        super().__init__(inner)
        self.readers: list[Remembered] = []

    def open(self, location: str) -> Reader:
        self.readers.append(Remembered(super().open(location)))
        return self.readers[-1]


@dataclasses.dataclass
class Remembered:
    reader: Reader
    is_closed: bool = False

    @property
    def size_bytes(self) -> int:
        return self.reader.size_bytes

    def read_into(self, offset_bytes: int, buffer: memoryview) -> None:
        self.reader.read_into(offset_bytes, buffer)

    def close(self) -> None:
        self.is_closed = True


def test_a_snapshot_that_is_replaced_while_it_is_read_is_read_again():
    inner = MemoryStorage(saved().url)
    newer = {"m": {"w/x": torch.zeros(3)}, "new": 5}

    def replace(count: int) -> None:
        if count == 1:
            save(newer, MemoryStorage(inner.url), save_id="second", options=SMALL)

    storage = Watched(inner, replace)
    assert same(load(storage, rank=0, options=SMALL), newer)
    assert inner.operations.count(("read_metadata", METADATA_NAME)) == 2


def test_a_single_value_of_a_replaced_snapshot_is_read_again():
    inner = MemoryStorage(saved().url)

    def replace(count: int) -> None:
        if count == 1:
            save({"m": {"v": torch.ones(2)}}, MemoryStorage(inner.url), save_id="second", options=SMALL)

    assert same(read_value(Watched(inner, replace), "0/m/v", options=SMALL), torch.ones(2))


def test_a_snapshot_that_is_replaced_all_the_time_is_given_up():
    inner = MemoryStorage(saved().url)

    def replace(count: int) -> None:
        save({"m": torch.ones(count)}, MemoryStorage(inner.url), save_id=f"save{count}", options=SMALL)

    storage = Watched(inner, replace)
    with pytest.raises(MissingDataError):
        load(storage, rank=0, options=SMALL)
    assert inner.operations.count(("read_metadata", METADATA_NAME)) == 10


# --- metadata ---------------------------------------------------------------------------------------------------------


def edited(change: Callable[[dict[str, Any], dict[str, Any]], None]) -> MemoryStorage:
    """A snapshot whose entries and notes were changed by hand."""
    storage = saved()
    metadata = json.loads(storage.files[METADATA_NAME])
    extension = json.loads(metadata["manifest"][EXTENSION_KEY]["content"])
    change(metadata["manifest"], extension)
    metadata["manifest"][EXTENSION_KEY]["content"] = json.dumps(extension)
    storage.files[METADATA_NAME] = seal(json.dumps(metadata).encode())
    return storage


@pytest.mark.parametrize("content", [b"", b"garbage", b"{}", b"[1]", b'{"version": "0.1.0"', b"\xff\xfe", b"\0" * 500])
def test_metadata_that_is_garbage_is_named(content):
    storage = saved()
    storage.files[METADATA_NAME] = content
    with pytest.raises(MetadataError, match=re.escape(f"{storage.url}/{METADATA_NAME}")):
        load(storage, rank=0, options=SMALL)


def test_metadata_that_is_cut_off_anywhere_is_an_error():
    storage = saved()
    content = storage.files[METADATA_NAME]
    for length in range(0, len(content), 97):
        storage.files[METADATA_NAME] = content[:length]
        with pytest.raises(MetadataError):
            load(storage, rank=0, options=SMALL)


def set_field(path: str, **fields: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda entries, _: entries[path].update(fields)


def set_notes(**fields: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda _, extension: extension["ranks"]["0"].update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_field("0/m/v", shape=[31]), r"m/v: expected 62 bytes for shape \[31\], found the range .* of 60 bytes"),
        (set_field("0/m/v", dtype="torch.int32"), r"m/v: expected 120 bytes for shape \[30\], found the range"),
        (set_field("0/m/v", dtype="torch.int17"), r"m/v: expected the name of a dtype, found 'torch.int17'"),
        (set_field("0/m/v", serializer="json"), r"m/v: expected the serializer .*, found 'json'"),
        (set_field("0/m/v", byte_range=[5, 4]), "'0/m/v'"),
        (set_field("0/m/v", location="../../etc/passwd"), "etc/passwd"),
        (set_field("0/m/v", location=".data/first/9"), "m/v: expected a record of its file .data/first/9, found none"),
        (set_field("0/o", location=".data/first/9"), "o: expected a record of its file .data/first/9, found none"),
        (lambda entries, _: entries.pop("0/m/v"), "m: the key 'v' is listed but has no entry"),
        (lambda entries, _: entries.pop("0/o"), "o: expected an entry, found none"),
        (set_field("0/m", keys=["w/x", "v", "turned", "more"]), "m: the key 'more' is listed but has no entry"),
        (lambda _, extension: extension.update(block_bytes=2**40), "expected"),
        (lambda _, extension: extension.update(format=99), "found format 99; install a newer lightning-snapshot"),
        (set_notes(tensors={"m/v": {"dtype": "torch.uint8"}}), "m/v: expected a stored dtype as wide as torch.uint8"),
        (set_notes(tensors={"m/v": {"dtype": "torch.load"}}), "m/v: expected the name of a dtype, found 'torch.load'"),
        (set_notes(tensors={"m/v": {"dim_order": [0, 1]}}), r"m/v: cannot allocate a tensor of shape \[30\]"),
        (set_notes(tensors={"m/v": {"parameter": True}}), "m/v: expected a dtype that can have gradients"),
        (set_notes(containers={"m": {"extra": "o"}}), "m: expected the attributes of an OrderedDict, found set"),
        (set_notes(containers={"m": {"extra": "gone"}}), "gone: expected an entry, found none"),
        (set_notes(moved={"m": "gone"}), "gone: expected an entry, found none"),
        (set_notes(roots=["m", "gone"]), "gone: expected an entry, found none"),
    ],
)  # fmt: skip
def test_metadata_that_contradicts_itself_is_named(change, message):
    storage = edited(change)
    with pytest.raises(MetadataError, match=message):
        load(storage, rank=0, options=SMALL)


@pytest.mark.parametrize(
    "tied",
    [{"m/v": "m/w%2Fx"}, {"m/v": "m/v"}, {"m/v": "o"}, {"m/v": "gone"}, {"m/v": "m", "o": "m/v", "m/w%2Fx": "m/v"}],
)
def test_notes_about_ties_that_the_entries_do_not_bear_out_are_ignored(tied):
    assert same(load(edited(set_notes(tied=tied)), rank=0, options=SMALL), state())


def test_a_huge_shape_without_data_takes_no_memory():
    change = set_field("0/m/v", shape=[2**50], byte_range=[0, 2**51])
    with pytest.raises(DataError, match=r"m/v: expected 2251799813685248 bytes or more in "):
        load(edited(change), rank=0, options=SMALL)


def test_an_object_where_a_tensor_should_be_is_named():
    storage = edited(lambda entries, _: entries.update({"0/m/v": {**entries["0/m/v"], **as_zip(entries)}}))
    with pytest.raises(DataError, match=r"m/v: expected a dense tensor of sizes \[30\] in .*, found set"):
        load(storage, rank=0, options=SMALL)


def as_zip(entries: dict[str, Any]) -> dict[str, Any]:
    return {"location": entries["0/o"]["location"], "serializer": "torch_save", "byte_range": None}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.arange(30), r"expected torch.int16 in .*, found torch.int64"),
        (torch.arange(15, dtype=torch.int16), r"expected a dense tensor of sizes \[30\] in .*, found one of \[15\]"),
        (torch.zeros(5, 6, dtype=torch.int16), r"expected a dense tensor of sizes \[30\] in .*, found one of \[5, 6\]"),
        (torch.zeros(30, dtype=torch.int16).to_sparse(), r"expected a dense tensor of sizes \[30\] in .*, found"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_another_tensor_than_the_metadata_says_is_named(content, message):
    storage = saved()
    storage.files["zip"] = zip_of(content)
    change = {"location": "zip", "serializer": "torch_save", "byte_range": None}
    without_extension(storage, lambda entries: entries["0/m/v"].update(change))
    with pytest.raises(DataError, match=rf"m/v: {message}"):
        load(storage, rank=0, options=SMALL, keys=["m"])


def zip_of(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def without_extension(
    storage: MemoryStorage, change: Callable[[dict[str, Any]], None] = lambda _: None
) -> MemoryStorage:
    """What torchsnapshot would have written: no checksums, no lengths."""
    metadata = json.loads(storage.files[METADATA_NAME])
    del metadata["manifest"][EXTENSION_KEY]
    change(metadata["manifest"])
    storage.files[METADATA_NAME] = json.dumps(metadata).encode()
    return storage


def test_a_file_of_torchsnapshot_that_is_too_short_is_named():
    storage = without_extension(saved())
    location, _ = place_of(storage, "0/m/turned")
    storage.files[location] = storage.files[location][:-1]
    with pytest.raises(DataError, match=rf"m/turned: expected \d+ bytes or more in {location}, found \d+ bytes"):
        load(storage, rank=0, options=SMALL)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_a_quantized_tensor_in_a_part_of_a_file_is_read():
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.qint8)
    content = zip_of(quantized)
    storage = saved()
    storage.files["slab"] = b"header" + content + b"trailer"
    entry = TensorEntry("slab", "torch_save", "torch.qint8", (3,), False, (6, 6 + len(content)))
    fields = {name: getattr(entry, name) for name in entry.__struct_fields__}
    without_extension(storage, lambda entries: entries.update({"0/o": {"type": "Tensor", **fields}}))
    assert same(load(storage, rank=0, options=SMALL)["o"], quantized)


def test_packed_tensors_at_odd_offsets_fill_targets_of_any_strides():
    storage = saved()
    weight = torch.arange(12.0).reshape(3, 4)
    storage.files["slab"] = b"odd" + weight.numpy().tobytes()
    entry = {"type": "Tensor", "location": "slab", "serializer": "buffer_protocol", "dtype": "torch.float32"}
    entry |= {"shape": [3, 4], "replicated": False, "byte_range": [3, 51]}
    without_extension(storage, lambda entries: entries.update({"0/o": entry}))
    target = torch.zeros(4, 3).t()
    assert load(storage, rank=0, options=SMALL, targets={"o": target})["o"] is target
    assert torch.equal(target, weight)


# --- questions that have no answer ------------------------------------------------------------------------------------


def test_nothing_there():
    storage = new_storage()
    with pytest.raises(SnapshotNotFoundError, match=re.escape(storage.url)):
        load(storage, rank=0, options=SMALL)


def test_something_else_there():
    storage = new_storage()
    storage.files["weights.bin"] = b"123"
    with pytest.raises(NotASnapshotError, match=re.escape(storage.url)):
        load(storage, rank=0, options=SMALL)
    with pytest.raises(NotASnapshotError, match=re.escape(storage.url)):
        save(state(), storage, save_id="first", options=SMALL)
    assert storage.files == {"weights.bin": b"123"}


def test_keys_that_are_not_there_are_named_with_those_that_are():
    with pytest.raises(EntryNotFoundError, match=r"expected the key 'n', found only \['m', 'o'\]") as caught:
        load(saved(), rank=0, options=SMALL, keys=["m", "n"])
    assert isinstance(caught.value, KeyError)


@pytest.mark.parametrize(
    ("path", "target", "message"),
    [
        ("0/m/v", torch.zeros(30), r"the target is torch.float32 \[30\], the snapshot holds torch.int16 \[30\]"),
        (
            "0/m/v",
            torch.zeros(3, dtype=torch.int16),
            r"the target is torch.int16 \[3\], the snapshot holds torch.int16 \[30\]",
        ),
        ("0/o", torch.zeros(3), r"the target is torch.float32 \[3\], the snapshot holds set"),
    ],
)
def test_a_target_that_does_not_fit_is_named(path, target, message):
    with pytest.raises(TargetMismatchError, match=rf"{path}: {message}"):
        read_value(saved(), path, options=SMALL, target=target)
    assert not target.any()


@pytest.mark.parametrize("rank", [-1, -5])
def test_ranks_start_at_zero(rank):
    with pytest.raises(SnapshotError, match=f"found {rank}"):
        load(saved(), rank=rank, options=SMALL)
