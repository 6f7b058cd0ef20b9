"""Worker processes of data loaders have random numbers of their own.

They send them along with each batch, if they have changed, and get them back when they start.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_snapshot.integration.resume import rng
from lightning_snapshot.integration.resume.rng import Rng

__all__ = ["Workers", "receiving", "sending"]


class _Sent(NamedTuple):  # pinning memory keeps named tuples what they are
    batch: Any
    worker: int
    rng: Rng | None


class _Send:
    """Collates, and adds the worker's random numbers if they have changed."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._last: Rng | None = None

    def __call__(self, samples: Any) -> _Sent:
        batch = self._collate(samples)
        now = rng.capture()
        changed = now if now != self._last else None
        self._last = now
        worker = get_worker_info()
        return _Sent(batch, 0 if worker is None else worker.id, changed)


class _Start:
    """Gives a worker the random numbers that it had."""

    def __init__(self, start: Callable[[int], None] | None, workers: dict[int, Rng]) -> None:
        self._start = start
        self._workers = dict(workers)

    def __call__(self, worker: int) -> None:
        if self._start is not None:
            self._start(worker)
        if worker in self._workers:
            rng.restore(self._workers[worker])


@contextmanager
def sending(loader: Any) -> Iterator[None]:
    """Let the workers that are started meanwhile send and take their random numbers."""
    collate, start = loader.collate_fn, loader.worker_init_fn
    loader.collate_fn, loader.worker_init_fn = _Send(collate), _Start(start, loader._pass.workers)  # noqa: SLF001  # our own
    try:
        yield
    finally:
        loader.collate_fn, loader.worker_init_fn = collate, start


def _unpacked(sent: Any, loader: Any) -> Any:
    if not isinstance(sent, _Sent):
        return sent
    if loader is not None and sent.rng is not None:
        loader._pass.workers[sent.worker] = sent.rng  # noqa: SLF001  # our own
    return sent.batch


def receiving(iterator: Any, loader: Any) -> Any:
    """Let an iterator take out again what its workers add to batches."""
    cls: Any = type(iterator)
    iterator.__class__ = _receiving(cls)
    iterator._loader = weakref.ref(loader)  # noqa: SLF001  # our own
    return iterator


@lru_cache(maxsize=64)
def _receiving(cls: Any) -> Any:
    def next_data(self: Any) -> Any:
        return _unpacked(cls._next_data(self), self._loader())  # torch calls it, too

    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "_next_data": next_data})


class Workers(_MultiProcessingDataLoaderIter):
    """Begins with the worker whose turn it was."""

    def __init__(self, loader: Any) -> None:
        self._loader: Any = weakref.ref(loader)
        loader.check_worker_number_rationality()
        super().__init__(loader)

    def _try_put_index(self) -> None:
        if self._send_idx == 0:
            for _ in range(self._loader()._pass.passed_over % self._num_workers):  # noqa: SLF001  # our own
                next(self._worker_queue_idx_cycle)
        super()._try_put_index()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:  # noqa: FBT001, FBT002  # as torch calls it
        self._finished = False
        self._discards = True
        super()._reset(loader, first_iter)
        self._discards = False

    def _get_data(self) -> Any:
        index, sent = super()._get_data()  # type: ignore[no-untyped-call]  # torch has no types here
        if self._discards:  # batches that were made for the last pass, for which workers have drawn numbers
            _unpacked(sent, self._loader())
        return index, sent

    def _next_data(self) -> Any:
        try:
            return _unpacked(super()._next_data(), self._loader())  # type: ignore[no-untyped-call]  # torch has no types here
        except StopIteration:
            self._finished = True
            raise
