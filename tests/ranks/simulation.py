"""Ranks as threads of the test, over a store in memory. Nobody really waits."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch import distributed

from lightning_snapshot.group import Group, Meeting, Patience

_SPEED = 100.0

FAST = Patience(
    late_seconds=60 * _SPEED,
    timeout_seconds=60 * _SPEED,
    clock=lambda: time.monotonic() * _SPEED,
    sleep=lambda seconds: time.sleep(seconds / _SPEED),
)
"""Time that passes a hundred times as fast as it does, except for what a loaded machine would hold up."""


class PatientStore:
    """A store that fails the test where a real one would wait for a key, and counts calls.

    Args:
        store: Holds the values.
    """

    def __init__(self, store: Any = None) -> None:
        self.store = distributed.HashStore() if store is None else store
        self.calls: list[str] = []

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.calls.append("multi_get")
        for key in keys:
            assert self.store.check([key]), f"waits for {key}"
        return self.store.multi_get(keys)

    def __getattr__(self, name: str) -> Any:
        assert name in {"add", "check", "compare_set", "delete_key", "set"}, name
        self.calls.append(name)
        return getattr(self.store, name)


@dataclass
class ToldTime:
    """Time that passes only where a rank sleeps.

    Attributes:
        now: Seconds.
        on_sleep: Called after each sleep.
        stands_still: Whether a sleep takes no time now, because other threads have to come first.
    """

    now: float = 0.0
    on_sleep: Callable[[], None] = lambda: None
    stands_still: Callable[[], bool] = lambda: False

    def patience(self, late_seconds: float = 30.0, timeout_seconds: float = 100.0) -> Patience:
        """For the rank whose sleeps make time pass."""
        return Patience(late_seconds, timeout_seconds, clock=lambda: self.now, sleep=self._sleep)

    def patience_of_others(self, late_seconds: float = 30.0, timeout_seconds: float = 100.0) -> Patience:
        """For ranks in other threads."""
        return Patience(late_seconds, timeout_seconds, clock=lambda: self.now, sleep=lambda _: time.sleep(0.001))

    def _sleep(self, seconds: float) -> None:
        if self.stands_still():
            time.sleep(0.001)
        else:
            self.now += seconds
            self.on_sleep()


class Guest:
    """A rank that comes to ``save a.ckpt``, and then keeps silent for the length of the ``with`` block.

    Args:
        group: As it sees it.
        error: What it raises in the end.
    """

    def __init__(self, group: Group, error: Exception | None = None) -> None:
        self._group = group
        self._error = error
        self._may_leave = threading.Event()
        self.arrived = threading.Event()
        self.meeting: Meeting | None = None
        self.future: Future[None] | None = None

    def __enter__(self) -> "Guest":  # noqa: PYI034 - typing.Self needs Python 3.11
        (self.future,) = start(self._take_part, [self._group])
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Send it away, and wait until it is gone."""
        self._may_leave.set()
        self.future.exception(60)

    def _take_part(self, group: Group) -> None:
        with group.meet("save a.ckpt") as self.meeting:
            self.arrived.set()
            assert self._may_leave.wait(60)
            if self._error is not None:
                raise self._error


def groups(world_size: int, store: Any = None, patience: Patience = FAST) -> list[Group]:
    """The same group, as each of its ranks sees it."""
    store = store or PatientStore()
    return [Group.over(store, rank, world_size, patience) for rank in range(world_size)]


def start(function: Callable[[Group], Any], ranks: Sequence[Group]) -> list["Future[Any]"]:
    """Call a function on each rank."""
    with_threads = ThreadPoolExecutor(len(ranks))
    try:
        return [with_threads.submit(function, group) for group in ranks]
    finally:
        with_threads.shutdown(wait=False)


def run(function: Callable[[Group], Any], ranks: Sequence[Group]) -> list[Any]:
    """What a function returns or raises on each rank."""
    return [future.exception(60) or future.result() for future in start(function, ranks)]
