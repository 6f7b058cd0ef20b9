"""`SnapshotCallback`: what the plugin cannot do alone, because it does not know the Trainer."""

import logging
import os
import warnings
from functools import partial
from typing import Any

import torch

from lightning_snapshot.errors import UnsupportedFeatureError
from lightning_snapshot.integration.behind import SavesBehindTraining
from lightning_snapshot.integration.namespaces import bases
from lightning_snapshot.integration.plugin import SnapshotCheckpointIO
from lightning_snapshot.integration.rankings import Rankings
from lightning_snapshot.integration.remote import copy_instead_of_link, find_last_in_buckets
from lightning_snapshot.integration.resume.state import Resume
from lightning_snapshot.integration.resume.strategy import ResumeMixin
from lightning_snapshot.integration.strategies import let_all_ranks_save
from lightning_snapshot.integration.wiring import plugin_of, strategies_named
from lightning_snapshot.stateful import copies_tensors_as_they_are
from lightning_snapshot.storage import clear_leftovers
from lightning_snapshot.tensors import tensors_by_path

__all__ = ["SnapshotCallback"]

# After an exception, training does not wait longer than this for a save that goes on.
_PATIENCE_SECONDS = 60.0
_PROGRESS = "saving"
_AVERAGING = frozenset({"EMAWeightAveraging", "StochasticWeightAveraging", "WeightAveraging"})
_logger = logging.getLogger("lightning_snapshot")


class SnapshotCallback(*bases("pytorch", "callbacks.callback", "Callback")):  # type: ignore[misc]  # bases depend on what is installed
    """Lets all ranks save together, and checkpoints load straight into the model, without a second copy in memory.

    Lightning adds it by itself (through an entry point) where the program uses `SnapshotCheckpointIO`. Adding it once
    more does no harm. Without our plugin it does nothing.

    Callbacks with a method ``on_snapshot_committed(path, stats)`` hear of each snapshot that is published: in the
    training thread, after the batch during which it happened, or at the end of training.

    Args:
        log_stats: Give the Trainer's loggers, for each snapshot, how long training waited
            (``snapshot/stall_seconds``), how long the save took (``snapshot/seconds``), its size
            (``snapshot/bytes``) and speed (``snapshot/gigabytes_per_second``).
        loader_state: Let a resume in the middle of an epoch go on with the batch that was next.
        save_gradients: Store the gradients of a save between two steps of the optimizer, with
            ``accumulate_grad_batches``.
    """

    def __init__(self, *, log_stats: bool = False, loader_state: bool = True, save_gradients: bool = False) -> None:
        super().__init__()
        self.log_stats = log_stats
        self.loader_state = loader_state
        self.save_gradients = save_gradients
        find_last_in_buckets()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In a process that Lightning has spawned."""
        self.__dict__.update(state)
        find_last_in_buckets()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called right before Lightning restores a checkpoint."""
        plugin = plugin_of(trainer.strategy)
        if plugin is None:
            return
        _unwrap(trainer.strategy, plugin)
        copy_instead_of_link(trainer)
        let_all_ranks_save(trainer.strategy, plugin)
        if stage == "fit" and isinstance(trainer.strategy, ResumeMixin) and self._is_first(trainer):
            how = {"loader_state": self.loader_state, "save_gradients": self.save_gradients}
            trainer.strategy.exact_resume = Resume(trainer, **how)
        plugin.behind.is_allowed = False
        plugin.behind.optimizers = lambda: trainer.optimizers
        plugin.behind.rankings = Rankings(trainer)
        for checkpoint in trainer.checkpoint_callbacks:
            if hasattr(checkpoint, "file_exists") and hasattr(checkpoint, "_fs"):
                checkpoint.file_exists = partial(_is_taken, checkpoint, plugin.behind)
        if not _may_edit_checkpoint(trainer, pl_module):

            def tensors(path: Any) -> dict[str, torch.Tensor]:
                # Lightning notes the path right before it restores; whoever else loads gets tensors of his own.
                is_restore = trainer.ckpt_path is path
                return tensors_by_path({"state_dict": pl_module.state_dict()}) if is_restore else {}

            plugin.read_next_checkpoint_into(tensors)

    def _is_first(self, trainer: Any) -> bool:
        """Whether this is the one that counts, if Lightning has added another one."""
        return next(each for each in trainer.callbacks if isinstance(each, SnapshotCallback)) is self

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002  # Lightning's hook, either namespace
        """Called on the way, before Lightning takes its counters."""
        resume = _resume_of(trainer)
        if resume is not None and self._is_first(trainer):
            resume.take(checkpoint)

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002  # as above
        """Called after the restore, as are the hooks below: a load from now on is somebody else's."""
        _take_back(trainer)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002  # as above
        """See `on_sanity_check_start`."""
        _take_back(trainer)

    on_test_start = on_predict_start = on_fit_start

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Called before the first save, when all folders are known and the checkpoint to resume from is loaded."""
        _clear_leftovers(trainer)
        behind = _behind(trainer)
        if behind is not None and behind.is_on:
            behind.is_allowed = _may_save_behind(trainer)
            if behind.rankings is not None:
                behind.rankings.note()
            if behind.overlap:
                _check_overlap(trainer)
                if not pl_module.automatic_optimization:
                    behind.fence_before_steps(trainer.optimizers)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002  # as above
        """Called when the epoch's loaders are there."""
        resume = _resume_of(trainer)
        if resume is not None:
            resume.begin_epoch()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:  # noqa: ARG002  # as above
        """Called after forward and backward pass, right before the parameters change."""
        _fence(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Called before Lightning's own callbacks save."""
        self._tell_published(trainer)
        resume = _resume_of(trainer)
        if resume is not None:
            resume.end_batch()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002  # as above
        """Called before other callbacks may exchange the parameters."""
        _take_back(trainer)
        _fence(trainer)
        resume = _resume_of(trainer)
        if resume is not None:
            resume.begin_validation()

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002  # as above
        """Called when other callbacks exchange the parameters."""
        resume = _resume_of(trainer)
        if resume is not None:
            resume.begin_validation_epoch()

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002  # as above
        """Called when they change them back."""
        resume = _resume_of(trainer)
        if resume is not None:
            resume.end_validation_epoch()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002  # as above
        """Called before Lightning's own callbacks save."""
        resume = _resume_of(trainer)
        if resume is not None:
            resume.end_validation()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002  # as above
        """Called before Lightning's own callbacks save."""
        resume = _resume_of(trainer)
        if resume is not None:
            resume.end_epoch()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002  # as above
        """Called on all ranks, before Lightning's own callbacks may save once more."""
        self._finish(trainer)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002  # as above
        """Called after all saves of the training: whatever goes on behind it ends here."""
        behind = _behind(trainer)
        if behind is not None:
            behind.is_allowed = False
            self._finish(trainer)

    def _finish(self, trainer: Any) -> None:
        behind = _behind(trainer)
        if behind is not None:
            behind.wait()
            self._tell_published(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002  # as above
        """Called also if there was nothing to resume from but a leftover, which must not stop the next start, too."""
        behind = _behind(trainer)
        if behind is not None:
            behind.is_allowed = False
            path = behind.settle(_PATIENCE_SECONDS)
            if path is not None:
                _logger.error("%s is not saved yet. It still can be, until this process ends, which waits for it", path)
            behind.tell_failures(exception)
            for path, _ in behind.take_published():
                _logger.info("%s is saved", path)
        self._leave(trainer)
        if trainer.state.fn == "fit":
            _clear_leftovers(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002  # as above
        """Called last; what Lightning saves from now on is saved at once."""
        behind = _behind(trainer)
        if behind is not None:
            behind.optimizers = behind.rankings = None
        self._leave(trainer)

    def _leave(self, trainer: Any) -> None:
        resume = _resume_of(trainer)
        if resume is not None:
            resume.leave()

    def _tell_published(self, trainer: Any) -> None:
        behind = _behind(trainer)
        if behind is None:
            return
        for path, stats in behind.take_published():
            for callback in trainer.callbacks:
                hook = getattr(callback, "on_snapshot_committed", None)
                if hook is not None:
                    hook(path, stats)
            if any(getattr(callback, "log_stats", False) for callback in trainer.callbacks):
                metrics = {
                    "snapshot/stall_seconds": stats.stall_seconds,
                    "snapshot/seconds": stats.seconds,
                    "snapshot/bytes": stats.data_bytes,
                    "snapshot/gigabytes_per_second": stats.gigabytes_per_second,
                }
                for logger in trainer.loggers:
                    logger.log_metrics(metrics, step=trainer.global_step)
        if behind.pending is not None:
            trainer.progress_bar_metrics[_PROGRESS] = os.path.basename(behind.pending)
        else:
            trainer.progress_bar_metrics.pop(_PROGRESS, None)


def _unwrap(strategy: Any, plugin: SnapshotCheckpointIO) -> None:
    """Take our plugin out of Lightning's wrapper, of which removals and loads know nothing."""
    wrapper = strategy.checkpoint_io
    if wrapper is not plugin and type(wrapper).__name__ == "AsyncCheckpointIO":
        strategy.checkpoint_io = plugin
        plugin.behind.is_on = True
        warnings.warn(
            "AsyncCheckpointIO is not used: SnapshotCheckpointIO saves behind training by itself, as with "
            "SnapshotCheckpointIO(async_save=True), which you may write instead",
            stacklevel=2,
        )


def _resume_of(trainer: Any) -> Resume | None:
    return getattr(trainer.strategy, "exact_resume", None)


def _is_taken(checkpoint: Any, behind: SavesBehindTraining, filepath: Any, trainer: Any) -> Any:
    """`ModelCheckpoint.file_exists`, for which a name is free again once the checkpoint of that name was to go."""
    behind.wait_for_removal(os.fspath(filepath))
    # It may remember what was in the folder of a bucket before our last save, which goes another way.
    checkpoint._fs.invalidate_cache()  # noqa: SLF001  # Lightning has no other way
    return type(checkpoint).file_exists(checkpoint, filepath, trainer)


def _behind(trainer: Any) -> SavesBehindTraining | None:
    plugin = plugin_of(trainer.strategy)
    return None if plugin is None else plugin.behind


def _fence(trainer: Any) -> None:
    behind = _behind(trainer)
    if behind is not None and behind.overlap:
        behind.fence()


def _may_save_behind(trainer: Any) -> bool:
    """Whether nobody does something with a checkpoint right after the save."""
    linked = any(getattr(callback, "save_last", None) == "link" for callback in trainer.checkpoint_callbacks)
    curious = [type(logger).__name__ for logger in trainer.loggers if _looks_at_checkpoints(logger)]
    if linked or curious:
        reason = "save_last='link' links to them" if linked else f"{curious[0]} looks at them"
        if trainer.is_global_zero:
            _logger.warning("saves do not go on behind training, because %s right after the save", reason)
        return False
    return True


def _looks_at_checkpoints(logger: Any) -> bool:
    home = type(logger).after_save_checkpoint.__module__.partition(".loggers.")[2]
    # Lightning's base and its TensorBoardLogger do nothing there; others may be told to leave checkpoints alone.
    return home not in ("logger", "tensorboard") and bool(getattr(logger, "_log_model", True))


def _check_overlap(trainer: Any) -> None:
    """Refuse programs of which it is known that parameters change where no fence stands."""
    found = [type(callback).__name__ for callback in trainer.callbacks if type(callback).__name__ in _AVERAGING]
    found += [type(each).__name__ for each in trainer.optimizers if isinstance(each, torch.optim.LBFGS)]
    if isinstance(trainer.strategy, strategies_named("pytorch", "FSDPStrategy")):
        found.append(type(trainer.strategy).__name__)
    if found:
        msg = (
            f"overlap=True cannot be used with {', '.join(found)}: parameters change between the steps of the "
            "optimizer, or more than once in a step; use async_save=True without overlap"
        )
        raise UnsupportedFeatureError(msg)


def _clear_leftovers(trainer: Any) -> None:
    plugin = plugin_of(trainer.strategy)
    if trainer.is_global_zero and plugin is not None:
        folders = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
        for folder in dict.fromkeys([trainer.default_root_dir, *folders]):
            if folder is not None:
                clear_leftovers(folder, plugin.storage_options)


def _take_back(trainer: Any) -> None:
    plugin = plugin_of(trainer.strategy)
    if plugin is not None:
        plugin.read_next_checkpoint_into(None)


def _may_edit_checkpoint(trainer: Any, module: torch.nn.Module) -> bool:
    """Whether somebody sees the loaded checkpoint before the model takes it.

    Whoever does may swap or change tensors, which must then not be the model's own.
    """
    hooks = [owner.on_load_checkpoint for owner in (module, *trainer.callbacks)]
    if any(getattr(hook, "__module__", "") not in _DO_NOTHING_HOME for hook in hooks):
        return True
    return not copies_tensors_as_they_are(module)


# Where the versions of `on_load_checkpoint` live that do not touch a checkpoint.
_DO_NOTHING_HOME = frozenset(
    f"{package}.{name}"
    for package in ("lightning.pytorch", "pytorch_lightning")
    for name in ("core.hooks", "callbacks.callback")
) | {__name__}
