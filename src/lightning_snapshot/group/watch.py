"""How long ranks wait for each other, and who is to blame."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lightning_snapshot.errors import RankTimeoutError
from lightning_snapshot.group.mailbox import Mailbox

__all__ = ["Patience", "Watch", "listed"]

_LOOKS_PER_TIMEOUT = 4
_LISTED = 8

_logger = logging.getLogger("lightning_snapshot")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long ranks wait for each other.

    Attributes:
        late_seconds: After this, a rank that has not come is named in a warning. As long, a rank that comes too late
            waits for another try.
        timeout_seconds: After this without a sign of life of a rank, waiting for it is an error.
        clock: Seconds that only go up.
        sleep: Waits for some seconds.
    """

    late_seconds: float
    timeout_seconds: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Watch:
    """Notices ranks that do not come, and ranks that show no sign of life.

    Args:
        mail: The store.
        patience: How long that may take.
        subject: What it is about.
        keys: Rank → key that it will put.
        coming: Whether these ranks have yet to come.
    """

    def __init__(
        self, mail: Mailbox, patience: Patience, subject: str, keys: Mapping[int, str], *, coming: bool
    ) -> None:
        self._mail = mail
        self._patience = patience
        self._subject = subject
        self._keys = keys
        self._started = patience.clock()
        self._warn_at = self._started + patience.late_seconds if coming else math.inf
        self._look_at = self._started + patience.timeout_seconds / _LOOKS_PER_TIMEOUT
        self._pulses: dict[int, tuple[int, float]] = {}

    def look(self) -> None:
        """Warn once of ranks that are late, and raise if ranks have been silent for too long."""
        now = self._patience.clock()
        if now >= self._warn_at:
            self._warn_at = math.inf
            self._warn(now)
        if now >= self._look_at:
            self._look_at = now + self._patience.timeout_seconds / _LOOKS_PER_TIMEOUT
            self._look_for_silent(now)

    def _missing(self) -> list[int]:
        return [rank for rank, key in self._keys.items() if not self._mail.has([key])]

    def _warn(self, now: float) -> None:
        if missing := self._missing():
            _logger.warning(
                "waiting for %s in %s for %.0f s; is %s called on all ranks, not under `if rank == 0`?",
                listed(missing),
                self._subject,
                now - self._started,
                self._subject.partition(" ")[0],
            )

    def _look_for_silent(self, now: float) -> None:
        silent = []
        for rank in self._missing():
            pulse = self._mail.count(f"pulse/{rank}")
            known, since = self._pulses.setdefault(rank, (pulse, self._started))
            if pulse != known:
                self._pulses[rank] = pulse, now
            elif now - since >= self._patience.timeout_seconds:
                silent.append(rank)
        if silent:
            msg = (
                f"{self._subject}: no sign of life of {listed(silent)} for {self._patience.timeout_seconds:g} s; "
                f"see whether the process has ended or hangs, and whether it gets to the same call"
            )
            raise RankTimeoutError(msg)


def listed(ranks: Sequence[int]) -> str:
    """Ranks as text, the first few of them."""
    more = f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else ""
    return f"rank {', '.join(map(str, ranks[:_LISTED]))}{more}"
