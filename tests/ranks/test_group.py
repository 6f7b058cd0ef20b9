"""Ranks that talk through a store: as threads, with time that the tests tell."""

import dataclasses
import inspect
import itertools
import json
import logging
import pickle
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed

from lightning_snapshot import errors
from lightning_snapshot.errors import (
    RankError,
    RankTimeoutError,
    SnapshotError,
    StorageError,
    UnsupportedFeatureError,
    UnsupportedValueError,
    error_from_report,
    report_of_error,
)
from lightning_snapshot.group import Group, Meeting, Patience
from lightning_snapshot.group.mailbox import Mailbox
from tests.ranks.simulation import FAST, Guest, PatientStore, ToldTime, groups, run, start

MIB = 1 << 20


def save(group: Group, subject: str = "save a.ckpt") -> list[bytes]:
    """All kinds of exchange, as a save has them."""
    with group.meet(subject) as meeting:
        specs = meeting.gather("specs", b"specs %d" % group.rank)
        plans = [part.replace(b"specs", b"plan") for part in specs] if specs else ()
        plan = meeting.scatter("plans", plans)
        meeting.check()
        receipts = meeting.gather("receipts", plan)
        done = meeting.broadcast("done", b"+".join(receipts or ()))
    return [plan, done]


def saved(world_size: int) -> list[list[bytes]]:
    plans = [b"plan %d" % rank for rank in range(world_size)]
    return [[plan, b"+".join(plans)] for plan in plans]


def failed(result: object, kind: type[BaseException], text: str) -> bool:
    return type(result) is kind and text in str(result)


# One process


def test_a_process_alone_talks_to_itself() -> None:
    group = Group.alone()
    assert (group.rank, group.world_size) == (0, 1)
    assert save(group) == saved(1)[0]
    assert Group.of() == group
    assert pickle.loads(pickle.dumps(group)) == group
    with group.meet("save a.ckpt"), group.meet("load b.ckpt"):
        pass  # nobody else can be confused by this


# Exchanges


@given(st.integers(2, 4), st.data())
@settings(max_examples=25)
def test_everybody_gets_what_was_sent(world_size: int, data: st.DataObject) -> None:
    parts = st.lists(st.binary(max_size=40), min_size=world_size, max_size=world_size)
    exchanges = data.draw(st.lists(st.tuples(st.sampled_from(["gather", "scatter", "broadcast"]), parts), max_size=6))

    def talk(group: Group) -> list[object]:
        found = []
        with group.meet("talk") as meeting:
            for kind, payloads in exchanges:
                if kind == "gather":
                    found.append(meeting.gather("x", payloads[group.rank]))
                elif kind == "scatter":
                    found.append(meeting.scatter("x", () if group.rank else payloads))
                else:
                    found.append(meeting.broadcast("x", payloads[group.rank]))
        return found

    def expected(rank: int) -> list[object]:
        answers = {"gather": lambda all_: None if rank else all_, "scatter": lambda all_: all_[rank]}
        return [answers.get(kind, lambda all_: all_[0])(payloads) for kind, payloads in exchanges]

    assert run(talk, groups(world_size)) == [expected(rank) for rank in range(world_size)]


@pytest.mark.parametrize("size", [0, 1, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 9 * MIB])
@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_values_of_any_size_pass_any_store(kind: str, size: int, tmp_path) -> None:
    server = {
        "hash": distributed.HashStore,
        "file": lambda: distributed.FileStore(str(tmp_path / "store"), 1),
        "tcp": lambda: distributed.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False),
    }[kind]()
    mailbox = Mailbox(PatientStore(server))
    value = bytes(range(251)) * (size // 251 + 1)
    before = server.num_keys()
    mailbox.put("big", value[:size])
    mailbox.put("small", b"small")
    assert mailbox.take(["small", "big"]) == [b"small", value[:size]]
    mailbox.clean()
    assert server.num_keys() == before
    assert not mailbox.has(["big"])


def test_who_gives_its_part_of_a_gather_can_go_on_at_once() -> None:
    others_have_left = threading.Event()

    def talk(group: Group) -> object:
        with group.meet("talk") as meeting:
            if group.rank == 0:
                assert others_have_left.wait(30)
            return meeting.gather("x", b"%d" % group.rank)

    first, *others = start(talk, groups(3))
    assert [other.result(30) for other in others] == [None, None]
    others_have_left.set()
    assert first.result(30) == [b"0", b"1", b"2"]


def test_a_broadcast_is_stored_once() -> None:
    shared = distributed.HashStore()
    stores = [PatientStore(shared) for _ in range(16)]

    def talk(group: Group) -> int:
        with group.meet("talk") as meeting:
            before = stores[0].calls.count("set")
            assert meeting.broadcast("x", bytes(1000)) == bytes(1000)
            return stores[0].calls.count("set") - before

    sent, *_ = run(talk, [Group.over(store, rank, 16, FAST) for rank, store in enumerate(stores)])
    assert sent == 1


def test_rank_0_asks_for_all_ranks_at_once() -> None:
    def interrupt_the_100th_sleep() -> None:
        if next(sleeps) == 100:
            raise KeyboardInterrupt

    sleeps = itertools.count(1)
    told, store = ToldTime(on_sleep=interrupt_the_100th_sleep), PatientStore()
    with pytest.raises(KeyboardInterrupt), Group.over(store, 0, 1000, told.patience(1e6, 1e6)).meet("talk"):
        pass
    assert 100 <= store.calls.count("check") < 250


def test_many_ranks() -> None:
    assert run(save, groups(64)) == saved(64)


def test_paths_that_are_no_text_are_subjects_too() -> None:
    ranks = groups(2)
    assert run(lambda group: save(group, "save \udc80ü.ckpt"), ranks) == saved(2)
    result, _ = run(lambda group: save(group, f"save \udc80{group.rank}.ckpt"), ranks)
    assert failed(result, RankError, "rank 0: save \\udc800.ckpt; rank 1: save \\udc801.ckpt")


def test_groups_do_not_disturb_each_other() -> None:
    store = distributed.HashStore()
    several = [
        groups(3, PatientStore(distributed.PrefixStore(name, store)), FAST) for name in ("first", "second", "third")
    ]
    futures = [start(lambda group: [save(group, f"save {n}") for n in range(5)], ranks) for ranks in several]
    for of_group in futures:
        assert [future.result(30) for future in of_group] == [[found] * 5 for found in saved(3)]


# Failures


STEPS = ("enter", "specs", "plans", "work")
FAILURES = [*itertools.product((0, 1, 2), STEPS), (0, "receipts")]  # after its receipt, another rank only waits


def save_that_fails(group: Group, failing: int, step: str, error: BaseException) -> object:
    def fail_at(here: str) -> None:
        if (group.rank, here) == (failing, step):
            raise error

    with group.meet("save a.ckpt") as meeting:
        fail_at("enter")
        specs = meeting.gather("specs", b"specs")
        fail_at("specs")
        meeting.scatter("plans", specs or ())
        fail_at("plans")
        while step == "work" and group.rank != failing:
            meeting.check()
        fail_at("work")
        meeting.gather("receipts", b"receipt")
        fail_at("receipts")
        return meeting.broadcast("done")


@pytest.mark.parametrize(("failing", "step"), FAILURES)
@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (StorageError(28, "disk full"), StorageError, "[Errno 28] rank {}: disk full"),
        (ValueError("wrong"), RankError, "rank {} raised ValueError: wrong"),
        (KeyboardInterrupt(), RankError, "rank {} raised KeyboardInterrupt"),
        (SystemExit(3), RankError, "rank {} raised SystemExit: 3"),
    ],
    ids=["ours", "foreign", "interrupt", "exit"],
)
def test_what_one_rank_raises_all_raise_and_the_next_save_works(failing, step, error, kind, text) -> None:
    ranks = groups(3)
    results = run(lambda group: save_that_fails(group, failing, step, error), ranks)
    assert results[failing] is error
    others = [result for rank, result in enumerate(results) if rank != failing]
    assert all(failed(other, kind, text.format(failing)) for other in others), results
    assert getattr(others[0], "errno", None) == getattr(error, "errno", None)
    assert run(save, ranks) == saved(3)


def test_the_first_report_wins() -> None:
    first_is_out, second_is_out = threading.Event(), threading.Event()

    def talk(group: Group) -> None:
        with group.meet("talk") as meeting:
            if group.rank == 1:
                raise ValueError("first")
            assert first_is_out.wait(30)
            if group.rank == 2:
                raise ValueError("second")
            assert second_is_out.wait(30)
            meeting.gather("never", b"")

    told, first, second = start(talk, groups(3))
    assert failed(first.exception(30), ValueError, "first")
    first_is_out.set()
    assert failed(second.exception(30), ValueError, "second")
    second_is_out.set()
    assert failed(told.exception(30), RankError, "rank 1 raised ValueError: first")


def check_for_ever(meeting: Meeting) -> None:
    while True:
        meeting.check()


def test_any_thread_hears_of_a_failure_and_hears_it_every_time() -> None:
    def talk(group: Group) -> list[object]:
        with group.meet("talk") as meeting:
            if group.rank:
                raise ValueError("wrong")
            heard = []

            def listen() -> None:
                with pytest.raises(RankError) as caught:
                    check_for_ever(meeting)
                heard.append(caught.value)

            thread = threading.Thread(target=listen)
            thread.start()
            thread.join()
            for _ in range(3):
                with pytest.raises(RankError, match="rank 1 raised ValueError: wrong"):
                    meeting.check()
            return heard

    heard, _ = run(talk, groups(2))
    assert failed(heard[0], RankError, "wrong")


def test_a_check_costs_nothing_most_of_the_time_and_hears_within_a_quarter_of_a_second() -> None:
    told, store = ToldTime(), PatientStore()
    here, there = Group.over(store, 0, 2, told.patience(1e9, 1e9)), groups(2, store)[1]
    with Guest(there, error=ValueError("wrong")) as guest:

        def work() -> None:
            with here.meet("save a.ckpt") as meeting:
                told.now += 10
                meeting.check()
                before = len(store.calls)
                for _ in range(1000):
                    meeting.check()
                assert len(store.calls) == before
                guest.leave()
                told.now += 0.25
                meeting.check()

        with pytest.raises(RankError, match="rank 1 raised ValueError: wrong"):
            work()


OURS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, SnapshotError)]


@pytest.mark.parametrize("kind", OURS)
def test_every_error_of_ours_arrives_as_what_it_is(kind: type[SnapshotError]) -> None:
    error = error_from_report(report_of_error(2, kind("a.ckpt: it is broken")))
    assert type(error) is kind
    assert str(error) == "rank 2: a.ckpt: it is broken"


def test_errors_of_others_arrive_as_text() -> None:
    class OwnError(StorageError):
        pass

    class SilentError(Exception):
        def __str__(self) -> str:
            raise ValueError

    found = error_from_report(report_of_error(1, OwnError(5, "broken \udc80")))
    assert (type(found), found.errno, str(found)) == (StorageError, 5, "[Errno 5] rank 1: broken \udc80")
    assert "SilentError" in str(error_from_report(report_of_error(1, SilentError())))
    assert len(report_of_error(1, ValueError("x" * 10**7))) < 10**5
    assert json.loads(report_of_error(1, OSError(5, "foreign")))["errno"] is None


def fail(group: Group) -> None:
    with group.meet("save a.ckpt"):
        raise ValueError("wrong")


def test_rank_0_stays_until_the_others_have_heard() -> None:
    told, store = ToldTime(), PatientStore()
    host, other = Group.over(store, 0, 2, told.patience(1e9, 1e9)), groups(2, store)[1]

    def listen(group: Group) -> None:
        with group.meet("save a.ckpt") as meeting:
            assert rank_0_waits.wait(60)
            meeting.broadcast("never")

    def let_the_other_hear() -> None:
        if store.store.check(["1/error"]):
            rank_0_waits.set()
            heard.append(future.exception(60))

    rank_0_waits, heard = threading.Event(), []
    told.on_sleep = let_the_other_hear
    (future,) = start(listen, [other])
    with pytest.raises(ValueError, match="wrong"):
        fail(host)
    assert [str(error) for error in heard] == ["rank 0 raised ValueError: wrong"]


def test_rank_0_does_not_stay_for_ever() -> None:
    told, store = ToldTime(), PatientStore()
    stayed = []
    told.on_sleep = lambda: stayed.append(told.now) if store.store.check(["1/error"]) else None
    with Guest(groups(2, store)[1]), pytest.raises(ValueError, match="wrong"):
        fail(Group.over(store, 0, 2, told.patience(1e9, 1e9)))
    assert 0.9 < stayed[-1] - stayed[0] < 1.1


class LostStore(PatientStore):
    """A store whose process ends after a number of calls."""

    calls_left = 10**9

    def __getattr__(self, name: str) -> object:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise distributed.DistNetworkError("connection reset by peer")
        return super().__getattr__(name)


def test_a_store_that_is_lost_is_an_error_with_an_explanation() -> None:
    store = LostStore()
    store.calls_left = 20
    with pytest.raises(RankError, match=r"store of the process group.*rank 0.*connection reset by peer"):
        Group.over(store, 1, 2, ToldTime().patience(1e6, 1e6)).meet("talk").__enter__()


def test_a_store_that_is_lost_does_not_hide_what_went_wrong_before(caplog: pytest.LogCaptureFixture) -> None:
    store = LostStore()

    def talk(group: Group) -> None:
        with group.meet("save a.ckpt"):
            if group.rank == 0:
                store.calls_left = 0
                raise ValueError("wrong")

    first, _ = run(talk, groups(2, store))
    assert failed(first, ValueError, "wrong")
    assert "save a.ckpt: could not tell the other ranks of ValueError('wrong')" in caplog.text


# Who comes, and for what


def test_ranks_that_come_for_different_things_all_say_so() -> None:
    ranks = groups(4)
    subjects = {0: "save a.ckpt", 1: "save a.ckpt", 2: "save b.ckpt", 3: "load a.ckpt"}
    for result in run(lambda group: save(group, subjects[group.rank]), ranks):
        assert failed(result, RankError, "rank 0, 1: save a.ckpt; rank 2: save b.ckpt; rank 3: load a.ckpt"), result
    assert run(save, ranks) == saved(4)

    result, *_ = run(lambda group: save(group, f"save {group.rank}.ckpt"), groups(32))
    assert failed(result, RankError, "rank 0: save 0.ckpt")
    assert len(str(result)) < 300


def with_patience(group: Group, patience: Patience) -> Group:
    """The same group, whose next meetings have another patience."""
    seat, _ = group._place
    return Group(group.rank, group.world_size, (seat, patience))


def give_up_on_the_others(group: Group, subject: str = "save a.ckpt") -> RankTimeoutError:
    with pytest.raises(RankTimeoutError, match=f"{subject}: no sign of life of rank .* for 100 s") as caught:
        save(with_patience(group, ToldTime().patience()), subject)
    assert isinstance(caught.value, TimeoutError)
    return caught.value


@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize("attempts", [1, 3])
@pytest.mark.parametrize("next_first", [0, 1])
def test_who_gave_up_waiting_can_try_again(early: int, attempts: int, next_first: int) -> None:
    ranks = groups(2)
    for _ in range(attempts):
        give_up_on_the_others(ranks[early])
    # The other one has failed before it could come, and tries again as well.
    waits = threading.Event()
    patience = dataclasses.replace(FAST, sleep=lambda seconds: waits.set() or FAST.sleep(seconds))
    (first,) = start(save, [with_patience(ranks[next_first], patience)])
    assert waits.wait(60)
    assert run(save, [ranks[1 - next_first]]) == [saved(2)[1 - next_first]]
    assert first.result(60) == saved(2)[next_first]
    assert run(save, ranks) == saved(2)


def test_who_comes_too_late_hears_so_and_is_in_step_afterwards() -> None:
    ranks = groups(2)
    give_up_on_the_others(ranks[0])
    with pytest.raises(RankTimeoutError, match=r"rank 0: save a\.ckpt: no sign of life of rank 1"):
        save(with_patience(ranks[1], ToldTime().patience()))
    assert run(save, ranks) == saved(2)


def test_who_comes_too_late_does_not_take_the_next_thing_for_its_own() -> None:
    ranks = groups(2)
    give_up_on_the_others(ranks[0], "save a.ckpt")
    (first,) = start(lambda group: save(group, "save b.ckpt"), ranks[:1])
    (late,) = run(save, ranks[1:])
    assert failed(late, RankTimeoutError, "rank 0: save a.ckpt: no sign of life of rank 1")
    assert run(lambda group: save(group, "save b.ckpt"), ranks[1:]) == saved(2)[1:]
    assert first.result(60) == saved(2)[0]


class InjectedError(Exception):
    pass


@given(
    st.integers(2, 3),
    st.sets(st.tuples(st.integers(0, 2), st.integers(0, 5), st.sampled_from(["before", *STEPS]))),
)
@settings(max_examples=40)
def test_whoever_fails_whenever_retries_succeed(world_size: int, failures: set[tuple[int, int, str]]) -> None:
    def program(group: Group) -> list[object]:
        done, attempt = [], 0
        while len(done) < 3:
            subject = f"save {len(done)}.ckpt"
            try:
                here = {step for rank, at, step in failures if (rank, at) == (group.rank, attempt)}
                attempt += 1
                done.append(flaky_save(group, subject, here))
            except (InjectedError, SnapshotError):
                pass
        return done

    expected = [b"save %d.ckpt" % number for number in range(3)]
    assert run(program, groups(world_size)) == [expected] * world_size


def flaky_save(group: Group, subject: str, failing: set[str]) -> bytes:
    def maybe_fail(step: str) -> None:
        if step in failing:
            raise InjectedError(step)

    maybe_fail("before")
    with group.meet(subject) as meeting:
        maybe_fail("enter")
        specs = meeting.gather("specs", subject.encode())
        maybe_fail("specs")
        plan = meeting.scatter("plans", specs or ())
        maybe_fail("plans")
        meeting.check()
        maybe_fail("work")
        receipts = meeting.gather("receipts", plan)
        return meeting.broadcast("done", receipts[0] if receipts else b"")


def test_one_meeting_at_a_time() -> None:
    def talk(group: Group) -> None:
        refusal = pytest.raises(UnsupportedFeatureError, match=r"load b\.ckpt: save a\.ckpt still goes on")
        with group.meet("save a.ckpt"), refusal, group.meet("load b.ckpt"):
            pass

    ranks = groups(2)
    assert run(talk, ranks) == [None, None]
    assert run(save, ranks) == saved(2)


def test_a_group_does_not_travel_to_another_process() -> None:
    with pytest.raises(UnsupportedValueError, match=r"call Group\.of where it runs"):
        pickle.dumps(groups(2)[0])


# Nothing is left behind


def test_a_thousand_meetings_leave_as_little_as_one() -> None:
    store = PatientStore()
    ranks = groups(3, store)
    sizes = []
    for repeats in (1, 999):
        run(lambda group, repeats=repeats: [save(group) for _ in range(repeats)], ranks)
        sizes.append(store.store.num_keys())
    assert sizes == [3 + 1] * 2  # a pulse for each rank, and the last word


def test_failed_meetings_leave_nothing_either() -> None:
    store = PatientStore()
    ranks = groups(3, store)
    run(save, ranks)
    before = store.store.num_keys()
    for step in STEPS * 5:
        for failing in (0, 1):
            run(lambda group, at=(failing, step): save_that_fails(group, *at, ValueError("wrong")), ranks)
        give_up_on_the_others(ranks[0])
    run(save, ranks)
    assert store.store.num_keys() == before


# Who is late, and who is dead


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_late_ranks_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    told, store = ToldTime(), PatientStore()
    warned_at = []

    def look() -> None:
        if warnings_of(caplog) and not warned_at:
            warned_at.append(told.now)

    told.on_sleep = look
    told.stands_still = lambda: not store.store.check(["1/1-roll/2"])
    with Guest(groups(4, store)[2]) as guest:
        host = Group.over(store, 0, 4, told.patience())
        with pytest.raises(RankTimeoutError, match="no sign of life of rank 1, 3 for 100 s"), host.meet("save a.ckpt"):
            pass
        assert failed(guest.future.exception(30), RankTimeoutError, "rank 0: save a.ckpt: no sign of life of rank 1, 3")
    assert warnings_of(caplog) == [
        "waiting for rank 1, 3 in save a.ckpt for 30 s; is save called on all ranks, not under `if rank == 0`?"
    ]
    assert 30 <= warned_at[0] < 30.1
    assert 100 <= told.now < 102  # with the second that rank 0 stays


def test_a_late_rank_0_is_named_by_those_who_wait_for_it(caplog: pytest.LogCaptureFixture) -> None:
    give_up_on_the_others(groups(3)[2])
    assert [text.partition(" in ")[0] for text in warnings_of(caplog)] == ["waiting for rank 0"]


def test_nobody_is_late_who_has_come(caplog: pytest.LogCaptureFixture) -> None:
    told, store = ToldTime(), PatientStore()
    host = Group.over(store, 0, 2, told.patience())
    with Guest(groups(2, store)[1]) as guest:
        told.stands_still = lambda: not guest.arrived.is_set()
        with pytest.raises(RankTimeoutError, match="rank 1"), host.meet("save a.ckpt") as meeting:
            meeting.gather("never", b"")
    assert told.now > 100
    assert not warnings_of(caplog)


def test_many_silent_ranks_make_no_long_message() -> None:
    error = give_up_on_the_others(groups(1024)[0])
    assert "rank 1, 2, 3, 4, 5, 6, 7, 8 and 1015 more" in str(error)


def test_a_slow_rank_is_waited_for_as_long_as_it_lives() -> None:
    told, store = ToldTime(), PatientStore()
    host, slow = Group.over(store, 0, 2, told.patience()), Group.over(store, 1, 2, told.patience_of_others())
    with Guest(slow) as guest:
        told.stands_still = lambda: not guest.arrived.is_set()

        def live_for_1000_seconds() -> None:
            if guest.arrived.is_set() and told.now < 1000:
                told.now += 5
                guest.meeting.check()
            elif guest.arrived.is_set():
                guest.meeting.gather("receipts", b"receipt")

        told.on_sleep = live_for_1000_seconds
        with host.meet("save a.ckpt") as meeting:
            assert meeting.gather("receipts", b"") == [b"", b"receipt"]
    assert told.now >= 1000


def test_a_rank_that_dies_is_given_up_after_its_last_sign_of_life() -> None:
    told, store = ToldTime(), PatientStore()
    host, dying, other = (
        Group.over(store, rank, 3, told.patience_of_others() if rank else told.patience()) for rank in range(3)
    )
    with Guest(dying) as dead, Guest(other) as healthy:
        told.stands_still = lambda: not (dead.arrived.is_set() and healthy.arrived.is_set())

        def gather() -> None:
            with host.meet("save a.ckpt") as meeting:
                assert healthy.arrived.wait(60)
                healthy.meeting.gather("receipts", b"")
                told.on_sleep = lambda: dead.meeting.check() if told.now < 50 else None
                meeting.gather("receipts", b"")

        with pytest.raises(RankTimeoutError, match="no sign of life of rank 1 for 100 s"):
            gather()
    assert 148 < told.now < 178  # the last sign, the time-out, up to a quarter of it, and the second that rank 0 stays


def test_rank_0_shows_that_it_lives_while_it_waits_for_another() -> None:
    told, store = ToldTime(), PatientStore()
    ranks = [Group.over(store, rank, 3, told.patience_of_others()) for rank in range(3)]

    def talk(group: Group) -> bytes:
        with group.meet("save a.ckpt") as meeting:
            if group.rank == 2:
                for _ in range(30):
                    pulse = store.add("pulse/0", 0)
                    told.now += 10
                    meeting.check()
                    while store.add("pulse/0", 0) == pulse:
                        time.sleep(0.001)
            meeting.gather("receipts", b"")
            return meeting.broadcast("done", b"done")

    assert run(talk, ranks) == [b"done"] * 3
    assert told.now == 300
