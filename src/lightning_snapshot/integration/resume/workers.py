"""Worker processes of data loaders have random numbers of their own.

They send them along with each batch, if they have changed, and get them back when they start.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info
from torch.utils.data._utils.worker import _IterableDatasetStopIteration
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_snapshot.integration.resume import rng
from lightning_snapshot.integration.resume.rng import Rng
from lightning_snapshot.stateful import Stateful

__all__ = ["Receiving", "Workers", "sending", "stateful_workers"]


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
    """Gives a worker the random numbers that it had, and its data set the state."""

    def __init__(self, start: Callable[[int], None] | None, workers: dict[int, Rng], data_sets: dict[int, Any]) -> None:
        self._start = start
        self._workers = dict(workers)
        self._data_sets = dict(data_sets)

    def __call__(self, worker: int) -> None:
        if self._start is not None:
            self._start(worker)
        info = get_worker_info()
        if worker in self._data_sets and info is not None and isinstance(info.dataset, Stateful):
            info.dataset.load_state_dict(self._data_sets[worker])
        if worker in self._workers:
            rng.restore(self._workers[worker])


@contextmanager
def sending(loader: Any) -> Iterator[None]:
    """Let the workers that are started meanwhile send and take their random numbers."""
    collate, start, its_pass = loader.collate_fn, loader.worker_init_fn, loader._pass  # noqa: SLF001  # our own
    loader.collate_fn = _Send(collate)
    loader.worker_init_fn = _Start(start, its_pass.workers, its_pass.data_sets)
    try:
        yield
    finally:
        loader.collate_fn, loader.worker_init_fn = collate, start


class Receiving:
    """What iterators over workers have in common: they take out again what workers add to batches.

    torch's and torchdata's iterators have nearly the same insides.
    """

    _finished: bool
    _loader: Callable[[], Any]
    # Those of torch:
    _get_data: Callable[[], Any]
    _task_info: dict[int, Any]
    _tasks_outstanding: int
    _workers_status: list[bool]

    def _next_data(self) -> Any:
        try:
            sent = super()._next_data()  # type: ignore[misc]  # of the class behind
            while isinstance(sent, _IterableDatasetStopIteration):  # only if read on after all
                sent = super()._next_data()  # type: ignore[misc]  # as above
        except StopIteration:
            self._finished = True
            raise
        self._note([sent])
        return sent.batch if isinstance(sent, _Sent) else sent

    def _note(self, answers: Iterable[Any]) -> None:
        loader = self._loader()
        for sent in answers:
            if loader is not None and isinstance(sent, _Sent) and sent.rng is not None:
                loader._pass.workers[sent.worker] = sent.rng  # noqa: SLF001  # our own

    def settle(self) -> None:
        """Wait for the batches that workers were asked for, and note the random numbers that they have then.

        To be called when nothing more is read from a pass: the next one leaves these batches out.
        """
        tasks = self._task_info
        while any(len(task) == 1 and self._workers_status[task[0]] for task in tasks.values()):
            index, answer = self._get_data()
            self._tasks_outstanding -= 1
            tasks[index] += (answer,)
            content = self._content(answer)
            if isinstance(content, _IterableDatasetStopIteration):
                self._workers_status[content.worker_id] = False
        self._note(self._content(task[1]) for _, task in sorted(tasks.items()) if len(task) > 1)

    def data_set_states(self) -> dict[int, Any]:
        """Worker → state of its data set, as far as these are told, after `settle`."""
        return {}

    def _content(self, answer: Any) -> Any:
        return answer


class Workers(Receiving, _MultiProcessingDataLoaderIter):
    """Those of a `DataLoader`. Begins with the worker whose turn it was."""

    def __init__(self, loader: Any) -> None:
        self._loader = weakref.ref(loader)
        loader.check_worker_number_rationality()
        super().__init__(loader)

    def _try_put_index(self) -> None:
        if self._send_idx == 0:
            for _ in range(self._loader()._pass.passed_over % self._num_workers):  # noqa: SLF001  # our own
                next(self._worker_queue_idx_cycle)
        super()._try_put_index()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:  # noqa: FBT001, FBT002  # as torch calls it
        if not first_iter:
            self.settle()
        self._finished = False
        super()._reset(loader, first_iter)


@lru_cache(maxsize=1)
def stateful_workers() -> Any:
    """The class for the workers of a `StatefulDataLoader`."""
    module: Any = import_module("torchdata.stateful_dataloader.stateful_dataloader")

    class StatefulWorkers(Receiving, module._StatefulMultiProcessingDataLoaderIter):  # type: ignore[misc]  # noqa: SLF001  # not known before
        """Notes random numbers when the loader notes its state: after a load, it reads from there."""

        def __init__(self, loader: Any) -> None:
            self._loader = weakref.ref(loader)
            self._since: dict[int, _Sent] = {}
            loader.check_worker_number_rationality()
            state, loader.next_iter_state = loader.next_iter_state, None
            super().__init__(loader, state)

        def _reset(self, loader: Any, first_iter: bool = False, **how: Any) -> None:  # noqa: FBT001, FBT002  # as torchdata calls it
            if not first_iter:
                self.settle()
            super()._reset(loader, first_iter, **how)

        def _note(self, answers: Iterable[Any]) -> None:
            sent = [answer for answer in answers if isinstance(answer, _Sent) and answer.rng is not None]
            self._since |= {each.worker: each._replace(batch=None) for each in sent}

        def _next_data(self) -> Any:
            batch = super()._next_data()
            if self._snapshot["_snapshot_step"] == self._num_yielded + 1:
                self._note_all()
            return batch

        def _note_all(self) -> None:
            super()._note(self._since.values())
            self._since.clear()

        def settle(self) -> None:
            super().settle()
            self._note_all()

        def data_set_states(self) -> dict[int, Any]:
            workers = copy.deepcopy(self._worker_snapshots)
            for _, (_, *answers) in sorted(self._task_info.items()):
                for _, worker, change in answers:
                    if change is not None:
                        workers[self._worker_key(worker)].apply_delta(change)
            states = {worker: workers[self._worker_key(worker)].get_state() for worker in range(self._num_workers)}
            return {worker: found for worker, state in states.items() if (found := _of_data_set(state)) is not None}

        def _content(self, answer: Any) -> Any:
            return answer[0]

    return StatefulWorkers


def _of_data_set(state: dict[str, Any]) -> Any:
    # The state of a data set that is its own iterator is that of the iterator.
    iterator = state["fetcher_state"] or {}
    return state["dataset_state"] if state["dataset_state"] is not None else iterator.get("dataset_iter_state")
