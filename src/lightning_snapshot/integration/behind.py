"""Saves of the plugin that go on behind training, and what must not notice them."""

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args
from weakref import WeakSet

import torch
from torch.optim import Optimizer

from lightning_snapshot.background import Background, Failure
from lightning_snapshot.errors import SnapshotError, retold
from lightning_snapshot.group import Group
from lightning_snapshot.integration.rankings import Rankings
from lightning_snapshot.integration.ranks import rank_and_world_size, tensors_in
from lightning_snapshot.memory import UNLIMITED_BYTES, BufferPool
from lightning_snapshot.saving import Saving
from lightning_snapshot.session import Session
from lightning_snapshot.stats import Stats
from lightning_snapshot.tensors import TensorSource, is_spread, local_part
from lightning_snapshot.together import fail_together
from lightning_snapshot.writing import Keep

__all__ = ["Behind", "OnBusy", "OnError", "SavesBehindTraining"]

OnError: TypeAlias = Literal["raise", "warn"]
OnBusy: TypeAlias = Literal["wait", "skip", "supersede"]

# Checkpoints that somebody reads right after the save: a job that is queued again, tuners, the parent process.
_READ_AT_ONCE = re.compile(r"hpc_ckpt_.*|\.lr_find_.*|\.scale_batch_size_.*|\.temp\.ckpt")
_CHANNEL = "busy"
_logger = logging.getLogger("lightning_snapshot")


@dataclass(frozen=True, slots=True)
class Behind:
    """How saves go on behind training; the arguments of `SnapshotCheckpointIO` with these names."""

    async_save: bool
    overlap: bool
    overlap_check: bool
    on_error: OnError
    on_busy: OnBusy
    max_pending_bytes: int | None

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ValueError: One of the arguments, which the message names.
        """
        for name, found, choices in (
            ("on_error", self.on_error, get_args(OnError)),
            ("on_busy", self.on_busy, get_args(OnBusy)),
        ):
            if found not in choices:
                msg = f"{name} must be one of {', '.join(map(repr, choices))}, found {found!r}"
                raise ValueError(msg)
        limit = self.max_pending_bytes
        if limit is not None and (type(limit) is not int or limit <= 0):
            msg = f"max_pending_bytes must be a positive whole number of bytes, found {limit!r}"
            raise ValueError(msg)
        if self.overlap_check and not self.overlap:
            msg = "overlap_check=True needs overlap=True"
            raise ValueError(msg)


class SavesBehindTraining:
    """Lets saves go on behind training, or not, and keeps the order of saves, loads and removals.

    Args:
        how: The options.
        session: The plugin's.
        block_bytes: Unit of reading and writing.
        is_snapshot: Says whether there is one at a path.

    Attributes:
        is_on: Whether saves may go on behind training.
        is_allowed: Whether they may just now; under a Trainer, `SnapshotCallback` says.
        overlap: Whether the state of optimizers is read while training goes on.
        optimizers: Gives those of the Trainer.
        rankings: What the Trainer believes to have saved.
    """

    def __init__(self, how: Behind, session: Session, block_bytes: int, is_snapshot: Callable[[str], bool]) -> None:
        self.is_on = how.async_save or how.overlap
        self.is_allowed = True
        self.overlap = how.overlap
        self.optimizers: Callable[[], Iterable[Optimizer]] | None = None
        self.rankings: Rankings | None = None
        self._how = how
        self._session = session
        self._block_bytes = block_bytes
        self._is_snapshot = is_snapshot
        self._background = Background()
        self._fenced: WeakSet[Optimizer] = WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        """For another process: without what belongs to the Trainer of this one."""
        state = {**self.__dict__, "is_allowed": True, "optimizers": None, "rankings": None}
        del state["_fenced"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._fenced = WeakSet()

    @property
    def pending(self) -> str | None:
        """The path of the save that goes on."""
        return self._background.pending

    def save(
        self,
        path: str,
        begin: Callable[[bool], Saving],
        group_of: Callable[..., Group] | None = None,
        optimizers: Iterable[Optimizer] | None = None,
    ) -> None:
        """Do a save, or let it go on behind training.

        Args:
            path: Where it goes.
            begin: Begins it, given whether it claims the place.
            group_of: Gives the ranks that save together, over the channel that is named.
            optimizers: Those whose state need not be copied with `overlap`. By default the Trainer's.

        Raises:
            SnapshotError: The save failed, or an earlier one has.
        """
        called = time.perf_counter()
        if self.rankings is not None:
            self.rankings.note()
        is_async = self.is_on and self.is_allowed and not _READ_AT_ONCE.fullmatch(os.path.basename(path))
        if is_async and self._how.on_busy != "wait" and self._is_busy(group_of):
            if self._how.on_busy == "skip":
                _logger.info("%s is not saved: the save to %s still goes on", path, self.pending)
                self._background.skip(path)
                return
            self._background.cancel()
        self._wait_with(group_of)
        waited_seconds = time.perf_counter() - called
        saving = begin(is_async)
        if not is_async:
            self._background.note_published(path, saving.finish())
            return
        saving.meter.add_wait(waited_seconds)
        self._background.start(path, saving, self._copies(), self._keep(optimizers), check=self._how.overlap_check)

    def fence(self, *_: Any) -> None:
        """What is not read yet of the save that goes on, is copied: from now on, the state may change."""
        self._background.fence(self._copies())

    def fence_before_steps(self, optimizers: Iterable[Optimizer]) -> None:
        """Call `fence` before each step of some optimizers."""
        for optimizer in optimizers:
            if optimizer not in self._fenced:
                optimizer.register_step_pre_hook(self.fence)
                self._fenced.add(optimizer)

    def after_save(self, path: str, action: Callable[[], None]) -> None:
        """See `Background.after_save`."""
        self._background.after_save(path, action)

    def wait_for_removal(self, path: str) -> None:
        """Wait if what is at a path is about to go."""
        self._background.wait_for(path)

    def wait(self) -> None:
        """See `SnapshotCheckpointIO.wait`."""
        self._background.settle()
        self.tell_failures(sys.exc_info()[1])

    def settle(self, timeout_seconds: float) -> str | None:
        """Wait for a while; gives the path of the save that still goes on."""
        self._background.settle(timeout_seconds)
        return self.pending

    def take_published(self) -> list[tuple[str, Stats]]:
        """See `Background.take_published`."""
        return self._background.take_published()

    def tell_failures(self, handled: BaseException | None = None) -> None:
        """Say what has failed, once.

        Args:
            handled: An exception that is on its way; it is not replaced, but gets a note.

        Raises:
            SnapshotError: What has failed.
        """
        for path, kept in self._background.unsaved():
            self._correct_rankings(path, kept)
        failures = [_told(failure) for failure in self._background.take_failures()]
        first = failures[0] if failures and self._how.on_error == "raise" and handled is None else None
        for failure in failures:
            if failure is first:
                continue
            _logger.log(logging.WARNING if self._how.on_error == "warn" else logging.ERROR, "%s", failure)
            if handled is not None and hasattr(handled, "add_note"):  # Python 3.11
                handled.add_note(f"lightning-snapshot: {failure}")
        if first is not None:
            raise first from first.__cause__

    def _correct_rankings(self, path: str, kept: Iterable[str]) -> None:
        try:
            # Where a save would have replaced something, that is still there.
            if self.rankings is not None and not self._is_snapshot(path):
                is_used = self.rankings.replace(path, [each for each in kept if self._is_snapshot(each)])
                if is_used:
                    self._background.forget_kept(path)
        except SnapshotError as error:
            # Perhaps it can be found out next time.
            _logger.warning("which checkpoints are there instead of %s is not known: %s", path, error)
        else:
            self._background.forget_unsaved(path)

    def _wait_with(self, group_of: Callable[..., Group] | None) -> None:
        """Wait before a save; if something other than a save has failed, such as a removal, the other ranks hear it."""
        self._background.settle()
        fails_alone = self._background.fails_alone()
        try:
            self.wait()
        except Exception as error:
            if group_of is not None and fails_alone:
                fail_together(group_of(), error)
            raise

    def _is_busy(self, group_of: Callable[..., Group] | None) -> bool:
        """Whether a save goes on; all ranks say what rank 0 says, for it may end on one earlier than on another."""
        is_busy = self.pending is not None
        if group_of is None:
            return is_busy
        with group_of(channel=_CHANNEL).meet("ask whether a save goes on") as meeting:
            return bool(meeting.broadcast("busy", bytes([is_busy]))[0])

    def _copies(self) -> BufferPool:
        return self._session.copies(self._how.max_pending_bytes or UNLIMITED_BYTES, self._block_bytes)

    def _keep(self, optimizers: Iterable[Optimizer] | None) -> Keep | None:
        if optimizers is None and self.optimizers is not None:
            optimizers = self.optimizers()
        if not self.overlap or optimizers is None:
            return None
        owned = {_local(tensor).untyped_storage().data_ptr() for tensor in _owned(optimizers)}

        def keep(source: TensorSource) -> bool:
            return source.tensor.untyped_storage().data_ptr() in owned

        return keep


def _owned(optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from tensors_in(group["params"])
        yield from tensors_in(optimizer.state)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_part(tensor, "").tensor if is_spread(tensor) else tensor


def _told(failure: Failure) -> BaseException:
    rank, _ = rank_and_world_size()
    error = failure.error
    if not isinstance(error, SnapshotError):
        return error
    told = retold(error, f"rank {rank}: what went on behind training for {failure.path} failed")
    told.__cause__ = error
    return told
