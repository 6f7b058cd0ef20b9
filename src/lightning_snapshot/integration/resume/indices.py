"""One pass over a data loader: what is noted of it, and the indices that it reads."""

import logging
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning_snapshot.integration.resume import rng
from lightning_snapshot.integration.resume.rng import Rng, generators_of
from lightning_snapshot.integration.resume.shares import Share, batches_of
from lightning_snapshot.stateful import Stateful

__all__ = ["Indices", "Pass"]

_logger = logging.getLogger("lightning_snapshot")


@dataclass(slots=True)
class Pass:
    """One pass over a data loader.

    Attributes:
        before: Random numbers before it began.
        sampling: Random numbers before its sampler began.
        first: Random numbers before its first index was drawn, which may be later.
        is_eager: Whether the sampler draws its random numbers when it begins, not at its first index.
        passed_over: Batches at the beginning that were not read in this process.
        digest: Of the indices of these; to see whether the sampler gives them again.
        after: Random numbers to go on with when these are passed over.
        share: What is read in place of what the sampler gives, if the number of ranks has changed in the epoch.
        workers: Worker → its random numbers after the last batch that came from it; of a loader with a state, the last
            one that is in its state.
        data_sets: Worker → state that its data set is to begin with.
        is_again: Whether it goes on where one in an earlier process was.
        repeats_sampling: Whether the sampler is to begin with ``sampling``.
        indices: What its indices come from, if it has any.
        iterator: What its batches come from.
        drawn: How many indices were drawn, with those of batches that workers prepare.
        digests: Digests of all indices up to the last ones that were drawn.
    """

    before: Rng
    sampling: Rng | None = None
    first: Rng | None = None
    is_eager: bool = False
    passed_over: int = 0
    digest: int = 0
    after: Rng | None = None
    share: Share | None = None
    workers: dict[int, Rng] = field(default_factory=dict)
    data_sets: dict[int, Any] = field(default_factory=dict)
    is_again: bool = False
    repeats_sampling: bool = False
    indices: "_IndexIterator | None" = None
    iterator: Callable[[], Any] = lambda: None
    drawn: int = 0
    digests: deque[int] = field(default_factory=deque)

    @property
    def is_over(self) -> bool:
        """Whether nobody reads from it any more."""
        # Persistent workers, and loaders with a state, keep an iterator that has come to its end.
        iterator = self.iterator()
        return iterator is None or getattr(iterator, "_finished", False)

    @property
    def batches(self) -> int:
        """How many batches it has given, or passed over."""
        iterator = self.iterator()
        return self.passed_over + (0 if iterator is None else iterator._num_yielded)  # noqa: SLF001  # no public counter

    def state(self, back: int = 0) -> dict[str, Any]:
        """What `go_on` needs, as plain data.

        Args:
            back: How many batches to leave out at its end.
        """
        batches = max(self.batches - back, 0)
        place = batches - self.drawn - 1
        return {
            "before": self.before,
            "sampling": self.sampling,
            "first": self.first,
            "is_eager": self.is_eager,
            "batches": batches,
            "digest": self.digests[place] if batches and -len(self.digests) <= place < 0 else 0,
            "share": self.share,
            "workers": {str(worker): state for worker, state in self.workers.items()},
        }


class Indices:
    """A sampler or batch sampler that notes what it gives."""

    def __init__(self, sampler: Any, loader: Any) -> None:
        self._sampler = sampler
        self._loader = loader

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> "_IndexIterator | _StatefulIndexIterator":
        now: Pass = self._loader._pass  # noqa: SLF001  # set by the class above
        now.indices = _IndexIterator(self._sampler, self._loader, now)
        return now.indices if now.indices.state is None else _StatefulIndexIterator(now.indices)


class _IndexIterator:
    def __init__(self, sampler: Any, loader: Any, now: Pass) -> None:
        self._generators = generators_of(loader)
        if not now.repeats_sampling:
            now.sampling = rng.capture(self._generators)
        # Samplers draw their random numbers here or at the first index: a generator does not begin before.
        self._sampler = sampler if now.share is None else batches_of(now.share)
        self._indices = iter(self._sampler)
        if not now.repeats_sampling:
            now.is_eager = rng.capture(self._generators) != now.sampling
        self._loader_name = type(loader).__name__
        self._pass = now
        self._is_started = False
        now.drawn = 0
        # As many as workers may be ahead, and some more.
        now.digests = deque(maxlen=(loader.prefetch_factor or 0) * loader.num_workers + 3)

    def __iter__(self) -> "_IndexIterator":
        return self

    @property
    def state(self) -> Stateful | None:
        """The iterator of the sampler if it has a state of its own, as those of torchdata have."""
        return self._indices if isinstance(self._indices, Stateful) else None

    def load_state(self, state: Any) -> None:
        """Give the iterator of the sampler its state; it may pass over indices to get there."""
        self._is_started = True
        # It begins the sampler once more.
        before = self._pass.sampling if self._pass.is_eager else self._pass.first
        if before is not None:
            rng.restore(before, self._generators)
        if self.state is not None:
            self.state.load_state_dict(state)

    def __next__(self) -> Any:
        self.start()
        index = next(self._indices)
        self._note(index)
        return index

    def start(self) -> None:
        """Do what comes before the first index that is read."""
        if self._is_started:
            return
        self._is_started = True
        if self._pass.repeats_sampling and self._pass.sampling is not None:
            # Not before: a loader with workers lets its sampler begin twice, with a seed for the workers in between.
            rng.restore(self._pass.sampling, self._generators)
            self._indices = iter(self._sampler)
        if self._pass.is_again:
            self._pass_over()
        else:
            self._pass.first = rng.capture(self._generators)

    def _pass_over(self) -> None:
        now = self._pass
        if now.first is not None:
            rng.restore(now.first, self._generators)
        for _, index in zip(range(now.passed_over), self._indices, strict=False):
            self._note(index)
        if (now.digests[-1] if now.digests else 0) == now.digest:
            return
        _logger.warning(
            "the sampler of %s does not give the order again that it gave before the checkpoint, so reading goes on "
            "where the sampler begins by itself. A sampler has to take its order from torch's, numpy's or Python's "
            "random numbers, from a torch.Generator in its attribute `generator`, or from set_epoch; with others, use "
            "a StatefulDataLoader of torchdata, or SnapshotCallback(loader_state=False)",
            self._loader_name,
        )
        now.passed_over = now.drawn = 0
        now.digests.clear()
        self._indices = iter(self._sampler)

    def _note(self, index: Any) -> None:
        now = self._pass
        now.drawn += 1
        now.digests.append(zlib.crc32(repr(index).encode(), now.digests[-1] if now.digests else 0))


class _StatefulIndexIterator:
    """What a StatefulDataLoader asks for its state."""

    def __init__(self, indices: _IndexIterator) -> None:
        self._indices = indices

    def __iter__(self) -> "_StatefulIndexIterator":
        return self

    def __next__(self) -> Any:
        return next(self._indices)

    def state_dict(self) -> Any:
        state = self._indices.state
        return None if state is None else state.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._indices.load_state(state)
