"""Checks of whole snapshots: what is sound passes, and every kind of damage is found, named and told from the rest."""

import errno
import io
import itertools
import json
import shutil
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from lightning_snapshot import Snapshot, StateDict
from lightning_snapshot.errors import (
    NotASnapshotError,
    SnapshotNotFoundError,
    StorageError,
    StoragePermissionError,
)
from lightning_snapshot.manifest import EXTENSION_KEY, ChunkedTensorEntry, TensorEntry, decode, seal
from lightning_snapshot.options import Options
from lightning_snapshot.save import save
from lightning_snapshot.storage import METADATA_NAME, Reader, open_storage
from lightning_snapshot.storage.memory import MemoryStorage
from lightning_snapshot.verify import Problem, Report, verify
from tests.cli.worlds import save_by_ranks
from tests.engine.strategies import SMALL, new_storage, states

GOLDEN = Path(__file__).parent.parent / "golden" / "data"
SOUND = sorted(path.parent.name for path in GOLDEN.glob("[lw]*/.snapshot_metadata"))

TIED = torch.arange(5.0)
STATE = {
    "m": {
        "w/x": torch.arange(40.0),  # 160 bytes at 0: blocks 0, 1 and half of 2
        "v": torch.arange(30, dtype=torch.int16),  # 60 bytes at 192: block 3
        "huge": torch.arange(100.0),  # in pieces of 192 bytes
        "fp8": torch.arange(3.0).to(torch.float8_e4m3fn),
        "turned": torch.nn.Parameter(torch.arange(12.0).reshape(3, 4).t()),
        "a": TIED,
        "b": TIED,
        "empty": torch.empty(0, 3),
    },
    "o": {1, 2},
    "same": {1, 2},
    "epoch": 3,
}  # fmt: skip


def saved(state: dict[str, Any] = STATE) -> MemoryStorage:
    storage = new_storage()
    save(state, storage, save_id="first", options=SMALL)
    return storage


def check(storage: Any, **arguments: Any) -> Report:
    return verify(storage, SMALL, **arguments)


def only_problem(report: Report) -> Problem:
    assert len(report.problems) == 1, report.problems
    assert not report.ok
    return report.problems[0]


def place_of(storage: MemoryStorage, path: str) -> tuple[str, int]:
    """File and offset of the first byte of a value."""
    entry = decode(storage.files[METADATA_NAME], source="").entries[path]
    if isinstance(entry, ChunkedTensorEntry):
        entry = entry.chunks[0].tensor
    return entry.location, (getattr(entry, "byte_range", None) or (0, 0))[0]


def paths_in(storage: MemoryStorage, location: str, begin: int = 0, end: int = 2**63) -> set[str]:
    """Which values have bytes in a stretch, told independently of what is tested."""
    found = set()
    for path, entry in decode(storage.files[METADATA_NAME], source="").entries.items():
        pieces = [chunk.tensor for chunk in entry.chunks] if isinstance(entry, ChunkedTensorEntry) else [entry]
        for piece in pieces:
            if getattr(piece, "location", None) == location:
                first, last = getattr(piece, "byte_range", None) or (0, 2**63)
                # Nobody needs the file of an empty tensor.
                if first < end and last > begin and 0 not in getattr(piece, "shape", ()):
                    found.add(path)
    return found


def flip(storage: MemoryStorage, location: str, offset: int) -> None:
    content = bytearray(storage.files[location])
    content[offset] ^= 0x10
    storage.files[location] = bytes(content)


# --- sound snapshots --------------------------------------------------------------------------------------------------


def test_a_sound_snapshot_is_ok() -> None:
    storage = saved()
    data = {name: content for name, content in storage.files.items() if name != METADATA_NAME}
    report = check(storage)
    assert report.ok
    assert report.problems == ()
    assert (report.files_checked, report.bytes_checked) == (len(data), sum(map(len, data.values())))
    assert report.unverifiable_files == 0
    assert report.seconds > 0
    assert len(data) == 4


@settings(max_examples=60)
@given(states())
def test_every_snapshot_of_ours_is_ok(state: dict[str, Any]) -> None:
    assert check(saved(state)).problems == ()


@pytest.mark.parametrize("name", SOUND)
def test_snapshots_of_torchsnapshot_are_ok_but_cannot_be_verified(name: str) -> None:
    report = check(open_storage(GOLDEN / name))
    assert report.problems == ()
    assert report.bytes_checked == 0
    assert report.unverifiable_files == report.files_checked
    assert report.files_checked > 0 or name == "w1-primitives"


def test_all_goldens_are_there() -> None:
    assert len(SOUND) == 38


def test_checksums_are_compared_whatever_the_options_say(tmp_path: Path) -> None:
    Snapshot.take(tmp_path / "a", {"s": StateDict(t=torch.ones(9))})
    (file,) = (tmp_path / "a" / ".data").glob("*/*")
    file.write_bytes(b"\1" + file.read_bytes()[1:])
    assert only_problem(Snapshot(tmp_path / "a", verify=False).verify()).kind == "damaged"


# --- damaged data -----------------------------------------------------------------------------------------------------


def test_every_flipped_byte_is_found_in_its_block() -> None:
    storage = saved()
    assert storage.files.keys() > {".data/first/0_0", ".data/first/0_1"}
    for location in sorted(storage.files.keys() - {METADATA_NAME}):
        size = len(storage.files[location])
        for offset in {*range(0, size, 7), *range(0, size, 64), *range(63, size, 64), size - 1}:
            flip(storage, location, offset)
            problem = only_problem(check(storage))
            begin = offset // 64 * 64
            assert (problem.kind, problem.location) == ("damaged", location)
            assert problem.byte_range == (begin, min(begin + 64, size))
            assert set(problem.tensors) == paths_in(storage, location, *problem.byte_range)
            flip(storage, location, offset)
    assert check(storage).ok


def test_checksums_are_told() -> None:
    storage = saved()
    location, offset = place_of(storage, "0/m/v")
    flip(storage, location, offset)
    problem = only_problem(check(storage))
    hashes = decode(storage.files[METADATA_NAME], source="").extension.files[location].hashes
    index = offset // 64
    assert problem.expected == f"checksum {hashes[16 * index : 16 * index + 16]}"
    assert problem.found.startswith("checksum ")
    assert problem.found != problem.expected
    begin = 64 * index
    assert str(problem) == (
        f"damaged: {location}, bytes {begin} to {begin + 64}: expected {problem.expected}, found {problem.found} "
        "(affects 0/m/v)"
    )


@pytest.mark.parametrize("change", [-1, 1, -10_000, 64])
@pytest.mark.parametrize("path", ["0/m/v", "0/m/a", "0/o"])
def test_files_of_the_wrong_length_are_named(path: str, change: int) -> None:
    storage = saved()
    location, _ = place_of(storage, path)
    content = storage.files[location]
    storage.files[location] = content[:change] if change < 0 else content + bytes(change)
    problem = only_problem(check(storage))
    assert (problem.kind, problem.location) == ("damaged", location)
    assert problem.expected == f"{len(content)} bytes"
    assert problem.found == f"{len(storage.files[location])} bytes"
    assert path in problem.tensors
    assert set(problem.tensors) == paths_in(storage, location)


@pytest.mark.parametrize(
    ("path", "others"), [("0/m/v", None), ("0/m/b", {"0/m/a", "0/m/b"}), ("0/o", {"0/o", "0/same"})]
)
def test_missing_files_are_named(path: str, others: set[str] | None) -> None:
    storage = saved()
    location, _ = place_of(storage, path)
    del storage.files[location]
    problem = only_problem(check(storage))
    assert (problem.kind, problem.location, problem.byte_range) == ("missing", location, None)
    assert set(problem.tensors) == (others or paths_in(storage, location))
    assert path in problem.tensors


def test_the_check_goes_on_after_a_problem() -> None:
    storage = saved()
    flipped, offset = place_of(storage, "0/m/v")
    flip(storage, flipped, offset)
    flip(storage, flipped, offset + 64)
    cut, _ = place_of(storage, "0/m/a")
    storage.files[cut] = storage.files[cut][:-1]
    missing, _ = place_of(storage, "0/o")
    del storage.files[missing]
    report = check(storage)
    assert sorted((problem.kind, problem.location) for problem in report.problems) == [
        ("damaged", flipped),
        ("damaged", flipped),
        ("damaged", cut),
        ("missing", missing),
    ]
    assert report.files_checked == len(storage.files)  # with the missing one, without the metadata


def test_what_is_left_of_a_cut_file_is_still_checked() -> None:
    storage = saved()
    location, offset = place_of(storage, "0/m/v")
    storage.files[location] = storage.files[location][:-1]
    flip(storage, location, 0)
    kinds = [(problem.kind, problem.byte_range) for problem in check(storage).problems]
    assert offset > 64
    assert kinds == [("damaged", None), ("damaged", (0, 64))]


def test_long_lists_of_values_are_cut_short_in_messages() -> None:
    problem = Problem("missing", "f", None, "a file", "none", tuple(f"0/{index}" for index in range(7)))
    assert str(problem) == "missing: f: expected a file, found none (affects 0/0, 0/1, 0/2, 0/3, 0/4 and 2 more)"


def test_large_files_on_disk_are_checked_at_the_edges_of_blocks(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    Snapshot.take(path, {"s": StateDict(large=torch.zeros(9 * 2**20, dtype=torch.uint8), small=torch.ones(3))})
    (file,) = (path / ".data").glob("*/*")
    block = 4 * 2**20
    assert Snapshot(path).verify().ok
    for offset, expected in [(block - 1, 0), (block, 1), (2 * block, 2), (9 * 2**20 - 1, 2)]:
        with file.open("r+b") as stream:
            stream.seek(offset)
            stream.write(b"\1")
        problem = only_problem(Snapshot(path).verify())
        assert problem.byte_range is not None
        assert problem.byte_range[0] == expected * block
        with file.open("r+b") as stream:
            stream.seek(offset)
            stream.write(b"\0")


# --- damaged metadata -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_metadata_that_is_cut_is_damage(part: float) -> None:
    storage = saved()
    content = storage.files[METADATA_NAME]
    storage.files[METADATA_NAME] = content[: int(part * len(content))]
    problem = only_problem(check(storage))
    assert (problem.kind, problem.location) == ("damaged", METADATA_NAME)
    assert problem.found


def test_a_flipped_byte_of_the_metadata_is_damage() -> None:
    storage = saved()
    content = storage.files[METADATA_NAME]
    assert content.count(b"[0,160]") == 1
    storage.files[METADATA_NAME] = content.replace(b"[0,160]", b"[0,161]")
    assert "changed since it was written: expected checksum" in only_problem(check(storage)).found


def test_nothing_and_other_things_are_no_snapshots(tmp_path: Path) -> None:
    with pytest.raises(SnapshotNotFoundError):
        Snapshot(tmp_path / "nothing").verify()
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotASnapshotError):
        Snapshot(tmp_path / "file").verify()


Change = Callable[[dict[str, Any], dict[str, Any]], Any]


def edited(change: Change) -> MemoryStorage:
    """A snapshot whose entries and notes were changed by hand."""
    storage = saved()
    metadata = json.loads(storage.files[METADATA_NAME])
    extension = json.loads(metadata["manifest"][EXTENSION_KEY]["content"])
    change(metadata["manifest"], extension)
    metadata["manifest"][EXTENSION_KEY]["content"] = json.dumps(extension)
    storage.files[METADATA_NAME] = seal(json.dumps(metadata).encode())
    return storage


def field(path: str, **fields: Any) -> Change:
    return lambda entries, _: entries[path].update(fields)


def note(**fields: Any) -> Change:
    return lambda _, extension: extension["ranks"]["0"].update(fields)


def test_editing_by_hand_is_no_damage() -> None:
    assert check(edited(lambda entries, extension: None)).ok


@pytest.mark.parametrize(
    ("change", "message", "tensors"),
    [
        (field("0/m/v", shape=[31]), "expected 62 bytes for shape [31], found the range", ("0/m/v",)),
        (field("0/m/v", dtype="torch.int17"), "found 'torch.int17'", ("0/m/v",)),
        (field("0/m/v", dtype=""), "found ''", ("0/m/v",)),
        (field("0/m/v", serializer="json"), "found 'json'", ("0/m/v",)),
        (field("0/m/v", location="../../etc/passwd"), "etc/passwd", ("0/m/v",)),
        (field("0/m/v", location=".data/first/9"), "0/m/v: expected a record of its file", ("0/m/v",)),
        (field("0/o", location=".data/first/9"), "0/o: expected a record of its file", ("0/o",)),
        (field("0/epoch", serialized_value="x"), "0/epoch: expected the text of a int, found 'x'", ("0/epoch",)),
        (lambda entries, _: entries["0/m/huge"]["chunks"].pop(), "the stored pieces do not make up", ("0/m/huge",)),
        (lambda entries, _: entries.pop("0/m/v"), "m: the key 'v' is listed but has no entry", ()),
        (lambda entries, _: entries.pop("0/o"), "o: expected an entry, found none", ()),
        (note(roots=["m", "gone"]), "gone: expected an entry, found none", ()),
        (note(moved={"m": "gone"}), "gone: expected an entry, found none", ()),
        (note(containers={"": {"extra": "gone"}}), "gone: expected an entry, found none", ()),
        (note(tensors={"m/v": {"dtype": "torch.uint8"}}), "expected a stored dtype as wide as torch.uint8", ("0/m/v",)),
        (note(tensors={"m/v": {"dim_order": [0, 1]}}), "cannot allocate a tensor of shape [30]", ("0/m/v",)),
        (note(tensors={"m/v": {"parameter": True}}), "expected a dtype that can have gradients", ("0/m/v",)),
        (lambda _, extension: extension["files"].update({"../x": {"size_bytes": 0, "hashes": ""}}), "'../x'", ()),
    ],
)  # fmt: skip
def test_contradictions_are_named(change: Change, message: str, tensors: tuple[str, ...]) -> None:
    problem = only_problem(check(edited(change)))
    assert (problem.kind, problem.location) == ("inconsistent", METADATA_NAME)
    assert message in problem.found
    assert problem.tensors == tensors


def test_ranges_behind_the_end_of_a_file_are_contradictions() -> None:
    def stretch(entries: dict[str, Any], _: Any) -> None:
        begin = entries["0/m/v"]["byte_range"][0]
        entries["0/m/v"].update(shape=[100_000], byte_range=[begin, begin + 200_000])

    problems = {problem.expected: problem for problem in check(edited(stretch)).problems}
    problem = next(found for expected, found in problems.items() if expected.endswith(" bytes or more"))
    assert (problem.kind, problem.tensors) == ("inconsistent", ("0/m/v",))
    assert problem.found.startswith("a record of ")


def test_a_file_of_its_own_must_have_the_length_of_its_value() -> None:
    problem = only_problem(check(edited(lambda entries, _: [entries[f"0/m/{key}"].update(shape=[4]) for key in "ab"])))
    assert (problem.kind, problem.expected, problem.found) == ("inconsistent", "16 bytes", "a record of 20 bytes")
    assert set(problem.tensors) == {"0/m/a", "0/m/b"}


@pytest.mark.parametrize("block_bytes", [2**40, 24])
def test_blocks_that_no_load_takes_are_named(block_bytes: int) -> None:
    def change(_: Any, extension: dict[str, Any]) -> None:
        extension["block_bytes"] = block_bytes
        for record in extension["files"].values():
            record["hashes"] = "0" * 16 * -(-record["size_bytes"] // block_bytes)

    problem = only_problem(check(edited(change)))
    assert problem.expected == "blocks of at most 67108864 bytes, a multiple of 16"
    assert problem.found == f"blocks of {block_bytes} bytes"


def test_tensors_in_one_stretch_are_found() -> None:
    def overlap(entries: dict[str, Any], extension: dict[str, Any]) -> None:
        extension["ranks"]["0"]["tied"]["m/v"] = "m/w%2Fx"  # tied tensors are equal, not shifted
        begin, end = entries["0/m/w%2Fx"]["byte_range"]
        assert end - begin == 160
        entries["0/m/v"]["byte_range"] = [begin + 10, begin + 70]
        entries["0/m/turned"]["byte_range"] = [begin + 120, begin + 168]
        for path in ("0/m/v", "0/m/turned"):
            entries[path]["location"] = entries["0/m/w%2Fx"]["location"]

    problems = check(edited(overlap)).problems
    assert [(problem.kind, problem.byte_range, problem.tensors) for problem in problems] == [
        ("inconsistent", (10, 70), ("0/m/w%2Fx", "0/m/v")),
        ("inconsistent", (120, 160), ("0/m/w%2Fx", "0/m/turned")),
    ]


@pytest.mark.parametrize("shift", [0, 8])
def test_two_pieces_of_a_tensor_in_one_stretch_are_found(shift: int) -> None:
    def overlap(entries: dict[str, Any], _: Any) -> None:
        first, second = (chunk["tensor"] for chunk in entries["0/m/huge"]["chunks"][:2])
        assert first["shape"] == second["shape"]
        second["location"] = first["location"]
        second["byte_range"] = [bound + shift for bound in first["byte_range"]]

    tensors = [problem.tensors for problem in check(edited(overlap)).problems]
    assert ("0/m/huge", "0/m/huge") in tensors


def test_equal_stretches_are_for_tied_tensors_only() -> None:
    problem = only_problem(check(edited(note(tied={}))))
    assert (problem.kind, problem.byte_range, problem.tensors) == ("inconsistent", (0, 20), ("0/m/a", "0/m/b"))


# --- values in torch.save's format ------------------------------------------------------------------------------------


def zip_of(**members: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"archive/{name.replace('_', '.')}", content)
    return stream.getvalue()


def without_extension(
    storage: MemoryStorage, change: Callable[[dict[str, Any]], Any] = lambda _: None
) -> MemoryStorage:
    """What torchsnapshot would have written: no checksums, no lengths."""
    metadata = json.loads(storage.files[METADATA_NAME])
    del metadata["manifest"][EXTENSION_KEY]
    change(metadata["manifest"])
    storage.files[METADATA_NAME] = json.dumps(metadata).encode()
    return storage


PORTABLE = {"m": {"v": torch.arange(30)}, "o": {1, 2}}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda content: content[:-1], "a damaged zip file"),
        (lambda content: content[1:], "a damaged zip file"),
        (lambda content: b"", "a damaged zip file"),
        (lambda content: bytes(len(content)), "a damaged zip file"),
        (lambda content: b"X" + content[1:], "a damaged zip file"),  # the first member's own header
        (lambda content: zip_of(version=b"3"), "a zip file without data.pkl"),
    ],
)
def test_objects_without_checksum_are_looked_into(change: Callable[[bytes], bytes], found: str) -> None:
    storage = without_extension(saved(PORTABLE))
    assert check(storage).ok
    location, _ = place_of(storage, "0/o")
    storage.files[location] = change(storage.files[location])
    problem = only_problem(check(storage))
    assert (problem.kind, problem.location, problem.tensors) == ("damaged", location, ("0/o",))
    assert problem.expected == "a value in torch.save's format"
    assert problem.found.startswith(found)


def test_objects_of_torchsnapshot_do_not_share_files() -> None:
    storage = without_extension(saved(PORTABLE), lambda entries: entries.update({"0/p": entries["0/o"]}))
    problem = only_problem(check(storage))
    assert (problem.kind, problem.tensors) == ("inconsistent", ("0/o", "0/p"))


def test_no_object_is_unpickled() -> None:
    storage = without_extension(saved(PORTABLE))
    location, _ = place_of(storage, "0/o")
    storage.files[location] = zip_of(data_pkl=b"cposix\nabort\n(tR.")
    assert check(storage).ok


def test_objects_are_looked_into_even_if_the_checksum_is_right() -> None:
    storage = saved({"o": b"x" * 100_000})
    metadata = json.loads(storage.files[METADATA_NAME])
    location = metadata["manifest"]["0/o"]["location"]
    save({"t": torch.ones(1000)}, storage, save_id="second", options=SMALL)
    tensor, _ = place_of(storage, "0/t")
    metadata = json.loads(storage.files[METADATA_NAME])
    metadata["manifest"]["0/t"] = {"type": "object", "location": tensor, "serializer": "torch_save", "obj_type": "x"}
    metadata["manifest"]["0/t"]["replicated"] = False
    storage.files[METADATA_NAME] = seal(json.dumps(metadata).encode())
    assert location != tensor
    assert only_problem(check(storage)).found.startswith("a damaged zip file")


def test_a_value_in_a_part_of_a_file_is_looked_into() -> None:
    storage = saved(PORTABLE)
    location, _ = place_of(storage, "0/o")
    content = storage.files[location]
    entry = TensorEntry("slab", "torch_save", "torch.qint8", (3,), False, (6, 6 + len(content)))
    fields = {name: getattr(entry, name) for name in entry.__struct_fields__}
    without_extension(storage, lambda entries: entries.update({"0/o": {"type": "Tensor", **fields}}))
    storage.files["slab"] = b"header" + content + zip_of(version=b"3")
    assert check(storage).ok
    storage.files["slab"] = b"heade" + content + zip_of(version=b"3")
    problem = only_problem(check(storage))
    assert (problem.kind, problem.byte_range, problem.tensors) == ("damaged", (6, 6 + len(content)), ("0/o",))


# --- snapshots of torchsnapshot ---------------------------------------------------------------------------------------


def golden(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / name, tmp_path / name))


@pytest.mark.parametrize(("change", "kind"), [("cut", "damaged"), ("missing", "missing")])
def test_slabs_of_torchsnapshot_are_checked(tmp_path: Path, change: str, kind: str) -> None:
    path = golden("w1-basic-slab", tmp_path)
    (slab,) = (path / "batched").iterdir()
    size = slab.stat().st_size
    if change == "cut":
        slab.write_bytes(slab.read_bytes()[:-1])
    else:
        slab.unlink()
    problem = only_problem(Snapshot(path).verify())
    assert (problem.kind, problem.location) == (kind, f"batched/{slab.name}")
    if change == "cut":
        assert (problem.expected, problem.found) == (f"{size} bytes or more", f"{size - 1} bytes")
        assert len(problem.tensors) == 1
    else:
        assert len(problem.tensors) > 1


@pytest.mark.parametrize("change", [-1, 1])
def test_files_of_torchsnapshot_have_exact_lengths(tmp_path: Path, change: int) -> None:
    path = golden("w1-basic-files", tmp_path)
    entries = Snapshot(path).get_manifest()
    name, entry = next((name, entry) for name, entry in entries.items() if isinstance(entry, TensorEntry))
    file = path / entry.location
    content = file.read_bytes()
    file.write_bytes(content[:change] if change < 0 else content + b"\0")
    problem = only_problem(Snapshot(path).verify())
    assert (problem.kind, problem.location, problem.tensors) == ("damaged", entry.location, (name,))
    assert (problem.expected, problem.found) == (f"{len(content)} bytes", f"{len(content) + change} bytes")


def test_what_torchsnapshot_lost_is_found() -> None:
    problems = Snapshot(GOLDEN / "hazard-bf16-odd").verify().problems
    assert [(problem.kind, problem.tensors) for problem in problems] == [
        ("damaged", ("0/h/odd",)),
        ("damaged", ("0/h/one",)),
    ]
    # Two keys, one file: the key "a/../b" was a path.
    tensors = [set(problem.tensors) for problem in Snapshot(GOLDEN / "hazard-dotdot").verify().problems]
    assert {"0/h/a/../b", "0/h/b"} in tensors
    assert {"0/h/w", "0/h/w_0_0"} in tensors


@pytest.mark.parametrize(
    ("name", "location", "tensors"),
    [
        ("w2-sharded-subdivided", "sharded/m/rowwise_18_0", {"0/m/rowwise"}),
        ("legacy-003-w2", "1/own/r", {"1/own/r"}),
        ("legacy-003-w2", "replicated/model/bias", {"0/model/bias"}),
    ],
)
def test_what_other_ranks_need_is_checked(tmp_path: Path, name: str, location: str, tensors: set[str]) -> None:
    path = golden(name, tmp_path)
    (path / location).unlink()
    problem = only_problem(Snapshot(path).verify())
    assert (problem.kind, problem.location, set(problem.tensors)) == ("missing", location, tensors)


def test_a_shard_that_only_another_rank_lists_is_missed(tmp_path: Path) -> None:
    path = golden("w2-sharded-subdivided", tmp_path)
    file = path / METADATA_NAME
    metadata = json.loads(file.read_text())
    del metadata["manifest"]["1/m/rowwise"]["shards"][0]
    file.write_text(json.dumps(metadata))
    problem = only_problem(Snapshot(path).verify())
    assert problem.kind == "inconsistent"
    assert "the stored pieces do not make up the tensor" in problem.found


# --- snapshots of several ranks ---------------------------------------------------------------------------------------


def of_rank(rank: int) -> dict[str, Any]:
    tied = torch.arange(5.0)
    return {
        "state_dict": {"w": torch.ones(3 * 2**20), "a": tied, "b": tied, "n" * 1200: torch.ones(2)},
        "rng": {"t": (torch.ones(rank + 1), rank), "k" * 1200: torch.ones(1)},
    }


@pytest.mark.parametrize("as_one", [True, False])
@pytest.mark.parametrize("differ", [True, False])
def test_snapshots_of_several_ranks_are_ok(tmp_path: Path, as_one: bool, differ: bool) -> None:
    path = save_by_ranks(tmp_path / "a.ckpt", [of_rank(rank * differ) for rank in range(3)], as_one=as_one)
    report = Snapshot(path).verify()
    assert report.problems == ()
    assert report.files_checked > 2
    assert report.bytes_checked == sum(file.stat().st_size for file in (path / ".data").glob("*/*"))


def test_a_rank_that_has_nothing_but_shards_is_ok(tmp_path: Path) -> None:
    path = save_by_ranks(tmp_path / "a.ckpt", [of_rank(0)] * 2, as_one=True)
    metadata = json.loads((path / METADATA_NAME).read_text())
    entries = metadata["manifest"]
    assert not any(name.startswith("1/") for name in entries)
    chunks = entries["0/state_dict/w"]["chunks"]
    entries["0/state_dict/w"] = {"type": "ShardedTensor", "shards": chunks[:1]}
    entries["1/state_dict/w"] = {"type": "ShardedTensor", "shards": chunks[1:]}
    (path / METADATA_NAME).write_bytes(seal(json.dumps(metadata).encode()))
    assert Snapshot(path).verify().problems == ()


def test_damage_of_what_another_rank_has_is_named(tmp_path: Path) -> None:
    path = save_by_ranks(tmp_path / "a.ckpt", [of_rank(rank) for rank in range(2)], as_one=True)
    entry = Snapshot(path).get_manifest()["1/rng/t/0"]
    file = path / entry.location
    file.write_bytes(file.read_bytes()[:-1])
    assert "1/rng/t/0" in only_problem(Snapshot(path).verify()).tensors


def test_contradictions_in_what_another_rank_has_are_named(tmp_path: Path) -> None:
    path = save_by_ranks(tmp_path / "a.ckpt", [of_rank(rank) for rank in range(2)], as_one=True)
    metadata = json.loads((path / METADATA_NAME).read_text())
    del metadata["manifest"]["1/rng/t"]
    (path / METADATA_NAME).write_bytes(seal(json.dumps(metadata).encode()))
    assert "rng: the key 't' is listed but has no entry" in only_problem(Snapshot(path).verify()).found


# --- how it is done ---------------------------------------------------------------------------------------------------


class Doubled:
    """A storage that calls something before it opens a file and before it reads."""

    def __init__(
        self,
        inner: MemoryStorage,
        before_open: Callable[[], Any] = lambda: None,
        before_read: Callable[[], Any] = lambda: None,
    ) -> None:
        self.inner = inner
        self.before_open = before_open
        self.before_read = before_read
        self.readers: list[DoubledReader] = []
        self.most_open = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open(self, location: str) -> Reader:
        self.before_open()
        self.readers.append(DoubledReader(self.inner.open(location), self.before_read))
        self.most_open = max(self.most_open, sum(not reader.is_closed for reader in self.readers))
        return self.readers[-1]


class DoubledReader:
    def __init__(self, inner: Reader, before_read: Callable[[], Any]) -> None:
        self.inner = inner
        self.before_read = before_read
        self.is_closed = False
        self.size_bytes = inner.size_bytes

    def read_into(self, offset_bytes: int, buffer: memoryview) -> None:
        assert not self.is_closed
        self.before_read()
        self.inner.read_into(offset_bytes, buffer)

    def close(self) -> None:
        self.is_closed = True


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        raise error

    return fail


def test_a_snapshot_that_is_replaced_during_the_check_is_checked_again() -> None:
    inner = saved()
    newer = {"new": torch.zeros(3)}

    opens = itertools.count()

    def replace() -> None:
        if next(opens) == 0:
            save(newer, MemoryStorage(inner.url), save_id="second", options=SMALL)

    report = check(Doubled(inner, replace))
    assert report.ok
    assert (report.files_checked, report.bytes_checked) == (1, 12)


def test_damage_is_damage_even_if_the_snapshot_is_replaced() -> None:
    inner = saved()

    opens = itertools.count()

    def replace() -> None:
        if next(opens) == 0:
            save({"new": torch.zeros(3)}, MemoryStorage(inner.url), save_id="second", options=SMALL)
            flip(inner, ".data/second/0_0", 0)

    assert only_problem(check(Doubled(inner, replace))).tensors == ("0/new",)


def test_a_snapshot_that_is_replaced_all_the_time_is_no_damage() -> None:
    inner = saved()
    opens = itertools.count(1)

    def replace() -> None:
        number = next(opens)
        save({"m": torch.ones(number)}, MemoryStorage(inner.url), save_id=f"save{number}", options=SMALL)

    with pytest.raises(StorageError, match="expected a snapshot at rest") as caught:
        check(Doubled(inner, replace))
    assert caught.value.errno == errno.EBUSY


def test_a_snapshot_that_is_removed_during_the_check_is_not_there() -> None:
    inner = saved()
    with pytest.raises(SnapshotNotFoundError):
        check(Doubled(inner, MemoryStorage(inner.url).remove))


def test_a_disk_that_cannot_read_is_damage() -> None:
    storage = Doubled(saved(PORTABLE), before_read=raising(StorageError(errno.EIO, "could not read: bad sector")))
    problems = check(storage).problems
    assert {(problem.kind, problem.tensors) for problem in problems} >= {("damaged", ("0/m/v",)), ("damaged", ("0/o",))}
    assert all("bad sector" in problem.found and problem.byte_range is not None for problem in problems)


@pytest.mark.parametrize("moment", ["open", "read"])
def test_other_failures_of_the_storage_are_errors(moment: str) -> None:
    fail = raising(StoragePermissionError(errno.EACCES, "could not open"))
    storage = Doubled(saved(), before_open=fail) if moment == "open" else Doubled(saved(), before_read=fail)
    with pytest.raises(StoragePermissionError):
        check(storage)
    assert all(reader.is_closed for reader in storage.readers)


def test_all_files_are_closed_and_few_are_open_at_once() -> None:
    storage = Doubled(saved({str(index): {index} for index in range(60)}))
    assert check(storage).files_checked == 60
    assert all(reader.is_closed for reader in storage.readers)
    assert storage.most_open <= 2 * (2 * SMALL.threads + 1)


def test_blocks_are_read_at_the_same_time() -> None:
    # 20 blocks: each waits until another one is being read.
    both = threading.Barrier(2, timeout=60)
    options = Options(memory_budget_bytes=256, threads=2, block_bytes=64)
    inner = new_storage()
    save({"t": torch.zeros(20 * 64, dtype=torch.uint8)}, inner, save_id="first", options=options)
    assert verify(Doubled(inner, before_read=both.wait), options).bytes_checked == 20 * 64


def test_progress_is_told_in_the_thread_of_the_caller() -> None:
    storage = saved()
    total = sum(len(content) for name, content in storage.files.items() if name != METADATA_NAME)
    calls: list[tuple[int, int]] = []
    threads = set()

    def hear(done_bytes: int, total_bytes: int) -> None:
        calls.append((done_bytes, total_bytes))
        threads.add(threading.get_ident())

    check(storage, progress=hear)
    assert [total_bytes for _, total_bytes in calls] == [total] * len(calls)
    steps = [0, *(done_bytes for done_bytes, _ in calls)]
    assert all(0 < after - before <= 64 for before, after in itertools.pairwise(steps))
    assert steps[-1] == total
    assert threads == {threading.get_ident()}


def test_an_error_of_the_callback_ends_the_check() -> None:
    storage = Doubled(saved())
    with pytest.raises(KeyboardInterrupt):
        check(storage, progress=raising(KeyboardInterrupt()))
    assert all(reader.is_closed for reader in storage.readers)
