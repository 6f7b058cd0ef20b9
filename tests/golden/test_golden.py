"""Snapshots that the real torchsnapshot wrote come back bit for bit (``data/README.md`` says what is in them)."""

import json
import shutil
import sys
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from lightning_snapshot import StateDict
from lightning_snapshot.errors import DataError
from lightning_snapshot.options import Options
from lightning_snapshot.restore import load, read_value
from lightning_snapshot.storage import open_storage
from tests.golden.describe import as_loaded, blob, bytes_of, describe, text_of

DATA = Path(__file__).parent / "data"
EXPECTED = {path.parent.name: json.loads(path.read_text()) for path in sorted(DATA.glob("*/expected.json"))}
SOUND = [name for name, expected in EXPECTED.items() if "damaged" not in expected]
RANKS = [(name, rank) for name in SOUND for rank in range(EXPECTED[name]["world_size"])]
NEW_RANKS = [(name, EXPECTED[name]["world_size"] + further) for name in SOUND for further in (0, 1)]
BEFORE_PERCENT_ENCODING = {"legacy-003-w2", "legacy-20220628-w1"}
RESHARDED = [name for name in SOUND if "reshard" in EXPECTED[name]]


def load_golden(name: str, rank: int, *, trusted: bool = False) -> dict[str, Any]:
    return load(open_storage(DATA / name), rank=rank, options=Options(trusted=trusted))


def read_golden(name: str, path: str) -> Any:
    return read_value(open_storage(DATA / name), path, options=Options())


def describe_all(state: dict[str, Any]) -> str:
    return text_of({key: describe(value) for key, value in state.items()})


def test_all_goldens_are_there() -> None:
    # What a check-out drops or changes would otherwise only be missed.
    assert len(EXPECTED) == 41
    assert len(RANKS) == 67


# What torch says of itself when it rebuilds a quantized tensor.
OF_TORCH = pytest.mark.filterwarnings(
    "ignore:TypedStorage is deprecated:UserWarning", "ignore:torch.quantize_per_tensor, .* deprecated:UserWarning"
)


@OF_TORCH
@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize(("name", "rank"), RANKS)
def test_a_rank_gets_what_it_saved(name: str, rank: int, trusted: bool) -> None:
    state = load_golden(name, rank, trusted=trusted)
    assert describe_all(state) == text_of(as_loaded(EXPECTED[name]["ranks"][rank]))


def token_of(name: str, key: object) -> str:
    """A key as a part of a path."""
    return str(key) if name in BEFORE_PERCENT_ENCODING else str(key).replace("%", "%25").replace("/", "%2F")


def paths_of_new_rank(name: str, rank: int) -> set[str]:
    """Logical paths that torchsnapshot shows to a rank that did not exist."""
    if EXPECTED[name]["library_views"]:
        # Empty where it fails; none of these snapshots has anything to share but containers.
        view = EXPECTED[name]["library_views"][str(rank)]
        return set() if "error" in view else set(view)
    # The versions before 0.1.0 do not tell.
    entries = yaml.safe_load((DATA / name / ".snapshot_metadata").read_text())["manifest"]
    return {path[2:] for path, entry in entries.items() if path.startswith("0/") and entry.get("replicated")}


def part_of_new_rank(name: str, node: Any, path: str, paths: set[str]) -> Any:
    """What is left of a value of rank 0: containers, sharded tensors, and what has one of the ``paths``."""
    if node["kind"] == "list":
        items = [part_of_new_rank(name, item, f"{path}/{index}", paths) for index, item in enumerate(node["items"])]
        return {**node, "items": [item for item in items if item is not None]}
    if node["kind"] in {"dict", "OrderedDict"}:
        parts = [
            [key, part_of_new_rank(name, item, f"{path}/{token_of(name, key)}", paths)] for key, item in node["items"]
        ]
        return {**node, "items": [[key, part] for key, part in parts if part is not None]}
    return node if path in paths or node["kind"] in {"sharded_tensor", "dtensor"} else None


@pytest.mark.parametrize(("name", "rank"), NEW_RANKS)
def test_a_new_rank_gets_what_is_shared(name: str, rank: int) -> None:
    paths = paths_of_new_rank(name, rank)
    of_rank_0 = EXPECTED[name]["ranks"][0]
    state = {key: part_of_new_rank(name, node, token_of(name, key), paths) for key, node in of_rank_0.items()}
    state = {key: part for key, part in state.items() if part is not None}
    assert describe_all(load_golden(name, rank)) == text_of(as_loaded(state))


@pytest.mark.parametrize("name", RESHARDED)
def test_any_box_of_a_sharded_tensor_is_what_torchsnapshot_reshards_to(name: str) -> None:
    state = load_golden(name, 0)
    boxes = 0
    for target in EXPECTED[name]["reshard"]:
        for row in target["rows"]:
            tensor = state[row["app"]]
            for key in row["path"]:
                tensor = tensor[key]
            for box in row["boxes"]:
                ranges = zip(box["offsets"], box["sizes"], strict=True)
                part = tensor[tuple(slice(offset, offset + size) for offset, size in ranges)]
                assert list(part.shape) == box["sizes"]
                assert blob(bytes_of(part))["sha256"] == box["sha256"], (row, box)
                boxes += 1
    assert boxes


def leaves_of(name: str, node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Path and description of all values that are no containers."""
    if node["kind"] == "list":
        for index, item in enumerate(node["items"]):
            yield from leaves_of(name, item, f"{path}/{index}")
    elif node["kind"] in {"dict", "OrderedDict"}:
        for key, item in node["items"]:
            yield from leaves_of(name, item, f"{path}/{token_of(name, key)}")
    else:
        yield path, node


@OF_TORCH
@pytest.mark.parametrize("name", SOUND)
def test_each_value_can_be_read_alone(name: str) -> None:
    for key, node in as_loaded(EXPECTED[name]["ranks"][0]).items():
        for path, leaf in leaves_of(name, node, f"0/{token_of(name, key)}"):
            assert text_of(describe(read_golden(name, path))) == text_of(leaf), path


# --- snapshots that were damaged when they were written --------------------------------------------------------------


@pytest.mark.parametrize(("path", "needs", "has"), [("h/odd", 10, 8), ("h/one", 2, 0)])
def test_a_short_file_is_refused_with_both_lengths(path: str, needs: int, has: int) -> None:
    with pytest.raises(DataError, match=f"{path}: expected {needs} bytes in 0/{path}, found {has} bytes$"):
        read_golden("hazard-bf16-odd", f"0/{path}")
    with pytest.raises(DataError, match=r"h/o(dd|ne): expected \d+ bytes"):
        load_golden("hazard-bf16-odd", 0)


def test_what_is_whole_beside_a_short_file_can_be_read() -> None:
    assert read_golden("hazard-bf16-odd", "0/h/even").tolist() == [1, 2, 3, 4]


def test_values_that_share_a_file_by_accident() -> None:
    # Both paths lead to one file, and only the value that was written last is in it: no reader can tell.
    assert read_golden("hazard-dotdot", "0/h/a/../b").tolist() == [1, 2]
    assert read_golden("hazard-dotdot", "0/h/b").tolist() == [1, 2]
    # The first chunk of a tensor and an object: the file is that of the object, too long for the chunk.
    assert read_golden("hazard-dotdot", "0/h/w_0_0") == (1, 2)
    with pytest.raises(DataError, match=r"h/w: expected 16 bytes in 0/h/w_0_0, found \d+ bytes$"):
        read_golden("hazard-dotdot", "0/h/w")


# --- release 0.0.3 ---------------------------------------------------------------------------------------------------


def test_a_pickled_state_dict_of_an_old_snapshot_becomes_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Release 0.0.3 stored a `StateDict` as one object of that class. There is no need for torchsnapshot to be here.
    module = ModuleType("torchsnapshot.state_dict")
    theirs = type("StateDict", (UserDict,), {"__module__": module.__name__})
    module.StateDict = theirs  # type: ignore[attr-defined]  # the entry is known to be of that kind
    shutil.copytree(DATA / "legacy-003-w2", tmp_path / "s")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torchsnapshot", ModuleType("torchsnapshot"))
        patch.setitem(sys.modules, module.__name__, module)
        torch.save(theirs({"step": 5, "w": torch.arange(3)}), tmp_path / "s" / "progress")
    entry = (
        "  0/progress:\n    type: torchsnapshot.state_dict.StateDict\n    location: progress\n    replicated: false\n"
    )
    with (tmp_path / "s" / ".snapshot_metadata").open("a") as metadata:
        metadata.write(entry)
    progress = load(open_storage(tmp_path / "s"), rank=0, options=Options(), keys=["progress"])["progress"]
    assert type(progress) is StateDict
    assert progress["step"] == 5
    assert progress["w"].tolist() == [0, 1, 2]
