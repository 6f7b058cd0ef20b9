"""Every operation of the storage fails, stops half way or hangs, while a snapshot is saved, loaded or removed."""

import errno
import multiprocessing
import os
import signal
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.edges.faulty_posix import FaultyPosix, SimulatedCrash
from tests.faults.matrix import Before, check_recovery, check_state, try_operation
from tests.faults.scenes import NEW, OLD, OPERATIONS, OPTIONS, SCENES, bits, observe, open_local, save

FAULTS: dict[str, Any] = {
    "no space": lambda number: {"fail_at": number, "error": errno.ENOSPC},
    "input/output error": lambda number: {"fail_at": number, "error": errno.EIO},
    "no permission": lambda number: {"fail_at": number, "error": errno.EACCES},
    "killed": lambda number: {"crash_at": number},
}
LOADABLE = [name for name, scene in SCENES.items() if isinstance(scene.old, dict)]
EMPTY = [name for name, scene in SCENES.items() if scene.old is None]
CASES = [
    *(("save", scene) for scene in SCENES),
    *(("claim and save", scene) for scene in EMPTY),
    *(("load", scene) for scene in LOADABLE),
    *(("remove", scene) for scene in SCENES if scene not in ("no parents", "nothing")),
]


@cache
def calls_of(operation: str, scene: str) -> list[str]:
    """The names of the system calls when nothing goes wrong; they are the same every time."""
    posix = FaultyPosix(without=SCENES[scene].without)
    with TemporaryDirectory() as folder:
        root = Path(os.path.realpath(folder), "parents", "run", "x.ckpt")
        try_operation(OPERATIONS[operation], SCENES[scene], root, posix)
    return [call.name for call in posix.calls]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("operation", "scene"), CASES)
def test_a_fault_leaves_the_old_or_the_new(tmp_path, sample, operation, scene, fault):
    for number in sample.numbers(calls_of(operation, scene), 20):
        posix = FaultyPosix(without=SCENES[scene].without, **FAULTS[fault](number))
        try_operation(OPERATIONS[operation], SCENES[scene], tmp_path / str(number) / "run" / "x.ckpt", posix)
        assert posix.crashed or len(posix.calls) >= number, "the fault was not met"
        sample.count("faults")


@pytest.mark.parametrize("most_bytes", [1, 512, 4096])
@pytest.mark.parametrize(("operation", "scene"), CASES)
def test_what_is_moved_in_part_is_moved_on(tmp_path, sample, operation, scene, most_bytes):
    calls = calls_of(operation, scene)
    for number in sample.numbers(calls, 20):
        if calls[number - 1] in ("read", "write"):
            posix = FaultyPosix(without=SCENES[scene].without, short_at=number, most_bytes=most_bytes)
            root = tmp_path / str(number) / "run" / "x.ckpt"
            seen = try_operation(OPERATIONS[operation], SCENES[scene], root, posix)
            assert seen == OPERATIONS[operation].outcome(SCENES[scene].old)
            sample.count("faults")


@pytest.mark.parametrize(("operation", "scene"), CASES)
def test_while_an_operation_hangs_others_see_the_old_until_they_see_the_new(tmp_path, sample, operation, scene):
    """What others do meanwhile is done by the call that hangs, so that nobody has to wait for anybody."""
    seen: list[Any] = []
    for number in sample.numbers(calls_of(operation, scene), 20):
        root = tmp_path / str(number) / "run" / "x.ckpt"
        posix = FaultyPosix(
            without=SCENES[scene].without, pause_at=number, pause=lambda root=root: seen.append(observe(root))
        )
        new = OPERATIONS[operation].outcome(SCENES[scene].old)
        assert try_operation(OPERATIONS[operation], SCENES[scene], root, posix) == new
        sample.count("faults")
    is_new = [state == new for state in seen]
    assert is_new == sorted(is_new)
    assert all(state in (SCENES[scene].old, new) for state in seen)


def interrupted_by_a_save(scene: str, root: Path, number: int) -> FaultyPosix:
    def pause() -> None:
        OPERATIONS["save"].run(open_local(root), "other")

    return FaultyPosix(without=SCENES[scene].without, pause_at=number, pause=pause)


@pytest.mark.parametrize("scene", SCENES)
def test_a_save_that_hangs_while_another_one_is_made(tmp_path, sample, scene):
    for number in sample.numbers(calls_of("save", scene), 20):
        root = tmp_path / str(number) / "run" / "x.ckpt"
        before = Before.of(SCENES[scene], root)
        posix = interrupted_by_a_save(scene, root, number)
        save(OLD, open_local(root, posix), save_id="slow", options=OPTIONS)
        check_state(root, [bits(OLD), bits(NEW)])
        check_recovery(OPERATIONS["save"], SCENES[scene], root, before)
        sample.count("faults")


@pytest.mark.parametrize("scene", LOADABLE)
def test_a_load_that_hangs_while_a_save_is_made(tmp_path, sample, scene):
    for number in sample.numbers(calls_of("load", scene), 10):
        root = tmp_path / str(number) / "run" / "x.ckpt"
        before = Before.of(SCENES[scene], root)
        posix = interrupted_by_a_save(scene, root, number)
        assert OPERATIONS["load"].run(open_local(root, posix), "") in (before.old, bits(NEW))
        check_state(root, [bits(NEW)])
        check_recovery(OPERATIONS["load"], SCENES[scene], root, before)
        sample.count("faults")


def test_the_folder_does_not_grow(tmp_path, sample):
    root = tmp_path / "run" / "x.ckpt"
    sizes = set()
    for number in range(10, 30):
        with suppress(SimulatedCrash):
            posix = FaultyPosix(crash_at=sample.chance.randint(1, 80))
            OPERATIONS["save"].run(open_local(root, posix), f"dead-{number}")
        OPERATIONS["save"].run(open_local(root), f"last-{number}")
        sizes.add(sum(path.lstat().st_size for path in root.parent.rglob("*")))
    assert len(sizes) == 1


# --- killed for real -------------------------------------------------------------------------------------------------


def run_and_die(operation: str, root: Path, number: int, without: tuple[str, ...]) -> None:
    """What a process does that is killed before it makes the system call of that number."""
    posix = FaultyPosix(without=without, pause_at=number, pause=lambda: os.kill(os.getpid(), signal.SIGKILL))
    OPERATIONS[operation].run(open_local(root, posix), "new")


@pytest.mark.parametrize(("operation", "scene"), CASES)
def test_a_process_that_is_killed(tmp_path, sample, operation, scene):
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__])  # or each process would import torch again
    for number in sample.numbers(calls_of(operation, scene), 20):
        root = tmp_path / str(number) / "run" / "x.ckpt"
        before = Before.of(SCENES[scene], root)
        process = server.Process(target=run_and_die, args=(operation, root, number, SCENES[scene].without))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        check_state(root, [before.old, OPERATIONS[operation].outcome(before.old)])
        check_recovery(OPERATIONS[operation], SCENES[scene], root, before)
        sample.count("kills")
