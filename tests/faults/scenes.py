"""What may be at a place before something goes wrong there, and what is done to it meanwhile."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from lightning_snapshot.errors import NotASnapshotError, SnapshotError, SnapshotNotFoundError
from lightning_snapshot.options import Options
from lightning_snapshot.restore import load
from lightning_snapshot.save import begin_save, save
from lightning_snapshot.storage import Storage
from lightning_snapshot.storage.local import LocalStorage
from lightning_snapshot.storage.posix import Posix
from tests.edges.faulty_posix import FaultyPosix, SimulatedCrash

# One thread makes the system calls in the same order every time; three data files, one of them past the page cache.
OPTIONS = Options(threads=1, memory_budget_bytes=1 << 20, block_bytes=1 << 19)
TORCHSNAPSHOT = Path(__file__).parents[1] / "golden" / "data" / "w1-optimizer"


class LossError(AssertionError):
    """What the package promises did not hold."""


def _state(seed: int) -> dict[str, Any]:
    chance = torch.Generator().manual_seed(seed)
    tied = torch.rand(100, generator=chance)
    large = torch.rand(264_000, generator=chance)
    return {"state_dict": {"large": large, "head": tied, "tail": tied}, "epoch": seed, "names": {"a", str(seed)}}


NO_EXCHANGE = ("exchange",)

OLD, NEW = _state(1), _state(2)


def bits(value: Any) -> Any:
    """A value in a form that is equal only if it is the same bit for bit."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(bits, value))
    return value


def open_local(root: Path, posix: Posix | None = None) -> Storage:
    return LocalStorage(root, str(root), posix or FaultyPosix())


def observe(root: Path) -> Any:
    """What somebody finds who wants to load from a path: a snapshot, a stock checkpoint, or None."""
    try:
        return bits(load(open_local(root), rank=0, options=OPTIONS))
    except (SnapshotNotFoundError, NotASnapshotError):
        return root.read_bytes() if root.is_file() else None
    except SnapshotError as error:
        raise LossError(f"what is at {root} cannot be loaded any more: {error}") from error


# --- operations ------------------------------------------------------------------------------------------------------


Run: TypeAlias = Callable[[Storage, str], Any]


@dataclass(frozen=True)
class Operation:
    """Something that is done to a place.

    Attributes:
        run: Does it; the text is the name of a save.
        outcome: From what was there before to what is there afterwards.
        result: From what was there before to what it returns.
        is_durable: Whether a power cut cannot undo it any more when it has returned.
    """

    run: Run
    outcome: Callable[[Any], Any]
    result: Callable[[Any], Any] = lambda _: None
    is_durable: bool = True


def _save(storage: Storage, save_id: str) -> None:
    save(NEW, storage, save_id=save_id, options=OPTIONS)


def _save_old(storage: Storage, save_id: str) -> None:
    save(OLD, storage, save_id=save_id, options=OPTIONS)


def _claim_and_save(storage: Storage, save_id: str) -> None:
    begin_save(NEW, storage, save_id=save_id, options=OPTIONS, claim=True).finish()


def _load(storage: Storage, _: str) -> Any:
    return bits(load(storage, rank=0, options=OPTIONS))


OPERATIONS = {
    "save": Operation(_save, lambda _: bits(NEW)),
    "claim and save": Operation(_claim_and_save, lambda _: bits(NEW)),
    "load": Operation(_load, lambda old: old, lambda old: old),
    "remove": Operation(lambda storage, _: storage.remove(), lambda _: None, is_durable=False),
}


# --- scenes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """What is at a path, and around it.

    Attributes:
        prepare: Puts it there.
        old: What `observe` finds.
        without: Calls that the file system does not know.
        is_ours: Whether every file of the snapshot is in the folder of a save, so that nothing is ever left over.
    """

    prepare: Callable[[Path], None]
    old: Any = None
    without: tuple[str, ...] = ()
    is_ours: bool = True


def _no_parents(root: Path) -> None:
    pass


def _nothing(root: Path) -> None:
    root.parent.mkdir()


def _snapshot(root: Path) -> None:
    _save_old(open_local(root), "old")


def _die_before(call_name: str, number: int, root: Path, run: Run, without: tuple[str, ...] = ()) -> None:
    def die(*_: Path) -> None:
        if sum(call.name == call_name for call in posix.calls) == number:
            posix.crash()

    posix = FaultyPosix(without=without, before={call_name: die})
    with pytest.raises(SimulatedCrash):
        run(open_local(root, posix), "dead")


def _killed_save(root: Path) -> None:
    root.parent.mkdir(exist_ok=True)
    _die_before("write", 4, root, _save)  # in the middle of the third data file


def _killed_claim(root: Path) -> None:
    _die_before("write", 4, root, _claim_and_save)


def _snapshot_and_killed_saves(root: Path) -> None:
    _snapshot(root)
    _killed_save(root)
    _killed_save(root.with_name("other.ckpt"))


def _stock(root: Path) -> None:
    root.parent.mkdir()
    root.write_bytes(b"stock")


def _link(root: Path) -> None:
    _snapshot(root.with_name("best.ckpt"))
    root.symlink_to("best.ckpt")


def _half_exchanged(root: Path) -> None:
    _stock(root)
    _die_before("rename", 2, root, _save_old, NO_EXCHANGE)  # the file is moved away, and its place is empty


def _torchsnapshot(root: Path) -> None:
    shutil.copytree(TORCHSNAPSHOT, root)
    (root / "expected.json").unlink()


def _killed_removal(root: Path) -> None:
    _torchsnapshot(root)
    _die_before("unlink", 3, root, OPERATIONS["remove"].run)


SCENES = {
    "no parents": Scene(_no_parents),
    "nothing": Scene(_nothing),
    "snapshot": Scene(_snapshot, bits(OLD)),
    "killed save": Scene(_killed_save),
    "killed claim": Scene(_killed_claim),
    "killed removal": Scene(_killed_removal, is_ours=False),
    "snapshot and killed saves": Scene(_snapshot_and_killed_saves, bits(OLD)),
    "stock file": Scene(_stock, b"stock"),
    "stock file, no exchange": Scene(_stock, b"stock", NO_EXCHANGE),
    "link": Scene(_link, bits(OLD)),
    "link, no exchange": Scene(_link, bits(OLD), NO_EXCHANGE),
    "half an exchange": Scene(_half_exchanged, bits(OLD), NO_EXCHANGE),
    "torchsnapshot": Scene(_torchsnapshot, observe(TORCHSNAPSHOT), is_ours=False),
}
