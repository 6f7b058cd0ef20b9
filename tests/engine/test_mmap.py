"""Mapped tensors: the values of the files, without reading them, and whatever happens to the files later."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_snapshot import Snapshot, StateDict
from lightning_snapshot.errors import DataError, TargetMismatchError
from lightning_snapshot.manifest import ChunkedTensorEntry, TensorEntry
from lightning_snapshot.restore import load, read_manifest, read_value
from lightning_snapshot.save import save
from lightning_snapshot.session import Session
from lightning_snapshot.storage import open_storage
from tests.engine.strategies import SMALL, cpu_dtypes, from_bytes, new_storage, same
from tests.golden.test_golden import DATA, OF_TORCH, RANKS, describe_all, load_golden

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


def maps_of(folder: Path) -> list[tuple[int, int, str]]:
    """Where the files of a folder, also those that are gone, are mapped: begin, end and name."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, _, name = line.partition(f"{folder}/")
        if name:
            begin, _, end = place.split()[0].partition("-")
            found.append((int(begin, 16), int(end, 16), name))
    return found


def is_mapped(tensor: torch.Tensor, folder: Path) -> bool:
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return any(first <= begin and end <= last for first, last, _ in maps_of(folder))


def content_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def take(folder: Path, **values: Any) -> Snapshot:
    return Snapshot.take(folder, {"m": StateDict(**values)})


def take_example(folder: Path) -> Snapshot:
    tied = torch.nn.Parameter(torch.arange(50.0))
    return take(
        folder,
        weight=torch.nn.Parameter(torch.arange(12.0).reshape(3, 4)),
        frozen=torch.nn.Parameter(torch.arange(3.0), requires_grad=False),
        needs_grad=torch.arange(3.0).requires_grad_(),
        tied=[tied, tied, tied.detach()],
        scalar=torch.tensor(7),
        large=torch.arange(300_000, dtype=torch.int16),
        empty=torch.empty(0, 3),
        other=[{1, 2}, 5, "x"],
    )


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "s"


# --- values -----------------------------------------------------------------------------------------------------------


def test_a_mapped_state_is_the_state_and_nothing_of_it_is_read(folder):
    snapshot = take_example(folder)
    expected = snapshot.get_state_dict_for_key("m")
    found = snapshot.get_state_dict_for_key("m", mmap=True)
    assert same(found, expected)
    dense = [found[key] for key in ("weight", "frozen", "needs_grad", "scalar", "large")]
    assert all(is_mapped(tensor, folder) for tensor in [*dense, *found["tied"]])
    blob = snapshot.get_manifest()["0/m/other/0"]
    assert snapshot.last_load.files == 1
    assert snapshot.last_load.data_bytes == (folder / blob.location).stat().st_size
    assert snapshot.last_load.staging_bytes == 0


def test_each_file_is_mapped_once_and_only_as_long_as_it_is_used(folder):
    snapshot = take_example(folder)
    found = snapshot.get_state_dict_for_key("m", mmap=True)
    names = [name for _, _, name in maps_of(folder)]
    assert len(names) == len(set(names)) == 2  # all tensors but the tied ones, and these
    kept = found["tied"][2]
    del found
    assert len(maps_of(folder)) == 1
    assert torch.equal(kept, torch.arange(50.0))
    del kept
    assert not maps_of(folder)


@pytest.mark.parametrize("dtype", cpu_dtypes(), ids=str)
def test_every_dtype_is_mapped(folder, dtype):
    pattern = bytes(range(251)) * 3
    state = {
        "rows": from_bytes(pattern[: 6 * dtype.itemsize], dtype, (2, 3)),
        "scalar": from_bytes(pattern[7 : 7 + dtype.itemsize], dtype, ()),
    }
    snapshot = take(folder, **state)
    found = snapshot.get_state_dict_for_key("m", mmap=True)
    assert same(found, state)
    assert same(snapshot.read_object("0/m/rows", mmap=True), state["rows"])
    assert is_mapped(found["rows"], folder)
    assert is_mapped(found["scalar"], folder)


def test_one_value_is_mapped(folder):
    snapshot = take_example(folder)
    for path in ("weight", "needs_grad", "tied/1", "scalar", "large", "empty", "other/0", "other/1"):
        found = snapshot.read_object(f"0/m/{path}", mmap=True)
        assert same(found, snapshot.read_object(f"0/m/{path}"))
        if isinstance(found, torch.Tensor) and found.numel():
            assert is_mapped(found, folder)


def test_tied_tensors_are_tied(folder):
    found = take_example(folder).get_state_dict_for_key("m", mmap=True)["tied"]
    assert found[0] is found[1]
    with torch.no_grad():
        found[0][3] = -1
    assert found[2][3] == -1


# --- files ------------------------------------------------------------------------------------------------------------


def test_what_is_written_to_a_mapped_tensor_stays_in_memory(folder):
    snapshot = take_example(folder)
    before = content_of(folder)
    first, second = (snapshot.get_state_dict_for_key("m", mmap=True) for _ in range(2))
    with torch.no_grad():
        for tensor in (first["weight"], first["large"], first["scalar"], *first["tied"]):
            tensor.fill_(99)
    assert content_of(folder) == before
    assert same(second, snapshot.get_state_dict_for_key("m"))
    assert same(snapshot.get_state_dict_for_key("m", mmap=True), second)
    assert set(first["large"].tolist()) == {99}


@pytest.mark.parametrize("name", ["overwritten", "removed"])
def test_a_mapped_tensor_outlives_its_snapshot(folder, name):
    snapshot = take_example(folder)
    expected = snapshot.get_state_dict_for_key("m")
    found = snapshot.get_state_dict_for_key("m", mmap=True)
    del snapshot
    if name == "removed":
        shutil.rmtree(folder)
    else:
        take(folder, weight=torch.zeros(3, 4), large=torch.zeros(300_000, dtype=torch.int16))
    assert same(found, expected)


@pytest.mark.parametrize("change", [-1, 1, -600_000])
def test_a_file_of_another_length_is_refused_before_it_is_mapped(folder, change):
    snapshot = take_example(folder)
    entry = snapshot.get_manifest()["0/m/large"]
    path = folder / entry.location
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + b"x")
    for read in (
        lambda: snapshot.get_state_dict_for_key("m", mmap=True),
        lambda: snapshot.read_object("0/m/large", mmap=True),
    ):
        with pytest.raises(DataError, match=f"expected {len(content)} bytes in {entry.location}, found"):
            read()
    assert not maps_of(folder)


def test_a_file_of_torchsnapshot_that_is_too_short_is_refused(tmp_path):
    shutil.copytree(DATA / "w1-basic-slab", tmp_path / "s")
    snapshot = Snapshot(tmp_path / "s")
    entries = [entry for entry in snapshot.get_manifest().values() if isinstance(entry, TensorEntry)]
    last = max(entries, key=lambda entry: entry.byte_range or (0, 0))
    path = tmp_path / "s" / last.location
    path.write_bytes(path.read_bytes()[: last.byte_range[1] - 1])
    with pytest.raises(DataError, match=f"expected {last.byte_range[1]} bytes or more in {last.location}, found"):
        load(open_storage(tmp_path / "s"), rank=0, options=SMALL, mmap=True)


# --- what cannot be mapped --------------------------------------------------------------------------------------------


@OF_TORCH
@pytest.mark.parametrize(("name", "rank"), RANKS)
def test_what_torchsnapshot_has_written_comes_right_mapped_or_not(name, rank):
    # Its tensors may lie at any offset of a file, be cut, be spread over files, or be in torch.save's format.
    found = load(open_storage(DATA / name), rank=rank, options=SMALL, mmap=True)
    assert describe_all(found) == describe_all(load_golden(name, rank))


def test_tensors_at_odd_offsets_are_read(tmp_path):
    folder = tmp_path / "s"
    shutil.copytree(DATA / "w1-dtypes", folder)
    snapshot, found = Snapshot(folder), {}
    for path, entry in snapshot.get_manifest().items():
        if isinstance(entry, TensorEntry) and entry.serializer == "buffer_protocol":
            tensor = snapshot.read_object(path, mmap=True)
            begin = (entry.byte_range or (0, 0))[0]
            assert is_mapped(tensor, folder) == (begin % tensor.element_size() == 0)
            found[path] = is_mapped(tensor, folder)
    assert set(found.values()) == {True, False}


def test_tensors_in_several_pieces_are_read(folder):
    storage, state = open_storage(folder), {"cut": torch.arange(500.0), "whole": torch.arange(20.0)}
    save(state, storage, save_id="s", options=SMALL)
    assert isinstance(read_manifest(storage).entries["0/cut"], ChunkedTensorEntry)
    found = load(storage, rank=0, options=SMALL, mmap=True)
    assert same(found, state)
    assert not is_mapped(found["cut"], folder)
    assert is_mapped(found["whole"], folder)


def test_a_storage_without_files_is_read():
    storage, session = new_storage(), Session()
    state = {"m": {"w": torch.arange(50.0), "p": torch.nn.Parameter(torch.ones(3))}}
    save(state, storage, save_id="s", options=SMALL)
    assert same(load(storage, rank=0, options=SMALL, mmap=True, session=session), state)
    assert session.last_load.data_bytes == len(storage.files[".data/s/0_0"])
    assert same(read_value(storage, "0/m/w", options=SMALL, mmap=True), state["m"]["w"])


def test_a_part_is_read(folder):
    snapshot = take_example(folder)
    part = snapshot.read_object("0/m/large", index=slice(100, 200), mmap=True)
    assert torch.equal(part, torch.arange(100, 200, dtype=torch.int16))
    assert not is_mapped(part, folder)


def test_a_target_is_filled(folder):
    snapshot, target = take_example(folder), torch.zeros(3, 4)
    assert snapshot.read_object("0/m/weight", target, mmap=True) is target
    assert torch.equal(target, torch.arange(12.0).reshape(3, 4))
    with pytest.raises(TargetMismatchError):
        snapshot.read_object("0/m/weight", torch.zeros(4, 3), mmap=True)
