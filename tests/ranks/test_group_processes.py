"""Ranks that talk through the store of a real process group, as processes."""

import multiprocessing
import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed

from lightning_snapshot.errors import RankError, RankTimeoutError, StorageError
from lightning_snapshot.group import Group, Patience
from tests.ranks.processes import RanksFailedError, run_ranks

pytestmark = pytest.mark.distributed

MIB = 1 << 20


def save(group: Group, subject: str = "save a.ckpt") -> bytes:
    with group.meet(subject) as meeting:
        specs = meeting.gather("specs", b"specs %d" % group.rank)
        plan = meeting.scatter("plans", specs or ())
        receipts = meeting.gather("receipts", plan)
        return meeting.broadcast("done", b"+".join(receipts or ()))


def saved(world_size: int) -> bytes:
    return b"+".join(b"specs %d" % rank for rank in range(world_size))


def exchange_large_values(rank: int) -> bool:
    group = Group.of()
    assert (group.rank, group.world_size) == (rank, distributed.get_world_size())
    values = [bytes([number]) * (9 * MIB + number) for number in range(group.world_size)]
    with group.meet("talk") as meeting:
        gathered = meeting.gather("x", values[rank])
        scattered = meeting.scatter("x", gathered or ())
        broadcast = meeting.broadcast("x", values[0])
    return (gathered is None) == (rank > 0) and scattered == values[rank] and broadcast == values[0]


def test_large_values() -> None:
    assert run_ranks(exchange_large_values, 3) == [True] * 3


def check_or_fail(group: Group, error: Exception | None) -> None:
    with group.meet("save a.ckpt") as meeting:
        if error:
            raise error
        while True:
            meeting.check()


def fail_on(rank: int, failing: int) -> list[object]:
    group = Group.of()
    with pytest.raises(StorageError) as caught:
        check_or_fail(group, StorageError(28, "disk full") if rank == failing else None)
    return [caught.value.errno, str(caught.value), save(group)]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_of_one_is_a_failure_of_all_and_the_next_save_works(failing: int) -> None:
    results = run_ranks(fail_on, 2, failing)
    assert results[failing] == [28, "[Errno 28] disk full", saved(2)]
    assert results[1 - failing] == [28, f"[Errno 28] rank {failing}: disk full", saved(2)]


def save_in_subgroups(rank: int) -> list[object]:
    odd = distributed.new_group([1, 3])
    even = distributed.new_group([0, 2])
    mine, not_mine = (odd, even) if rank % 2 else (even, odd)
    mine._set_group_name("split")  # the same for both, as after split_group, which needs a GPU
    assert mine.group_name == "split"
    with pytest.raises(RankError, match=f"rank {rank} is not in the process group"):
        Group.of(not_mine)
    group = Group.of(mine)
    single, *_ = [distributed.new_group([number]) for number in range(4)]
    if rank == 0:
        assert Group.of(single) == Group.alone()
    return [group.rank, group.world_size, save(group), save(Group.of()), save(Group.of(mine))]


def test_subgroups() -> None:
    results = run_ranks(save_in_subgroups, 4)
    assert results == [[rank // 2, 2, saved(2), saved(4), saved(2)] for rank in range(4)]


def lose_rank_1(rank: int) -> str:
    group = Group.of(timeout_seconds=1.5)
    with pytest.raises(RankTimeoutError) as caught:
        save_and_die(group, dying=1)
    return str(caught.value)


def save_and_die(group: Group, dying: int) -> None:
    with group.meet("save a.ckpt") as meeting:
        if group.rank == dying:
            os._exit(7)
        meeting.gather("receipts", b"")
        meeting.broadcast("done")


def test_a_rank_that_is_gone_is_named_on_all_others() -> None:
    first, dead, third = run_ranks(lose_rank_1, 3, may_die=[1])
    assert dead is None
    assert first.startswith("save a.ckpt: no sign of life of rank 1 for 1.5 s")
    assert third.startswith("rank 0: save a.ckpt: no sign of life of rank 1 for 1.5 s")


def lose_the_store(rank: int) -> str:
    """Rank 0 owns the store, fails, and ends at once."""
    port: list[Any] = [None]
    if rank == 0:
        store = distributed.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        port = [store.port]
    distributed.broadcast_object_list(port)
    if rank:
        store = distributed.TCPStore("127.0.0.1", port[0], None, is_master=False, wait_for_workers=False)
    group = Group.over(store, rank, 3, Patience(60.0, 60.0))
    with pytest.raises((RankError, ValueError)) as caught:
        check_or_fail(group, ValueError("wrong") if rank == 0 else None)
    if rank == 0:
        os._exit(0)
    with pytest.raises(RankError, match="store of the process group cannot be reached"):
        save(group)
    return str(caught.value)


def test_the_last_words_of_rank_0_arrive_before_it_takes_the_store_with_it() -> None:
    assert run_ranks(lose_the_store, 3, may_die=[0]) == [None, *["rank 0 raised ValueError: wrong"] * 2]


def work_longer_than_the_time_outs(rank: int) -> bytes:
    group = Group.of(timeout_seconds=1.0)
    with group.meet("save a.ckpt") as meeting:
        begin = time.monotonic()
        while rank == 1 and time.monotonic() < begin + 2.5:
            meeting.check()
        meeting.gather("receipts", b"")
        return meeting.broadcast("done", b"done")


def test_slow_storage_is_no_failure() -> None:
    assert run_ranks(work_longer_than_the_time_outs, 2, group_timeout_seconds=1.0) == [b"done"] * 2


def save_behind_collectives(rank: int) -> list[object]:
    group = Group.of()
    found = []
    thread = threading.Thread(target=lambda: found.extend(save(group, f"save {n}") for n in range(10)))
    thread.start()
    total = torch.zeros(1)
    for _ in range(200):
        total += 1
        distributed.all_reduce(total)
        total /= 2
        distributed.barrier()
    thread.join()
    return [found, total.item()]


def test_saves_in_the_background_do_not_meet_the_collectives_of_training() -> None:
    assert run_ranks(save_behind_collectives, 2) == [[[saved(2)] * 10, 200.0]] * 2


def save_while_training_waits_in_the_store(rank: int) -> bytes:
    group = Group.of()
    store = distributed.distributed_c10d._get_default_store()
    found = []
    thread = threading.Thread(target=lambda: found.append(save(group)))
    if rank == 0:
        thread.start()
        thread.join()
        store.set("training goes on", "")
    else:
        waiting = threading.Thread(target=lambda: store.wait(["training goes on"], timedelta(seconds=60)))
        waiting.start()
        thread.start()
        thread.join()
        waiting.join()
    return found[0]


def test_saves_in_the_background_do_not_wait_for_training_in_the_store() -> None:
    assert run_ranks(save_while_training_waits_in_the_store, 2, timeout_seconds=30) == [saved(2)] * 2


def save_in_a_fork(rank: int) -> list[bytes]:
    group = Group.of()
    found = [save(group)]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save(group)
        except RankError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return [*found, os.read(reader, 1000), save(group)]


def test_a_fork_leaves_the_group_of_its_parent_alone() -> None:
    refusal = b"save a.ckpt: this process was forked from the one that the process group belongs to"
    for before, said, after in run_ranks(save_in_a_fork, 2):
        assert before == after == saved(2)
        assert said.startswith(refusal)


def count_keys(rank: int) -> list[int]:
    store = distributed.distributed_c10d._get_default_store()
    sizes = []
    for repeats in (1, 50):
        for _ in range(repeats):
            save(Group.of())
        distributed.barrier()
        sizes.append(store.num_keys())
        distributed.barrier()
    return sizes


def test_groups_that_are_made_anew_for_each_save_leave_nothing() -> None:
    first, second = run_ranks(count_keys, 2)[0]
    assert first == second


# The helper itself


def succeed(rank: int, number: int) -> tuple[int, int]:
    total = torch.tensor([number + rank])
    distributed.all_reduce(total)
    return rank, int(total)


def raise_on_rank_1(rank: int) -> None:
    print("printed by", rank)
    if rank == 1:
        raise ValueError("this one")
    distributed.barrier()


def hang_on_rank_1(rank: int) -> None:
    if rank == 1:
        threading.Event().wait()


def wait_for_a_child(rank: int) -> None:
    if rank == 1:
        child = multiprocessing.get_context("fork").Process(target=threading.Event().wait, args=(30.0,))
        child.start()
        child.join()


def die_on_rank_1(rank: int) -> int:
    if rank == 1:
        os._exit(3)
    return rank


def test_results_come_by_rank() -> None:
    assert run_ranks(succeed, 3, 10) == [(0, 33), (1, 33), (2, 33)]


def test_a_rank_that_raises_fails_the_test_with_traceback_and_output() -> None:
    with pytest.raises(RanksFailedError, match=r"(?s)rank 1: Traceback.*in raise_on_rank_1.*this one.*printed by 1"):
        run_ranks(raise_on_rank_1, 2, group_timeout_seconds=1.0)


def test_a_rank_that_waits_for_a_child_fails_the_test_with_the_stacks_of_both() -> None:
    with pytest.raises(RanksFailedError, match=r"(?s)rank 1: has taken too long.*in wait_for_a_child.*threading.py"):
        run_ranks(wait_for_a_child, 2, timeout_seconds=3)


def test_a_rank_that_hangs_fails_the_test_with_its_stack() -> None:
    with pytest.raises(RanksFailedError, match=r"(?s)rank 1: has taken too long.*in hang_on_rank_1"):
        run_ranks(hang_on_rank_1, 2, timeout_seconds=0.5)


def test_a_rank_that_dies_fails_the_test_unless_it_may() -> None:
    with pytest.raises(RanksFailedError, match="rank 1: ended without a result, exit code 3"):
        run_ranks(die_on_rank_1, 2)
    assert run_ranks(die_on_rank_1, 2, may_die=[1]) == [0, None]


def see_the_environment(rank: int) -> str:
    return os.environ["OF_THE_TEST"]


def test_ranks_have_the_environment_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_TEST", "1")
    assert run_ranks(see_the_environment, 1) == ["1"]
    monkeypatch.setenv("OF_THE_TEST", "2")
    assert run_ranks(see_the_environment, 1) == ["2"]
