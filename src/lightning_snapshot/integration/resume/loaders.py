"""Where the training loaders of a Trainer are, all of them together.

Lightning reads a batch ahead where it does not know how many there are, so what is stored is what was true before that
batch was read.
"""

import copy
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_snapshot.errors import TargetMismatchError
from lightning_snapshot.integration.resume import rng
from lightning_snapshot.integration.resume.passes import (
    begin_quietly,
    go_on,
    go_on_with,
    has_indices,
    keep_workers,
    pass_of,
    settle,
)
from lightning_snapshot.integration.resume.rng import Rng, generators_of
from lightning_snapshot.integration.resume.shares import batches_of, distributed_sampler, share_after, share_of
from lightning_snapshot.stateful import Stateful

__all__ = ["TrainingLoaders", "seeds_of", "set_epoch"]

_logger = logging.getLogger("lightning_snapshot")


class TrainingLoaders:
    """The loaders of ``fit``.

    Args:
        fit_loop: The Trainer's.
    """

    def __init__(self, fit_loop: Any) -> None:
        self._fit_loop = fit_loop
        # Before Lightning begins the first passes, its fetcher is not there yet.
        self.before: Rng | None = None
        # Seed of this process → that of the one that has saved.
        self._seeds: dict[int, int] = {}

    @property
    def _all(self) -> list[Any]:
        combined = self._fit_loop._combined_loader  # noqa: SLF001  # Lightning has no public way
        return [] if combined is None else list(combined.flattened)

    def note_reads(self) -> None:
        """Begin to note, before Lightning reads ahead, where the loaders are. Harmless if that is done already."""
        fetcher = self._fit_loop._data_fetcher  # noqa: SLF001  # as above
        if fetcher is not None and not hasattr(fetcher, "_before"):
            cls: Any = type(fetcher)
            fetcher.__class__ = _noting(cls)
            fetcher._note = self._now  # noqa: SLF001  # our own
            fetcher._before_read = None  # noqa: SLF001  # our own
            fetcher._before = self.before  # noqa: SLF001  # our own

    def set_seed(self, loader: object) -> None:
        """Let a loader that is made later have the seed that it would have had in the process that has saved."""
        sampler = distributed_sampler(loader)
        if sampler is not None:
            sampler.seed = self._seeds.get(sampler.seed, sampler.seed)

    def take_seed(self, loader: object, seed: int | None) -> None:
        """Let a loader, and those that are made later with the same seed, have the one that it had at the save.

        Lightning gives the samplers that it makes the seed of the process.
        """
        sampler = distributed_sampler(loader)
        if sampler is not None and seed not in (None, sampler.seed):
            self._seeds[sampler.seed] = seed
            sampler.seed = seed

    def state(self, *, back: int, is_end: bool) -> dict[str, Any]:
        """Where the loaders are, without batches that Lightning has read ahead.

        Args:
            back: How many batches more to leave out.
            is_end: Whether no more batch of this epoch is trained on.
        """
        fetcher = self._fit_loop._data_fetcher  # noqa: SLF001  # as above
        if is_end:
            # What was read ahead will not be read again.
            data_sets = [settle(loader) for loader in self._all]
            # Lightning reads loaders with a length no further than that, and so not to their end.
            stops_before = fetcher is None or fetcher.length is not None or bool(getattr(fetcher, "batches", None))
            has_ended = not stops_before and fetcher.done
            return {**self._now(back), "data_sets": data_sets, "has_ended": has_ended}
        if getattr(fetcher, "batches", None) and getattr(fetcher, "_before_read", None) is not None:
            found: dict[str, Any] = fetcher._before_read  # noqa: SLF001  # our own
            return found
        return self._now(back)

    def _now(self, back: int = 0) -> dict[str, Any]:
        combined = self._fit_loop._combined_loader  # noqa: SLF001  # as above
        modes = getattr(combined, "_iterator", None)
        loaders = self._all
        return {
            # Of other loaders, it is known how many batches all of them together have given.
            "read": self._fit_loop.epoch_loop.batch_progress.current.ready - back,
            "rng": rng.capture(cuda=True),
            "before": getattr(self._fit_loop._data_fetcher, "_before", None),  # noqa: SLF001  # as above
            "passes": [self._pass_state(loader, back) for loader in loaders],
            "seeds": seeds_of(loaders),
            "generators": [rng.capture(generators_of(loader))["generators"] for loader in loaders],
            "states": [copy.deepcopy(each.state_dict()) for each in loaders if isinstance(each, Stateful)],
            "consumed": list(getattr(modes, "_consumed", [])),
        }

    def _pass_state(self, loader: Any, back: int) -> dict[str, Any] | None:
        now = pass_of(loader)
        if now is None:
            return None
        whole = share_of(loader, self._fit_loop.trainer.world_size) if has_indices(loader) else None
        return {**now.state(back), "whole": whole}

    def end_epoch(self) -> None:
        """Called when an epoch has ended."""
        for loader in self._all:
            _forget_place(loader)

    def unpositioned(self) -> Iterator[str]:
        """Names of loaders that cannot be brought back to where they were."""
        return (f"{type(each).__name__} over {type(each.dataset).__name__}" for each in self._all if _is_at_sea(each))

    def unsettled(self, state: dict[str, Any]) -> Iterator[str]:
        """Names of loaders with data sets in workers that live on, which do not tell their last states."""
        for loader, data_sets in zip(self._all, state["data_sets"], strict=True):
            if data_sets and loader.snapshot_every_n_steps != 1:
                yield type(loader).__name__

    def deal_anew(self, state: dict[str, Any], rank: int, world_size: int) -> bool:
        """Let the loaders read the rest of an epoch that was begun with another number of ranks.

        Returns:
            Whether the rest is known; if not, the epoch begins again.
        """
        shares = []
        for loader, its_pass, _ in self._with(state):
            share = None if its_pass is None else its_pass["share"] or its_pass["whole"]
            if share is None or not has_indices(loader) or share_of(loader, world_size) is None:
                return False
            shares.append((loader, share_after(share, its_pass["batches"], its_pass["first"], rank, world_size)))
        for loader, share in shares:
            go_on_with(loader, share)
        iter(self._fit_loop._data_fetcher)  # noqa: SLF001  # as above
        left = max(len(batches_of(share)) for _, share in shares)
        done = self._fit_loop.epoch_loop.batch_progress.current
        done.load_state_dict(dict.fromkeys(done.state_dict(), max(0, self._fit_loop.max_batches - left)))
        return True

    def begin_anew(self, state: dict[str, Any], *, ends_epoch: bool = False) -> None:
        """Prepare the passes of a new epoch, which Lightning will begin.

        Args:
            state: As it was when all batches of the last epoch had been read.
            ends_epoch: Let Lightning find no batch until then.
        """
        states = self._states(state)
        data_sets = iter(state.get("data_sets", [{}] * len(self._all)))
        for loader, its_pass, generators in self._with(state):
            of_workers = next(data_sets)
            if isinstance(loader, Stateful):
                _load_at_end(loader, next(states), has_ended=state.get("has_ended", True))
            if its_pass is not None and isinstance(loader, DataLoader):
                keep_workers(loader, its_pass, of_workers)
            _set_generators(loader, generators)
        if ends_epoch:
            fetcher = self._fit_loop._data_fetcher  # noqa: SLF001  # as above
            fetcher.batches = []
            fetcher.done = True

    def go_on(self, state: dict[str, Any], epoch: int) -> None:
        """Begin the passes again, up to where they were.

        Args:
            state: As it was then.
            epoch: What samplers are told.
        """
        states = self._states(state)
        for loader, its_pass, _ in self._with(state):
            set_epoch(loader, epoch)
            counted = its_pass
            if isinstance(loader, Stateful):
                loader.load_state_dict(next(states))
                counted = its_pass and {**its_pass, "batches": 0, "digest": 0}  # it counts them itself
            if counted is not None:
                go_on(loader, counted)
            elif isinstance(loader, DataLoader) and isinstance(loader, Stateful):
                begin_quietly(loader)
        fetcher = self._fit_loop._data_fetcher  # noqa: SLF001  # as above
        combined = self._fit_loop._combined_loader  # noqa: SLF001  # as above
        combined.reset()
        # What is read ahead must come after the rest.
        ahead = getattr(fetcher, "prefetch_batches", 0)
        fetcher.prefetch_batches = 0
        if state["before"] is not None:
            rng.restore(state["before"])
        iter(fetcher)
        fetcher._before = state["before"]  # noqa: SLF001  # our own
        for loader, _, generators in self._with(state):
            _set_generators(loader, generators)
        fetcher.prefetch_batches = ahead
        if state["consumed"]:
            combined._iterator._consumed = list(state["consumed"])  # noqa: SLF001  # as above
        self._read_over(combined._iterator, state)  # noqa: SLF001  # as above
        rng.restore(state["rng"])
        if hasattr(fetcher, "batches") and fetcher.length is None:
            _read_ahead(fetcher, ahead)

    def _states(self, state: dict[str, Any]) -> Iterator[Any]:
        """Of the loaders that have one."""
        states, expected = state["states"], sum(isinstance(each, Stateful) for each in self._all)
        if len(states) < expected:
            msg = (
                f"expected states for {expected} training data loaders, found {len(states)}: they were of another kind "
                "when the snapshot was saved; SnapshotCallback(loader_state=False) resumes without their positions"
            )
            raise TargetMismatchError(msg)
        return iter(states)

    def _with(self, state: dict[str, Any]) -> Iterator[tuple[Any, Any, list[Any]]]:
        loaders = self._all
        if len(loaders) != len(state["passes"]):
            msg = f"expected {len(state['passes'])} training data loaders, as when the snapshot was saved, found "
            raise TargetMismatchError(msg + str(len(loaders)))
        for loader, seed in zip(loaders, state["seeds"], strict=True):
            self.take_seed(loader, seed)
        return zip(loaders, state["passes"], state["generators"], strict=True)

    def _read_over(self, modes: Any, state: dict[str, Any]) -> None:
        """Skip by reading where there is no other way."""
        for number, loader in enumerate(self._all):
            if isinstance(loader, Stateful) or has_indices(loader) or _is_at_sea(loader):
                continue
            name = type(loader).__name__
            if self._fit_loop.trainer.is_global_zero:
                _logger.warning("%s is read up to batch %d, where it was", name, state["read"])
            for _ in _with_bar(range(state["read"]), f"Reading {name} up to where it was", self._fit_loop.trainer):
                if next(modes.iterators[number], modes) is modes and state["consumed"]:
                    modes.iterators[number] = iter(loader)
                    next(modes.iterators[number])


def _with_bar(batches: range, text: str, trainer: Any) -> Iterable[int]:
    """Show how far it is, on rank 0, if the Trainer shows such things."""
    its_bar = trainer.progress_bar_callback
    is_shown = trainer.is_global_zero and its_bar is not None and getattr(its_bar, "is_enabled", True)
    how = {"desc": text, "unit": "batch", "file": sys.stdout, "leave": False, "disable": not is_shown}
    bar: Iterable[int] = import_module("tqdm").tqdm(batches, **how)  # Lightning needs it, too
    return bar


def _is_at_sea(loader: object) -> bool:
    """Whether nothing but reading all of it again could tell where a loader was."""
    iterates = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    return iterates and not isinstance(loader, Stateful)


def seeds_of(loaders: Iterable[object]) -> list[int | None]:
    """Of their samplers for several ranks."""
    return [None if (sampler := distributed_sampler(each)) is None else sampler.seed for each in loaders]


def set_epoch(loader: object, epoch: int) -> None:
    """Tell the samplers of a loader the epoch, as Lightning does at its beginning."""
    samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    for sampler in {id(each): each for each in samplers}.values():
        tell = getattr(sampler, "set_epoch", None)
        if callable(tell):
            tell(epoch)


def _forget_place(loader: Any) -> None:
    """Let the next pass over a loader of LitData begin with its first batch, as that over any other one does.

    After a load, LitData begins all passes where that load has put it, until one is read to its very end. Lightning
    counts batches, and does not read that far.
    """
    if any(cls.__module__.partition(".")[0] == "litdata" for cls in type(loader).__mro__):
        loader.restore = False


def _load_at_end(loader: Any, state: dict[str, Any], *, has_ended: bool) -> None:
    """Give a loader with a state what it had when an epoch ended, with the end of its pass or before that."""
    if not isinstance(loader, DataLoader) or ("_iterator_finished" not in state and "_snapshot" not in state):
        loader.load_state_dict(state)
        _forget_place(loader)
        if not has_ended:
            iter(loader)  # it would go on with this pass where the next one begins
    elif state.get("dataset_state") is not None and isinstance(loader.dataset, Stateful):
        # A StatefulDataLoader that was given this as a whole would find nothing left to read.
        loader.dataset.load_state_dict(state["dataset_state"])


def _set_generators(loader: object, states: list[Any]) -> None:
    now = rng.capture()
    rng.restore({**now, "generators": states}, generators_of(loader))


def _read_ahead(fetcher: Any, count: int) -> None:
    cls: Any = type(fetcher)
    read = super(cls.__mro__[1], fetcher).__next__
    with suppress(StopIteration):
        for _ in range(count):
            fetcher.batches.append(read())


@lru_cache(maxsize=8)
def _noting(cls: Any) -> Any:
    def read(self: Any) -> Any:
        # If a batch was read ahead, another one is read now, before that one is trained on.
        self._before_read = self._note() if getattr(self, "batches", None) else None
        return cls.__next__(self)

    def begin(self: Any) -> Any:
        self._before = rng.capture()
        return cls.__iter__(self)

    names = {"__module__": cls.__module__, "__iter__": begin, "__next__": read, "_before_read": None, "_before": None}
    return type(cls.__name__, (cls,), names)
