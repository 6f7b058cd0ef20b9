"""How the ranks of one save or load talk: through the store of their process group, without any collective.

Rank 0 is the host. It opens meetings and numbers them; the others find the meeting that is theirs. All keys of a
meeting begin with its number, so nothing that is left of one can reach another.

======================  =========================  ===============================================================
key                     written by                 content
======================  =========================  ===============================================================
``pulse/<rank>``        that rank                  counts up while it works or waits
``<n>/subject``         rank 0                     what meeting n is about; it is open
``<n>/<step>/<rank>``   that rank, or rank 0       a value from (`gather`) or for (`scatter`) that rank
``<n>/<step>``          rank 0                     a value for all (`broadcast`)
``<n>/error``           the first rank that fails  its exception
``<n>/heard``           all ranks, after an error  how many have left the meeting with an exception
======================  =========================  ===============================================================

Whoever hears from a rank knows that it has read all that was said to it before, and deletes what it said.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import distributed

from lightning_snapshot.errors import RankError, UnsupportedValueError
from lightning_snapshot.group.mailbox import Mailbox, Store, store_of
from lightning_snapshot.group.meeting import Meeting, Seat, SharedMeeting
from lightning_snapshot.group.watch import Patience

__all__ = ["Group", "Meeting", "Patience"]

_seats: "WeakKeyDictionary[distributed.ProcessGroup, dict[str, Seat]]" = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Group:
    """Which ranks act together.

    Attributes:
        rank: This process, within the group.
        world_size: Number of ranks.
    """

    rank: int
    world_size: int
    _place: tuple[Seat, Patience] | None = field(default=None, repr=False)

    @classmethod
    def alone(cls) -> "Group":
        """A group of this process only, which talks to nobody."""
        return cls(0, 1)

    @classmethod
    def of(
        cls,
        pg: "distributed.ProcessGroup | None" = None,
        *,
        late_seconds: float = 30.0,
        timeout_seconds: float = 1800.0,
        channel: str = "",
    ) -> "Group":
        """The ranks of a process group. Any rank may call this at any time: nobody waits for anybody.

        Args:
            pg: By default all ranks, or this process alone if there is no process group.
            late_seconds: After this, a rank that has not come is named in a warning.
            timeout_seconds: After this without a sign of life of a rank, waiting for it is an error. The time-out of
                the process group does not matter.
            channel: Meetings over different channels can go on at the same time.

        Raises:
            RankError: This process is not in the process group.
        """
        if pg is None and distributed.is_available():
            pg = distributed.group.WORLD
        if pg is None:
            return cls.alone()
        rank, world_size = distributed.get_rank(pg), distributed.get_world_size(pg)
        if rank < 0:
            msg = (
                f"rank {distributed.get_rank()} is not in the process group that was passed; only the ranks of the "
                "group may save or load with it"
            )
            raise RankError(msg)
        if world_size == 1:
            return cls.alone()
        seats = _seats.setdefault(pg, {})
        seat = seats.get(channel) or seats.setdefault(channel, Seat(Mailbox(store_of(pg, channel))))
        return cls(rank, world_size, (seat, Patience(late_seconds, timeout_seconds)))

    @classmethod
    def over(cls, store: Store, rank: int, world_size: int, patience: Patience) -> "Group":
        """Ranks that share a store, with or without a process group. Each rank needs one group only.

        Args:
            store: Nobody else uses its keys.
            rank: This rank.
            world_size: Number of ranks.
            patience: How long ranks wait for each other.
        """
        return cls(rank, world_size, (Seat(Mailbox(store)), patience))

    @contextmanager
    def meet(self, subject: str) -> Iterator[Meeting]:
        """One save or load, in which all ranks take part.

        Entering waits for all ranks. An exception that leaves the ``with`` block on one rank is raised on those that
        are still in theirs: whatever waits there for other ranks raises, and so does `Meeting.check`. Leaving without
        an exception waits for nobody, so a rank that has to know how the meeting ended waits for a last word of rank 0.
        Afterwards the next meeting can begin, no matter how this one ended.

        Args:
            subject: What is done, with the path: ``save epoch=3.ckpt``. The same on all ranks.

        Raises:
            RankError: The ranks have come for different things. All of them raise this.
            RankTimeoutError: A rank has not come.
            UnsupportedFeatureError: Another meeting of this group is going on in this process.
        """
        if self._place is None:
            yield Meeting()
            return
        seat, patience = self._place
        with seat.taken(subject):
            meeting = SharedMeeting(self.rank, self.world_size, seat, patience, subject)
            try:
                meeting.call_roll()
                yield meeting
            except BaseException as error:
                meeting.tell(error)
                raise

    def __reduce__(self) -> tuple[Any, ...]:
        if self._place is not None:
            msg = "a Group belongs to the process that made it; pickle something else and call Group.of where it runs"
            raise UnsupportedValueError(msg)
        return Group.alone, ()
