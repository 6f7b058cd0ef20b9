"""Saves of several ranks in which something fails: every storage operation, or a whole process."""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from lightning_snapshot.describe import NothingShared
from lightning_snapshot.errors import RankError, RankTimeoutError, StorageError
from lightning_snapshot.group import Group
from lightning_snapshot.options import Options
from lightning_snapshot.restore import load
from lightning_snapshot.save_each import save_each
from lightning_snapshot.session import Session
from lightning_snapshot.storage import Storage, open_storage
from lightning_snapshot.storage.local import LocalStorage
from lightning_snapshot.storage.posix import Posix
from lightning_snapshot.together import Save
from tests.edges.faulty_posix import FaultyPosix
from tests.ranks.processes import run_ranks

pytestmark = pytest.mark.distributed

SMALL = Options(memory_budget_bytes=1 << 16, threads=2, block_bytes=4096, chunk_bytes=1 << 16, file_bytes=1 << 17)
PROMPT_SECONDS = 5.0  # about one when the machine has nothing else to do


def storage_with(posix: Posix) -> Callable[[str], Storage]:
    return lambda path: LocalStorage(Path(path), path, posix)


def save(path: str, value: int, save_id: str, opener: Callable[[str], Storage], group: Group) -> None:
    state = {"x": torch.full((20_000,), value), "y": [value, (value, group.rank)]}
    save_each(lambda: state, Save(path, opener, save_id, SMALL, Session(), group), NothingShared())


def value_at(path: str, rank: int) -> int:
    state = load(open_storage(path), rank=rank, options=SMALL)
    value = int(state["x"][0])
    assert torch.equal(state["x"], torch.full((20_000,), value))
    assert state["y"] == [value, (value, rank)]
    return value


def listing(path: str) -> list[str]:
    folder = Path(path).parent
    return sorted(str(entry.relative_to(folder)) for entry in folder.rglob("*") if ".removed" not in entry.name)


def fail_everywhere(rank: int, path: str, failing: int) -> list[Any]:
    """Saves over a snapshot that fail on one rank, each at another operation of the storage."""
    group = Group.of()
    counting = FaultyPosix()
    save(path, 0, "counted", storage_with(counting), group)
    save(path, 1, "first", storage_with(counting := FaultyPosix()), group)
    calls = [len(counting.calls)]
    distributed.broadcast_object_list(calls, failing)
    found: list[Any] = []
    for number in range(1, calls[0] + 1):
        distributed.barrier()
        before = listing(path)
        distributed.barrier()
        posix = FaultyPosix(fail_at=number, error=errno.ENOSPC) if rank == failing else FaultyPosix()
        error: BaseException | None = None
        started = time.monotonic()
        try:
            save(path, number + 1, f"s{number}", storage_with(posix), group)
        except StorageError as caught:
            error = caught
        seconds = time.monotonic() - started
        distributed.barrier()
        value = value_at(path, rank)
        after = listing(path)
        distributed.barrier()
        if error is None:
            assert value == number + 1, number  # it did not matter
        else:
            assert seconds < PROMPT_SECONDS, number
            assert error.errno == errno.ENOSPC
            assert value in (number, number + 1)
            if value == number:
                assert [name for name in after if name not in before] in ([], [f"s/.data/s{number}"]), number  # empty
        found.append([value, None if error is None else str(error)])
        save(path, number + 1, f"again{number}", storage_with(FaultyPosix()), group)  # to the same path
        assert value_at(path, rank) == number + 1
        distributed.barrier()
        assert not [name for name in listing(path) if f"s{number}" in name and value == number], number
    return found


@pytest.mark.parametrize("failing", [0, 1])
def test_a_storage_that_fails_on_one_rank(failing: int, tmp_path: Path) -> None:
    results = run_ranks(fail_everywhere, 2, str(tmp_path / "s"), failing, timeout_seconds=100.0)
    failures = 0
    for number, (mine, other) in enumerate(zip(results[failing], results[1 - failing], strict=True), 1):
        assert mine[0] == other[0]
        assert (mine[1] is None) == (other[1] is None), number
        if mine[1]:
            assert other[1] == f"[Errno 28] rank {failing}: {mine[1].removeprefix('[Errno 28] ')}"
            failures += 1
    assert failures > 10


def write_slowly(rank: int, path: str) -> list[Any]:
    """Rank 1 fails at once, rank 0 has half a minute to write."""
    pause = threading.Event()
    slow = FaultyPosix(before={"write": lambda *_: pause.wait(0.1)})
    posix = slow if rank == 0 else FaultyPosix(before={"write": fail})
    with pytest.raises(StorageError):
        save(path, 1, "first", storage_with(posix), Group.of())
    return [sum(call.name == "write" for call in posix.calls), listing(path)]


def fail(*_: Any) -> None:
    raise OSError(errno.EIO, "broken")


def test_nobody_goes_on_writing_for_a_save_that_has_failed(tmp_path: Path) -> None:
    (written, left), _ = run_ranks(write_slowly, 2, str(tmp_path / "s"))
    assert 0 < written < 200  # of 600
    assert left == []


def die(rank: int, path: str, dying: int) -> list[Any]:
    group = Group.of(timeout_seconds=1.5)
    save(path, 1, "first", open_storage, group)
    posix = FaultyPosix(before={"write": lambda *_: os.kill(os.getpid(), signal.SIGKILL)} if rank == dying else {})
    with pytest.raises(RankTimeoutError) as caught:
        save(path, 2, "second", storage_with(posix), group)
    return [str(caught.value), value_at(path, rank)]


@pytest.mark.parametrize("dying", [0, 1, 2])
def test_a_rank_that_is_killed_is_named_and_the_old_snapshot_is_whole(dying: int, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    results = run_ranks(die, 3, path, dying, may_die=[dying])
    assert results.pop(dying) is None
    for message, value in results:
        assert f"no sign of life of rank {dying} for 1.5 s" in message
        assert value == 1
    assert run_ranks(save_again, 3, path) == [3, 3, 3]
    assert not [name for name in listing(path) if "second" in name]


def interrupt(rank: int, path: str, interrupted: list[int]) -> list[Any]:
    """Some ranks get Ctrl-C while they write."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores Ctrl-C
    group = Group.of()
    save(path, 1, "first", open_storage, group)
    once = iter([signal.SIGINT])

    def press(*_: Any) -> None:
        if (number := next(once, None)) is not None:
            signal.pthread_kill(threading.main_thread().ident, number)

    posix = FaultyPosix(before={"write": press} if rank in interrupted else {})
    with pytest.raises((KeyboardInterrupt, RankError)) as caught:
        save(path, 2, "second", storage_with(posix), group)
    distributed.barrier()
    found = [f"{caught.type.__name__}: {caught.value}", value_at(path, rank), listing(path)]
    distributed.barrier()
    save(path, 3, "third", open_storage, group)
    return [*found, value_at(path, rank)]


@pytest.mark.parametrize("interrupted", [[0], [1], [0, 1]])
def test_ctrl_c_during_a_save_ends_it_on_all_ranks(interrupted: list[int], tmp_path: Path) -> None:
    results = run_ranks(interrupt, 2, str(tmp_path / "s"), interrupted)
    errors = []
    for error, value, left, after in results:
        errors.append(error)
        assert (value, after) == (1, 3)
        assert not [name for name in left if "second" in name]
    # Of two at the same time, one may hear of the other first.
    first = next(rank for rank, error in enumerate(errors) if error == "KeyboardInterrupt: ")
    assert first in interrupted
    assert {*errors} <= {"KeyboardInterrupt: ", f"RankError: rank {first} raised KeyboardInterrupt"}
    assert len(interrupted) == 2 or len({*errors}) == 2


def save_again(rank: int, path: str) -> int:
    save(path, 3, "third", open_storage, Group.of())
    return value_at(path, rank)
