"""A save of what each rank has, each under its own number, except for what all hold alike."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

from msgspec.structs import replace

from lightning_snapshot.describe import Sharing, describe
from lightning_snapshot.exchange import Contribution, collect
from lightning_snapshot.saving import Saving
from lightning_snapshot.stats import Stats
from lightning_snapshot.together import LEAVES, Prepared, Run, Save, begin
from lightning_snapshot.write_plan import RankSpecs, TensorSpec

__all__ = ["begin_each", "save_each"]

_logger = logging.getLogger("lightning_snapshot")


def save_each(get_state: Callable[[], Mapping[str, Any]], save: Save, sharing: Sharing) -> Stats:
    """Save what each rank has, each under its own number, except for what is shared.

    Called on all ranks of the group; returns on each when the snapshot is published.

    Args:
        get_state: Gives app key → value of this rank. Called when all ranks are there, so that all hear if it fails.
            Tensors are read in place until this returns.
        save: Where and how.
        sharing: What all ranks hold alike, and is stored once. A value that is shared by some ranks only is none.

    Returns:
        What this rank did.

    Raises:
        UnsupportedValueError: A value cannot be stored, or ranks disagree about what they share; nothing was written.
        StorageError: The storage failed on some rank; what was there before is still there.
        SnapshotError: Another rank failed; the message names it.
    """
    return begin_each(get_state, save, sharing).finish()


def begin_each(get_state: Callable[[], Mapping[str, Any]], save: Save, sharing: Sharing) -> Saving:
    """Begin a save like `save_each`, up to the point where tensors are read; everything else is captured by then.

    Args and errors are those of `save_each`. Until the save has ended, no other one of the group can begin.
    """

    def prepare(run: Run) -> Prepared:
        opening = run.open({})
        described = describe(get_state(), sharing=sharing, world_size=save.group.world_size)
        mine = Contribution(described.specs, described.notes)
        everyone = collect(run.meeting, save.session.heard, opening, mine)
        return opening, described, everyone and _shared_by_all(everyone), None

    return begin(save, prepare)


def _shared_by_all(everyone: list[Contribution]) -> list[Contribution]:
    """The contributions, in which only what each rank has and calls shared is marked as shared."""
    first = everyone[0].specs
    if all(each.specs == first for each in everyone):
        return everyone
    marked = Counter(chain.from_iterable(_marked(each.specs) for each in everyone))
    partly = {path for path, count in marked.items() if count < len(everyone)}
    if not partly:
        return everyone
    known_to_all = sorted(path for path in partly if all(path in each.specs for each in everyone))
    if known_to_all:
        _logger.warning(
            "%d values, such as %s, are replicated on some ranks only, so each rank stores its own: the globs differ",
            len(known_to_all),
            known_to_all[0],
        )

    def unmarked(path: str, spec: Any) -> Any:
        if path not in partly or not isinstance(spec, LEAVES):
            return spec
        return replace(spec, replicated=False, **({"by_rank_0": False} if isinstance(spec, TensorSpec) else {}))

    return [replace(each, specs={path: unmarked(path, spec) for path, spec in each.specs.items()}) for each in everyone]


def _marked(specs: RankSpecs) -> Iterator[str]:
    return (path for path, spec in specs.items() if isinstance(spec, LEAVES) and spec.replicated)
