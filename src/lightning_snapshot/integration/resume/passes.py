"""Passes over torch data loaders: where they are, and how to get there again.

A loader is followed by putting a class of its own in front of its class, so that it stays the object that it is. That
class notes the random numbers with which a pass begins, and how far it has come. From these, a later process makes the
same pass again, and passes over the indices of the batches that were trained on, without reading them.
"""

import weakref
from functools import lru_cache
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_snapshot.integration.resume import rng
from lightning_snapshot.integration.resume.indices import Indices, Pass
from lightning_snapshot.integration.resume.rng import Rng, generators_of
from lightning_snapshot.integration.resume.shares import Share
from lightning_snapshot.integration.resume.workers import Receiving, Workers, sending, stateful_workers
from lightning_snapshot.stateful import Stateful

__all__ = [
    "begin_quietly",
    "follow",
    "go_on",
    "go_on_with",
    "has_indices",
    "is_followed",
    "keep_workers",
    "pass_of",
    "settle",
]

# A class that begins its passes in its own way is left alone.
_HOOKS = ("__iter__", "_get_iterator", "_index_sampler")
_HOMES = {"torch", "torchdata"}
# What is added to a loader that is followed.
_OWN = frozenset({"_pass", "_sends", "_coming_pass", "_coming_share", "_coming_workers"})


def follow(loader: object, *, with_workers: bool = True) -> None:
    """Begin to note where the passes over a loader are, if it is a data loader of torch or torchdata.

    Args:
        loader: Any.
        with_workers: Also the random numbers of its workers.
    """
    cls: Any = type(loader)
    is_stock = isinstance(loader, DataLoader) and {_home(cls, name) for name in _HOOKS} <= _HOMES
    if is_stock and not is_followed(loader):
        loader.__class__ = _following(cls)
        loader.__dict__["_sends"] = with_workers


def is_followed(loader: object) -> bool:
    """Whether it is noted where the passes over a loader are."""
    return hasattr(type(loader), "_follows")


def pass_of(loader: object) -> Pass | None:
    """The last pass that was begun over a loader that is followed."""
    return getattr(loader, "_pass", None)


def has_indices(loader: object) -> bool:
    """Whether a loader is followed and reads what a sampler tells it to, so that batches can be passed over unread."""
    return (
        isinstance(loader, DataLoader)
        and is_followed(loader)
        and not isinstance(loader, Stateful)
        and not isinstance(loader.dataset, IterableDataset)
    )


def go_on(loader: Any, state: dict[str, Any], after: Rng | None = None) -> None:
    """Let the next pass over a loader go on where another one was.

    Args:
        loader: One that is followed.
        state: That of a `Pass`.
        after: Random numbers to go on with from there.
    """
    loader.__dict__["_coming_pass"] = Pass(
        before=state["before"],
        sampling=state["sampling"],
        first=state["first"],
        is_eager=state["is_eager"],
        passed_over=state["batches"],
        digest=state["digest"],
        after=after,
        share=state["share"],
        workers=_by_number(state["workers"]),
        is_again=True,
        repeats_sampling=state["sampling"] is not None,
    )


def begin_quietly(loader: Any) -> None:
    """Let the next iterator that a data loader makes draw no random numbers.

    For those that begin passes in their own way, which may be as late as with the first batch: the numbers that this
    draws were drawn before the save.
    """
    cls: Any = type(loader)

    def get_iterator(self: Any) -> Any:
        self.__class__ = cls
        generators = generators_of(self)
        now = rng.capture(generators)
        iterator = self._get_iterator()
        rng.restore(now, generators)
        return iterator

    loader.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__, "_get_iterator": get_iterator})


def go_on_with(loader: Any, share: Share) -> None:
    """Let the next pass over a loader read a share of the rest of an epoch."""
    loader.__dict__["_coming_share"] = share


def settle(loader: Any) -> dict[str, Any]:
    """Let workers that live on finish what they were asked for, when nothing more is read from a pass.

    Returns:
        Worker → state of its data set, for loaders that have a state.
    """
    its_pass = pass_of(loader)
    iterator = None if its_pass is None else its_pass.iterator()
    if not isinstance(iterator, Receiving) or not loader.persistent_workers:
        return {}
    iterator.settle()
    return {str(worker): state for worker, state in iterator.data_set_states().items()}


def keep_workers(loader: Any, state: dict[str, Any], data_sets: dict[str, Any]) -> None:
    """Let the workers of the next pass have the random numbers that they had, if they live as long as their loader.

    Args:
        loader: Any of torch or torchdata.
        state: That of a `Pass`.
        data_sets: From `settle`.
    """
    if loader.persistent_workers and (state["workers"] or data_sets):
        loader.__dict__["_coming_workers"] = _by_number(state["workers"]), _by_number(data_sets)


def _by_number(states: dict[str, Any]) -> dict[int, Any]:
    return {int(worker): state for worker, state in states.items()}


# --- the class in front ----------------------------------------------------------------------------------------------


def _home(cls: Any, name: str) -> str:
    attribute = getattr(cls, name)
    return str(getattr(attribute, "fget", attribute).__module__).partition(".")[0]


@lru_cache(maxsize=64)
def _following(cls: Any) -> Any:
    def begin(self: Any) -> Any:
        coming = self.__dict__["_pass"] = _next_pass(self)
        iterator = super(following, self).__iter__()
        coming.iterator = weakref.ref(iterator)
        if coming.is_again:
            if coming.indices is not None:
                coming.indices.start()
            if coming.after is not None:
                rng.restore(coming.after)
        elif coming.repeats_sampling and coming.indices is None:
            rng.restore(coming.before, generators_of(self))  # no sampler does it
        return iterator

    def index_sampler(self: Any) -> Any:
        sampler = super(following, self)._index_sampler  # both kinds of samplers go through here
        has_no_state = not isinstance(sampler, Stateful) and not isinstance(self.dataset, IterableDataset)
        return Indices(sampler, self) if has_no_state and pass_of(self) is not None else sampler

    def get_iterator(self: Any) -> Any:
        make = super(following, self)._get_iterator  # torch calls it, too
        if self.num_workers == 0 or pass_of(self) is None or not self._sends:
            return make()
        with sending(self):
            return stateful_workers()(self) if isinstance(self, Stateful) else Workers(self)

    def reduce(self: Any, protocol: Any) -> Any:
        # A copy, in this process or another one, is the loader that nobody has followed.
        copied = cls.__new__(cls)
        copied.__dict__.update({name: value for name, value in self.__dict__.items() if name not in _OWN})
        make, arguments, *rest = copied.__reduce_ex__(protocol)
        return (_made, (make, arguments), *rest)

    names = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__iter__": begin,
        "__reduce_ex__": reduce,
        "_follows": True,
        "_get_iterator": get_iterator,
        "_index_sampler": property(index_sampler),
    }
    following: Any = type(cls.__name__, (cls,), names)
    return following


def _made(make: Any, arguments: Any) -> Any:
    # pickle would refuse the function that it makes objects with for one of another class.
    return make(*arguments)


def _next_pass(loader: Any) -> Pass:
    kept: dict[str, Any] = loader.__dict__
    generators = generators_of(loader)
    coming: Pass | None = kept.pop("_coming_pass", None)
    if coming is not None:
        # Workers that live on after a pass have used random numbers already.
        kept["_iterator"] = None
        rng.restore(coming.before, generators)
        return coming
    now = rng.capture(generators)
    workers, data_sets = kept.pop("_coming_workers", (None, {}))
    if workers is not None:
        kept["_iterator"] = None
        # Where workers live on, none are started that would draw a seed before the sampler begins.
        return Pass(now, sampling=now, workers=workers, data_sets=data_sets, repeats_sampling=True)
    last = pass_of(loader)
    lives_on = last is not None and loader.persistent_workers and kept.get("_iterator") is not None
    share = kept.pop("_coming_share", None)
    return Pass(now, share=share, workers=dict(last.workers) if last is not None and lives_on else {})
