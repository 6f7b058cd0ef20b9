"""What must hold after anything has gone wrong: one check, whatever the fault was."""

import random
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from lightning_snapshot.errors import SnapshotError
from lightning_snapshot.manifest import decode
from lightning_snapshot.storage import METADATA_NAME, Storage
from lightning_snapshot.storage.locations import data_locations
from tests.edges.faulty_posix import FaultyPosix, SimulatedCrash
from tests.faults.power import Disk, RecordingPosix, build
from tests.faults.scenes import OPERATIONS, LossError, Operation, Scene, observe, open_local

# Recovery is slow to check, and seldom depends on which of many states it starts from.
_RECOVERY_STRIDE = 3

Opener: TypeAlias = Callable[[Path, FaultyPosix], Storage]


@dataclass(frozen=True)
class Before:
    """What was there before the fault.

    Attributes:
        old: What could be loaded from the path.
        neighbours: Name → what could be loaded from what else was in the folder.
        files: All files of the snapshot.
    """

    old: Any
    neighbours: dict[str, Any]
    files: frozenset[str]

    @classmethod
    def of(cls, scene: Scene, root: Path) -> "Before":
        """Put a scene there, and look at it."""
        root.parent.parent.mkdir(parents=True)
        scene.prepare(root)
        return cls(scene.old, _neighbours(root), _files(root))


def _neighbours(root: Path) -> dict[str, Any]:
    paths = root.parent.glob("[!.]*")
    return {path.name: observe(path) for path in paths if path.name != root.name}


def _files(root: Path) -> frozenset[str]:
    return frozenset(path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir())


def try_operation(
    operation: Operation, scene: Scene, root: Path, posix: FaultyPosix, opener: Opener = open_local
) -> Any:
    """Put a scene to a path, do something to it while something goes wrong, and check everything.

    Returns:
        What could be loaded afterwards.

    Raises:
        LossError: Something does not hold.
    """
    before = Before.of(scene, root)
    returned = False
    try:
        result = operation.run(opener(root, posix), "new")
        returned = True
        if result != operation.result(before.old):
            raise LossError(f"expected the old state, got {result}")
    except SimulatedCrash:
        pass
    except SnapshotError as error:
        _check_error(error, posix, root)
    if posix.open_paths:
        raise LossError(f"left open: {posix.open_paths}")
    allowed = [operation.outcome(before.old)] if returned else [before.old, operation.outcome(before.old)]
    seen = check_state(root, allowed)
    check_recovery(operation, scene, root, before)
    return seen


def try_power_cuts(
    operation: Operation,
    scene: Scene,
    root: Path,
    chance: random.Random,
    *,
    complete: bool = False,
    stride: int = 1,
    posix_type: Callable[..., RecordingPosix] = RecordingPosix,
    opener: Opener = open_local,
    first: Mapping[str, int] | None = None,
) -> int:
    """Put a scene to a path, do something to it, and check what power cuts at many times may leave.

    Args:
        operation: What is done.
        scene: What is there.
        root: The path; everything is durable at first.
        chance: Chooses among the many possibilities.
        complete: Try more of them.
        stride: Try every so many changes of the disk, and the end.
        posix_type: The system calls.
        opener: What is tested.
        first: Faults of the same operation before, which ends without the power being cut.

    Returns:
        How many trees were tried.

    Raises:
        LossError: One of them does not hold what was there before or after.
    """
    before = Before.of(scene, root)
    disk = Disk(root.parent.parent)
    if first is not None:
        with suppress(SimulatedCrash, SnapshotError):
            operation.run(opener(root, posix_type(disk, without=scene.without, **first)), "first")
    begin = len(disk.log)
    operation.run(opener(root, posix_type(disk, without=scene.without)), "new")
    count = 0
    # From the end, where most mistakes show.
    for length in (len(disk.log), *range(len(disk.log) - chance.randint(1, stride), begin - 1, -stride)):
        allowed = [before.old, operation.outcome(before.old)]
        if operation.is_durable and length == len(disk.log):
            allowed = allowed[1:]
        for tree in disk.survivors(length, chance, complete=complete):
            after = disk.base.with_name("after")
            build(tree, after)
            path = after / root.relative_to(disk.base)
            check_state(path, allowed)
            if count % _RECOVERY_STRIDE == 0:
                check_recovery(operation, scene, path, before)
            shutil.rmtree(after)
            count += 1
    return count


def check_state(root: Path, allowed: list[Any]) -> Any:
    """One of these states is there, whole, and nothing else.

    Returns:
        Which one.

    Raises:
        LossError: It is not so.
    """
    seen = observe(root)
    if seen not in allowed:
        raise LossError(
            f"{root}: expected the old or the new state, found {'nothing' if seen is None else 'another one'}"
        )
    return seen


def check_recovery(operation: Operation, scene: Scene, root: Path, before: Before) -> None:
    """The same operation works now, and after the next save nothing is left over.

    Raises:
        LossError: It is not so.
    """
    seen = observe(root)
    again = {"again": operation, "last": OPERATIONS["save"]}
    for save_id, run in again.items():
        try:
            result = run.run(open_local(root), save_id)
        except SnapshotError as error:
            raise LossError(f"{root}: does not work on healthy storage either: {error}") from error
        if result != run.result(seen):
            raise LossError(f"{root}: gives something else on healthy storage than it should")
        seen = check_state(root, [run.outcome(seen)])
    if _neighbours(root) != before.neighbours:
        raise LossError(f"{root}: changed what is beside it")
    _check_tidiness(scene, root, before)


def _check_error(error: SnapshotError, posix: FaultyPosix, root: Path) -> None:
    failed = posix.calls[posix.fail_at - 1]
    if not isinstance(error, OSError) or error.errno != posix.error:
        raise LossError(f"expected errno {posix.error}, raised {error!r}") from error
    if "could not" not in str(error) or not any(str(path) in str(error) for path in (root, *failed.paths)):
        raise LossError(f"expected the operation and its path, got: {error}") from error


def _check_tidiness(scene: Scene, root: Path, before: Before) -> None:
    metadata = (root / METADATA_NAME).read_bytes()
    left = _files(root) - {METADATA_NAME, *data_locations(decode(metadata, source=""))}
    left |= {path.name for path in root.parent.glob(".*")}
    if scene.is_ours and root.is_dir():
        left |= {path.name for path in (root / ".data").iterdir() if path.name != "last"}
    if left - (frozenset() if scene.is_ours else before.files):
        raise LossError(f"{root}: left over: {sorted(left)}")
