"""What the ranks of one save or load say to each other."""

import json
import logging
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from lightning_snapshot.errors import RankError, UnsupportedFeatureError, error_from_report, report_of_error
from lightning_snapshot.group.mailbox import Mailbox
from lightning_snapshot.group.watch import Patience, Watch, listed

__all__ = ["Meeting", "Seat", "SharedMeeting"]

_CHECK_SECONDS = 0.25
_PULSE_SECONDS = 1.0
_LINGER_SECONDS = 1.0
_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.02
_LONGER_PER_RANK_SECONDS = 0.0001  # all ranks ask one server, which answers some 20,000 times in a second
_SUBJECTS_LISTED = 4

_logger = logging.getLogger("lightning_snapshot")


@dataclass(slots=True)
class Seat:
    """What a process keeps of a group from one meeting to the next.

    Attributes:
        mailbox: Its end of the store.
        pid: The process.
        last: Number of the last meeting that it joined.
    """

    mailbox: Mailbox
    pid: int = field(default_factory=os.getpid)
    last: int = 0
    _taken: threading.Lock = field(default_factory=threading.Lock)
    _subject: str = ""

    @contextmanager
    def taken(self, subject: str) -> Iterator[None]:
        """Keep the seat during a meeting.

        Args:
            subject: What the meeting is about.

        Raises:
            RankError: The seat is another process's.
            UnsupportedFeatureError: Another meeting is going on.
        """
        if self.pid != os.getpid():
            msg = (
                f"{subject}: this process was forked from the one that the process group belongs to; make a process "
                "group in this one"
            )
            raise RankError(msg)
        if not self._taken.acquire(blocking=False):
            msg = f"{subject}: {self._subject} still goes on in this process; wait for it first"
            raise UnsupportedFeatureError(msg)
        try:
            self._subject = subject
            yield
        finally:
            self._taken.release()


class Meeting:
    """One save or load; in this class, of one process that has nobody to talk to.

    All ranks make the same calls of `gather`, `scatter` and `broadcast` in the same order, each from one thread.
    """

    def gather(self, name: str, payload: bytes) -> list[bytes] | None:  # noqa: ARG002 - for those who talk
        """Give every rank's payload to rank 0.

        Args:
            name: What it is, for those who look into the store.
            payload: This rank's.

        Returns:
            On rank 0 all payloads, by rank, when all are there; on the others nothing, at once.

        Raises:
            RankTimeoutError: A rank shows no sign of life.
            SnapshotError: What another rank has raised.
        """
        return [payload]

    def scatter(self, name: str, payloads: Sequence[bytes] = ()) -> bytes:  # noqa: ARG002 - as above
        """Give every rank a payload of its own.

        Args:
            name: What it is.
            payloads: On rank 0, one for each rank; on the others it does not matter.

        Returns:
            That of this rank.

        Raises:
            RankTimeoutError: Rank 0 shows no sign of life.
            SnapshotError: What another rank has raised.
        """
        return payloads[0]

    def broadcast(self, name: str, payload: bytes = b"") -> bytes:  # noqa: ARG002 - as above
        """Give every rank the payload of rank 0; raises what `scatter` raises.

        Args:
            name: What it is.
            payload: On rank 0; on the others it does not matter.
        """
        return payload

    def check(self) -> None:
        """Raise what another rank has raised, and show the others that this one is alive.

        To be called now and then during long work, from any thread; most calls cost nothing.

        Raises:
            SnapshotError: Of the class that the other rank has raised, if it is one of this package.
            RankError: The other rank has raised something else.
        """


class SharedMeeting(Meeting):
    """A meeting of several ranks."""

    def __init__(self, rank: int, world_size: int, seat: Seat, patience: Patience, subject: str) -> None:
        self._rank = rank
        self._world_size = world_size
        self._seat = seat
        self._mail = seat.mailbox
        self._patience = patience
        self._subject = subject
        self._number = 0  # that of no meeting
        self._step = 0
        self._coming = True  # the ranks, to this meeting
        self._report: bytes | None = None
        self._next_check = self._next_pulse = -math.inf

    def gather(self, name: str, payload: bytes) -> list[bytes] | None:
        """Through one key for each rank."""
        step = self._next_step(name)
        if self._rank:
            self._mail.put(f"{step}/{self._rank}", payload)
            return None
        keys = {rank: f"{step}/{rank}" for rank in range(1, self._world_size)}
        self._await(keys)
        payloads = [payload, *self._mail.take(list(keys.values()))]
        self._mail.clean()
        return payloads

    def scatter(self, name: str, payloads: Sequence[bytes] = ()) -> bytes:
        """Through one key for each rank."""
        step = self._next_step(name)
        if self._rank:
            return self._hear(f"{step}/{self._rank}")
        for rank, payload in zip(range(self._world_size), payloads, strict=True):
            if rank:
                self._mail.put(f"{step}/{rank}", payload)
        return payloads[0]

    def broadcast(self, name: str, payload: bytes = b"") -> bytes:
        """Through one key for all."""
        step = self._next_step(name)
        if self._rank:
            return self._hear(step)
        self._mail.put(step, payload)
        return payload

    def check(self) -> None:
        """Asks the store a few times in a second at most."""
        now = self._patience.clock()
        if now >= self._next_pulse:
            self._next_pulse = now + min(_PULSE_SECONDS, self._patience.timeout_seconds / 10)
            self._mail.count(f"pulse/{self._rank}", 1)
        if self._report is None and now >= self._next_check:
            self._next_check = now + _CHECK_SECONDS
            if self._mail.has([f"{self._number}/error"]):
                self._report = self._mail.read(f"{self._number}/error")
        if self._report is not None:
            raise error_from_report(self._report)

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks what this one has raised, unless one of them was faster."""
        if self._number == 0:
            return  # the others have not seen this rank yet
        heard = f"{self._number}/heard"
        try:
            self._mail.put_first(f"{self._number}/error", report_of_error(self._rank, error))
            left = self._mail.count(heard, 1, keep=False)
            # The process of rank 0 may end because of the error, and the store with it.
            deadline = self._patience.clock() + _LINGER_SECONDS
            while self._rank == 0 and left < self._world_size and self._patience.clock() < deadline:
                self._patience.sleep(_LONGEST_PAUSE_SECONDS)
                left = self._mail.count(heard)
        except RankError as lost:
            # What went wrong first is what the caller has to see.
            _logger.warning("%s: could not tell the other ranks of %r: %s", self._subject, error, lost)

    def call_roll(self) -> None:
        """Come together: afterwards all ranks are in the same meeting, and know that they are.

        Rank 0 gets no further before all others have come. So a meeting that it has left without one of them has
        failed, and that one need not catch up on it.
        """
        seat, mail = self._seat, self._mail
        self._number = seat.last = self._find_meeting(seat.last + 1) if self._rank else seat.last + 1
        if self._rank == 0:
            mail.put(f"{self._number}/subject", self._encoded_subject)
        subjects = self.gather("roll", self._encoded_subject)
        self._coming = False
        by_subject: dict[str, list[int]] = {}
        for rank, subject in enumerate(subjects or ()):
            by_subject.setdefault(subject.decode(), []).append(rank)
        by_subject = json.loads(self.broadcast("go", json.dumps(by_subject).encode()))
        if len(by_subject) > 1:
            found = "; ".join(
                f"{listed(ranks)}: {subject}" for subject, ranks in list(by_subject.items())[:_SUBJECTS_LISTED]
            )
            msg = f"all ranks must make the same calls with the same paths, in the same order, but they do not: {found}"
            raise RankError(msg)

    def _find_meeting(self, first: int) -> int:
        """The meeting to join: the newest that rank 0 has opened for the same purpose, or else the newest.

        If that has failed without this rank, rank 0 gets some time to try again.
        """
        self._await({0: f"{first}/subject"})
        opened = [first]
        deadline = self._patience.clock() + self._patience.late_seconds
        while True:
            while self._mail.has([f"{opened[-1] + 1}/subject"]):
                opened.append(opened[-1] + 1)
            subjects = self._mail.take([f"{number}/subject" for number in opened])
            found = [
                number for number, subject in zip(opened, subjects, strict=True) if subject == self._encoded_subject
            ]
            number = (found or opened)[-1]
            may_try_again = number == opened[-1] and self._patience.clock() < deadline
            if not (may_try_again and self._mail.has([f"{number}/error"])):
                return number
            self.check()
            self._patience.sleep(_LONGEST_PAUSE_SECONDS)

    @property
    def _encoded_subject(self) -> bytes:
        return self._subject.encode(errors="backslashreplace")

    def _next_step(self, name: str) -> str:
        self._step += 1
        return f"{self._number}/{self._step}-{name}"

    def _hear(self, key: str) -> bytes:
        self._await({0: key})
        payload = self._mail.take([key])[0]
        self._mail.clean()
        return payload

    def _await(self, keys: Mapping[int, str]) -> None:
        """Wait until ranks have put something under the keys that belong to them."""
        watch = Watch(self._mail, self._patience, self._subject, keys, coming=self._coming)
        pause = _FIRST_PAUSE_SECONDS
        longest = _LONGEST_PAUSE_SECONDS + self._world_size * _LONGER_PER_RANK_SECONDS
        while not self._mail.has(keys.values()):
            self.check()
            watch.look()
            self._patience.sleep(pause)
            pause = min(1.5 * pause, longest)
