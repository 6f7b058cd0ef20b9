"""The points of a run at which Lightning's counters alone would not let it go on exactly.

=========================================  ==========================================================================
saved                                      what Lightning does, and what is done here
=========================================  ==========================================================================
after a batch, before the validation that  skips that validation; here it is run
is due then
inside a validation                        skips the rest of it, or goes on in its middle without what it had
                                           collected; here the validation is run from its beginning
after the last batch of an epoch           leaves the end of the epoch out; here it is reached
when an epoch begins, before its first      leaves that epoch out; here it is begun
batch
at the end of an epoch, with ``max_steps`` trains on in the old epoch; here a new one begins
any                                        leaves out schedulers like ``ReduceLROnPlateau``, which come after the save,
                                           once; here they take their step
=========================================  ==========================================================================
"""

import logging
from importlib import import_module
from typing import Any

__all__ = ["Progress"]

_logger = logging.getLogger("lightning_snapshot")


class Progress:
    """What the counters in a checkpoint say about the moment when it was saved.

    Args:
        loops: State of ``fit_loop``.
    """

    def __init__(self, loops: dict[str, Any]) -> None:
        epoch, batch = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
        done, begun = epoch["current"]["processed"], epoch["current"]["started"]
        # Nothing has happened in an epoch of which the hook `on_train_epoch_start` is being called.
        self._is_epoch_start = epoch["current"]["ready"] > begun == done > 0
        self.is_epoch_end: bool = done == epoch["current"]["ready"] > 0 or self._is_epoch_start
        self.is_last_batch: bool = batch["is_last_batch"]
        self._is_first_epoch_start = batch["current"]["ready"] == 0
        self._is_batch_end = batch["current"]["processed"] == batch["current"]["completed"] + 1
        # Which schedulers that need metrics have not taken their step.
        self._late_schedulers = "epoch" if epoch["current"]["completed"] < done else None

    @property
    def is_late(self) -> bool:
        """Whether schedulers that need metrics were about to take the step of an epoch."""
        return self._late_schedulers == "epoch"

    def adjust(self, loops: dict[str, Any]) -> None:
        """Let a batch that was trained on count as done, and an epoch that has just begun not as begun.

        Args:
            loops: State of ``fit_loop``, before Lightning takes it.
        """
        if self._is_epoch_start:
            for counters in loops["epoch_progress"].values():
                counters["ready"] -= 1
        if self._is_batch_end and not self.is_epoch_end:
            batch = loops["epoch_loop.batch_progress"]
            for counters in batch["total"], batch["current"]:
                counters["completed"] = counters["processed"]
                # Of earlier epochs, those of `on_train_batch_start` that returned -1 have left one behind.
                counters["started"] = counters["ready"]

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
        if self._is_first_epoch_start:
            loop._restarting = False  # noqa: SLF001  # else it would begin with the end of a batch
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
        elif self._is_batch_end:
            self._late_schedulers = "step"
            loop._batches_that_stepped += not loop._should_accumulate()  # noqa: SLF001  # as above

    def catch_up(self, fit_loop: Any) -> None:
        """Do what Lightning does after the save, when metrics are what they were.

        Args:
            fit_loop: The Trainer's.
        """
        loop, epochs = fit_loop.epoch_loop, fit_loop.epoch_progress.current
        if self._is_batch_end and not self.is_epoch_end:
            fit_loop.trainer._logger_connector.on_batch_end()  # noqa: SLF001  # as above
        if self._late_schedulers == "step":
            _step_schedulers(loop, "step")
        elif self._late_schedulers == "epoch" and loop._num_ready_batches_reached():  # noqa: SLF001  # as above
            epochs.completed -= 1  # in the epoch that has ended
            _step_schedulers(loop, "epoch")
            epochs.completed += 1

    def end_epoch(self, fit_loop: Any) -> None:
        """Let Lightning end the epoch as any other one, though it has begun before the resume."""
        fit_loop._restarting = False  # noqa: SLF001  # as above


def _step_schedulers(loop: Any, interval: str) -> None:
    trainer = loop.trainer
    for config in trainer.lr_scheduler_configs:
        is_due = config.reduce_on_plateau and config.interval == interval and config.strict
        if is_due and trainer.callback_metrics.get(config.monitor) is None:
            # Lightning would end the run with an error.
            if trainer.is_global_zero:
                _logger.warning(
                    "%s leaves out a step, because %s was not logged before the checkpoint was saved",
                    *(type(config.scheduler).__name__, config.monitor),
                )
            return
    loop.update_lr_schedulers(interval, update_plateau_schedulers=True)
