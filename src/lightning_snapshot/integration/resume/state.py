"""Exact resume for a Trainer: what `SnapshotCallback` and the strategies' mixins call."""

import logging
import os
import warnings
from typing import Any

from lightning_snapshot.integration.ranks import RESUME_KEY as KEY
from lightning_snapshot.integration.resume import callbacks, gradients, metrics, rng
from lightning_snapshot.integration.resume.buckets import gradient_order, set_gradient_order
from lightning_snapshot.integration.resume.hooks import BatchEnd
from lightning_snapshot.integration.resume.loaders import TrainingLoaders, seeds_of
from lightning_snapshot.integration.resume.passes import follow, pass_of
from lightning_snapshot.integration.resume.progress import Progress
from lightning_snapshot.integration.resume.rng import Rng, generators_of

__all__ = ["KEY", "Resume"]

_VERSION = 1
# What Lightning's tuner saves and loads only to undo a trial.
_TRIALS = (".lr_find_", ".scale_batch_size_")
_logger = logging.getLogger("lightning_snapshot")


class Resume:
    """What is stored with each checkpoint of a ``fit``, and put back by the next one.

    Args:
        trainer: The Trainer.
        loader_state: Whether data loaders are positioned.
        save_gradients: Whether gradients are stored that are being accumulated.
    """

    def __init__(self, trainer: Any, *, loader_state: bool, save_gradients: bool) -> None:
        self._trainer = trainer
        self._loaders = TrainingLoaders(trainer.fit_loop) if loader_state else None
        self._save_gradients = save_gradients
        self._batch_end = BatchEnd(trainer)
        self._rng_at_save: Rng | None = None
        self._at_validation: dict[str, Any] | None = None
        self._is_in_validation_epoch = False
        self._loaded: dict[str, Any] | None = None
        self._progress: Progress | None = None
        self._resumed: Progress | None = None
        self._gradient_order: list[int] | None = None
        self._said: set[str] = set()

    # --- while training ------------------------------------------------------------------------------------------

    def follow(self, loader: object) -> None:
        """Called with each loader before it is read from."""
        if self._loaders is not None and self._is_fit:
            # Of validation loaders, it is only asked with which random numbers they begin.
            follow(loader, with_workers=self._trainer.training)
            self._loaders.set_seed(loader)
            if self._trainer.training:
                self._loaders.before = rng.capture()

    def begin_epoch(self) -> None:
        """Called when the loaders of an epoch are there."""
        if self._loaders is not None:
            self._loaders.note_reads()

    def end_batch(self) -> None:
        """Called on all ranks before callbacks save."""
        # Sums of two numbers are the same in any order.
        if self._gradient_order is None and self._trainer.world_size > 2:  # noqa: PLR2004  # as above
            self._gradient_order = gradient_order(self._trainer.strategy.model)

    def end_epoch(self) -> None:
        """Called when an epoch has ended."""
        if self._resumed is not None:
            self._resumed.end_epoch(self._trainer.fit_loop)
        if self._loaders is not None:
            self._loaders.end_epoch()

    def begin_validation(self) -> None:
        """Called at its beginning: a resume from a checkpoint inside of a validation begins it again."""
        if not self._is_fit or self._trainer.sanity_checking:
            return
        now = rng.capture(cuda=True)
        loaders = self._validation_loaders
        begun = pass_of(loaders[0]) if loaders else None
        generators = _generator_states(loaders)
        if begun is not None:
            # Its pass has begun before any hook was called.
            now |= begun.before
            generators[0] = begun.before["generators"]
        self._at_validation = {**self._moment(now), "generators": generators}

    def begin_validation_epoch(self) -> None:
        """Called before its first batch."""
        self._is_in_validation_epoch = True

    def end_validation_epoch(self) -> None:
        """Called after its last batch."""
        self._is_in_validation_epoch = False

    def end_validation(self) -> None:
        """Called when all of its batches are done."""
        if self._at_validation is not None:
            self._at_validation = {"metrics": {"is_first_batch": self._at_validation["metrics"]["is_first_batch"]}}

    def leave_validation(self) -> None:
        """Called when nothing of it is left."""
        self._at_validation = None

    def leave(self) -> None:
        """Called when training has ended, well or not."""
        self._batch_end.leave()

    # --- saving --------------------------------------------------------------------------------------------------

    def begin_save(self) -> None:
        """Called before anything is asked for its state: who answers may draw random numbers."""
        if self._is_running:
            self._batch_end.finish()
        self._rng_at_save = rng.capture(cuda=True)

    def add_to(self, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Add copies of all that is needed to a checkpoint that is being saved."""
        now, self._rng_at_save = self._rng_at_save, None
        if now is None or not self._is_fit or "optimizer_states" not in checkpoint:
            return
        rng.restore(now)
        if os.path.basename(path).startswith(_TRIALS):
            return
        loop = self._trainer.fit_loop
        progress = Progress(checkpoint["loops"]["fit_loop"])
        validation = self._at_validation or {}
        monitors = any(config.reduce_on_plateau for config in self._trainer.lr_scheduler_configs)
        if progress.is_late and monitors and self._is_running:
            self._trainer.callback_metrics  # noqa: B018  # has Lightning compute what it computes next, as these need it
        moment = self._moment(now) if "rng" not in validation else validation
        if validation and moment is not validation:
            self._tell_of_validation_end()
        if self._is_in_validation_epoch:
            callbacks.put_averages_right(self._trainer, checkpoint)
        checkpoint[KEY] = {
            "version": _VERSION,
            "rank": self._trainer.global_rank,
            "world_size": self._trainer.world_size,
            "validates": moment is validation,
            "reload_epoch": loop._last_train_dl_reload_epoch,  # noqa: SLF001  # Lightning has no public way
            "rng": rng.storable(moment["rng"]),
            "validation_seeds": seeds_of(self._validation_loaders),
            "validation_generators": rng.storable(moment["generators"]),
            "metrics": self._metrics(moment["metrics"], validation, progress),
            "gradients": self._gradients(progress),
            "gradient_order": self._gradient_order,
            "frozen": callbacks.frozen(self._trainer),
            "loaders": self._loader_states(checkpoint, progress),
        }

    def _moment(self, now: Rng) -> dict[str, Any]:
        return {
            "rng": now,
            "generators": _generator_states(self._validation_loaders),
            "metrics": metrics.capture(self._trainer, self._trainer.lightning_module),
        }

    @property
    def _validation_loaders(self) -> list[Any]:
        combined = self._trainer.fit_loop.epoch_loop.val_loop._combined_loader  # noqa: SLF001  # as above
        return [] if combined is None else list(combined.flattened)

    def _tell_of_validation_end(self) -> None:
        module = self._trainer.lightning_module
        if not type(module).on_validation_end.__module__.endswith(".core.hooks"):
            self._say_once(
                "%s.on_validation_end comes after this save, and is not called again after a resume: what it changes, "
                "and random numbers that it draws, are missing then. on_validation_epoch_end comes before it",
                type(module).__name__,
            )

    def _metrics(self, found: dict[str, Any], validation: dict[str, Any], progress: Progress) -> dict[str, Any]:
        if progress.is_epoch_end:
            metrics.drop_logged(found, ["train", "val"])
        elif validation and "rng" not in validation:
            metrics.drop_logged(found, ["val"])
            found["is_first_batch"] = validation["metrics"]["is_first_batch"]
        return found

    def _loader_states(self, checkpoint: dict[str, Any], progress: Progress) -> dict[str, Any] | None:
        if self._loaders is None:
            return None
        batches = self._trainer.fit_loop.epoch_loop.batch_progress.current
        is_end = progress.is_epoch_end or progress.is_last_batch
        state = self._loaders.state(back=batches.ready - batches.processed, is_end=is_end)
        # Lightning has stored the states as they are after the batch that it has read ahead.
        if state["states"]:
            checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = state["states"]
        if is_end:
            for name in self._loaders.unsettled(state):
                self._say_once(
                    "the states of the data sets in the persistent workers of %s may be older than the end of this "
                    "epoch, because snapshot_every_n_steps is not 1: after a resume, the next epoch may begin earlier",
                    name,
                )
        else:
            for name in self._loaders.unpositioned():
                self._say_once(
                    "%s cannot be brought back to where it was: after a resume, this epoch begins with its first batch "
                    "again. A StatefulDataLoader of torchdata over a data set with state_dict and load_state_dict can",
                    name,
                )
        theirs = {"states", "data_sets"}
        own = rng.storable({key: value for key, value in state.items() if key not in theirs})
        return {**own, "data_sets": state.get("data_sets", [])}

    def _gradients(self, progress: Progress) -> dict[str, Any] | None:
        module = self._trainer.lightning_module
        loop = self._trainer.fit_loop.epoch_loop
        if progress.is_epoch_end or not loop._should_accumulate() or not module.automatic_optimization:  # noqa: SLF001  # as above
            return None
        found = gradients.capture(module) if self._save_gradients else None
        if found is None:
            self._say_once(
                "saved between two steps of the optimizer, without the gradients that are being accumulated%s: the "
                "first step after a resume has fewer batches. Save after a step, or use "
                "SnapshotCallback(save_gradients=True)",
                " because they are not spread over ranks as their parameters are" if self._save_gradients else "",
            )
        return found

    # --- resuming ------------------------------------------------------------------------------------------------

    def take(self, checkpoint: dict[str, Any]) -> None:
        """Called with the checkpoint that ``fit`` resumes from, before its counters are taken."""
        path = self._trainer._checkpoint_connector._ckpt_path  # noqa: SLF001  # as above
        if not self._is_fit or os.path.basename(path).startswith(_TRIALS):
            return
        self._loaded = None
        state = checkpoint.get(KEY)
        if state is None:
            if self._trainer.is_global_zero:
                _logger.warning(
                    "the checkpoint holds no random numbers, metrics and positions of data loaders, so the run goes on "
                    "as with stock Lightning"
                )
            return
        loops = checkpoint["loops"]["fit_loop"]
        self._progress = Progress(loops)
        self._progress.adjust(loops)
        states = loops["state_dict"].pop("combined_loader", []) if state["loaders"] is not None else []
        if state["loaders"] is not None:
            state["loaders"]["states"] = states
        self._loaded = state

    def prepare(self, model: object) -> None:
        """Called with what the strategy trains, when that has been made."""
        state = self._loaded
        if state is not None and state["world_size"] == self._trainer.world_size:
            order = state.get("gradient_order")
            if order is not None and set_gradient_order(model, order):
                self._gradient_order = order

    def resume(self) -> None:
        """Called by the strategy after all hooks ``on_train_start``, right before the first batch is read."""
        self._batch_end.watch()
        self.begin_epoch()
        loop = self._trainer.fit_loop
        # A trial of the tuner runs before the counters are taken.
        if not getattr(loop, "_loaded_from_state_dict", True):
            return
        state, self._loaded, progress, self._progress = self._loaded, None, self._progress, None
        if state is None or progress is None:
            return
        self._resumed = progress
        loop._last_train_dl_reload_epoch = state["reload_epoch"]  # noqa: SLF001  # as above
        callbacks.catch_up(self._trainer, state.get("frozen"))
        if progress.is_epoch_end:
            progress.begin_epoch(loop)
        else:
            progress.go_on(loop, validates=state["validates"])
        if (state["world_size"], state["rank"]) == (self._trainer.world_size, self._trainer.global_rank):
            self._resume_same(state, progress)
        else:
            self._resume_other(state, progress)

    def _resume_same(self, state: dict[str, Any], progress: Progress) -> None:
        loop = self._trainer.fit_loop
        if state["loaders"] is not None and self._loaders is not None:
            if progress.is_epoch_end or progress.is_last_batch:
                self._loaders.begin_anew(state["loaders"], ends_epoch=not progress.is_epoch_end)
            else:
                self._loaders.go_on(state["loaders"], loop.epoch_progress.current.processed)
                # Lightning does not know that the loaders are where they were.
                warnings.filterwarnings("ignore", ".*your dataloader is not resumable")
            for loader, seed in zip(self._validation_loaders, state.get("validation_seeds", []), strict=False):
                self._loaders.take_seed(loader, seed)
        for loader, states in zip(self._validation_loaders, state["validation_generators"], strict=False):
            rng.restore({**rng.capture(), "generators": states}, generators_of(loader))
        metrics.restore(state["metrics"], self._trainer, self._trainer.lightning_module)
        progress.catch_up(loop)
        self._set_gradients(state["gradients"])
        rng.restore(state["rng"])

    def _resume_other(self, state: dict[str, Any], progress: Progress) -> None:
        loop = self._trainer.fit_loop
        rest = "and a new epoch begins"
        if not progress.is_epoch_end and state["loaders"] is not None and self._loaders is not None:
            if self._loaders.deal_anew(state["loaders"], self._trainer.global_rank, self._trainer.world_size):
                rest = "and the samples that are left of the epoch are dealt out anew"
            else:
                loop.epoch_loop.batch_progress.current.reset()
                rest = "and the epoch begins again with its first batch"
        self._say_once(
            "the snapshot was saved by %s ranks and is loaded by %s: random numbers, metrics, gradients that were "
            "being accumulated and states of data loaders, of which each rank had its own, are not restored, %s",
            str(state["world_size"]),
            str(self._trainer.world_size),
            rest,
        )

    def _set_gradients(self, state: dict[str, Any] | None) -> None:
        module = self._trainer.lightning_module
        if not gradients.restore(state, module, self._trainer.strategy.reduce_boolean_decision) and state is not None:
            self._say_once(
                "the gradients that were being accumulated are not restored, because the parameters are spread over "
                "ranks in another way than at the save: the first step has fewer batches"
            )

    # --- small things --------------------------------------------------------------------------------------------

    @property
    def _is_fit(self) -> bool:
        return bool(self._trainer.state.fn == "fit")

    @property
    def _is_running(self) -> bool:
        # After an exception, other ranks may be gone, and hooks and metrics would wait for them.
        return bool(self._trainer.state.status == "running")

    def _say_once(self, message: str, *values: str) -> None:
        if message not in self._said and self._trainer.is_global_zero:
            self._said.add(message)
            _logger.warning(message, *values)


def _generator_states(loaders: list[Any]) -> list[Any]:
    return [rng.capture(generators_of(loader))["generators"] for loader in loaders]
