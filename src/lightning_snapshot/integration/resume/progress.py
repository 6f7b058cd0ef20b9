"""The points of a run at which Lightning's counters alone would not let it go on exactly.

=========================================  ==========================================================================
saved                                      what Lightning does, and what is done here
=========================================  ==========================================================================
after a batch, before the validation that  skips that validation; here it is run
is due then
inside a validation                        skips the rest of it, or goes on in its middle without what it had
                                           collected; here the validation is run from its beginning
after the last batch of an epoch           leaves the end of the epoch out; here it is reached
at the end of an epoch, with ``max_steps`` trains on in the old epoch; here a new one begins
=========================================  ==========================================================================
"""

from importlib import import_module
from typing import Any

__all__ = ["Progress"]


class Progress:
    """What the counters in a checkpoint say about the moment when it was saved.

    Args:
        loops: State of ``fit_loop``.
    """

    def __init__(self, loops: dict[str, Any]) -> None:
        epoch, batch = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
        self.is_epoch_end: bool = epoch["current"]["processed"] == epoch["current"]["ready"] > 0
        self.is_last_batch: bool = batch["is_last_batch"]
        self._is_batch_end = batch["current"]["processed"] == batch["current"]["completed"] + 1

    def count_batch(self, loops: dict[str, Any]) -> None:
        """Let a batch that was trained on, but whose end was not reached, count as done."""
        if self._is_batch_end and not self.is_epoch_end:
            batch = loops["epoch_loop.batch_progress"]
            for counters in batch["total"], batch["current"]:
                counters["completed"] = counters["processed"]

    def begin_epoch(self, fit_loop: Any) -> None:
        """Let Lightning begin a new epoch, and new passes over the loaders, instead of going on in an old one."""
        if fit_loop._restarting:  # noqa: SLF001  # Lightning has no public way
            loop = fit_loop.epoch_loop
            for each in (fit_loop, loop, loop.val_loop, loop.automatic_optimization, loop.manual_optimization):
                each._restarting = False  # noqa: SLF001  # as above
                if hasattr(each, "_restart_stage"):
                    each.reset_restart_stage()
            progress = fit_loop.epoch_progress
            progress.current.completed = progress.current.processed
            progress.total.completed = progress.total.processed
        # From 2.6 on, it would else take the passes that it has begun before any hook was called.
        fit_loop._resuming_from_checkpoint = False  # noqa: SLF001  # as above

    def go_on(self, fit_loop: Any, *, validates: bool) -> None:
        """Let Lightning go on after a batch.

        Args:
            fit_loop: The Trainer's.
            validates: Whether a validation was being run.
        """
        loop = fit_loop.epoch_loop
        if not hasattr(loop.val_loop, "_restart_stage"):
            return  # Lightning 2.4 cannot be told to run a validation then
        if validates and hasattr(fit_loop.trainer, "_last_val_time"):
            fit_loop.trainer._last_val_time = float("-inf")  # noqa: SLF001  # as above
        if validates or (self._is_batch_end and loop._should_check_val_fx(fit_loop._data_fetcher)):  # noqa: SLF001  # as above
            done = loop.val_loop.batch_progress
            done.total.load_state_dict(
                dict.fromkeys(done.total.state_dict(), done.total.completed - done.current.completed)
            )
            done.current.reset()
            stage = import_module(type(loop.val_loop).__module__).RestartStage
            loop.val_loop._restart_stage = stage.RESTARTED_MID_EVALUATION  # noqa: SLF001  # as above
        elif self._is_batch_end and not loop._should_accumulate():  # noqa: SLF001  # as above
            loop._batches_that_stepped += 1  # noqa: SLF001  # as above
