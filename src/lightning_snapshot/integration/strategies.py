"""How all ranks of a Trainer save and load together: what `SnapshotCallback` adds to the Trainer's strategy.

========================  ==========================================================================================
strategy                  what is added
========================  ==========================================================================================
``DDPStrategy``           `ReplicatedStrategyMixin`
``FSDPStrategy``          `ShardedStrategyMixin`
``ModelParallelStrategy`` `ShardedStrategyMixin`
``DeepSpeedStrategy``     nothing: it saves in its own way
others                    `ResumeMixin`: rank 0 saves, with a warning if there are others
========================  ==========================================================================================
"""

import logging
import sys
from typing import Any

from lightning_snapshot.errors import RankTimeoutError, TargetMismatchError
from lightning_snapshot.integration.plugin import SnapshotCheckpointIO
from lightning_snapshot.integration.ranks import StateSharing, replicated_tensors
from lightning_snapshot.integration.resume.strategy import ResumeMixin
from lightning_snapshot.integration.sharded import ShardedState, model_state, optimizer_state
from lightning_snapshot.integration.wiring import is_stock_checkpoint, join, strategies_named
from lightning_snapshot.tensors import tensors_by_path

__all__ = ["ReplicatedStrategyMixin", "ShardedStrategyMixin", "let_all_ranks_save"]

# Of these, rank 0's value counts. The last one is what the averaging callbacks keep of the model.
_SHARED_KEYS = frozenset({"state_dict", "optimizer_states", "current_model_state"})
# Whoever stops a process with SIGTERM ends it a little later.
_SIGTERM_SECONDS = 10.0
_logger = logging.getLogger("lightning_snapshot")


def let_all_ranks_save(strategy: Any, plugin: SnapshotCheckpointIO) -> None:
    """Let all ranks take part in the saves of a strategy.

    Args:
        strategy: A Trainer's.
        plugin: That of the strategy, perhaps inside another one.

    Raises:
        UnsupportedFeatureError: The strategy is of a class that has its own way to save.
    """
    # DeepSpeedStrategy is a DDPStrategy, too.
    if isinstance(strategy, strategies_named("pytorch", "DeepSpeedStrategy")):
        return
    is_sharded = isinstance(strategy, strategies_named("pytorch", "FSDPStrategy", "ModelParallelStrategy"))
    is_replicated = isinstance(strategy, strategies_named("pytorch", "DDPStrategy")) and strategy.world_size > 1
    if not is_sharded and not is_replicated:
        join(strategy, ResumeMixin)
        return
    join(strategy, ShardedStrategyMixin if is_sharded else ReplicatedStrategyMixin)
    plugin.expect_single_writer()
    if plugin is not strategy.checkpoint_io:
        _logger.warning(
            "%s is not used: all ranks save together, and training waits for them",
            type(strategy.checkpoint_io).__name__,
        )


class _TogetherMixin(ResumeMixin):
    """What both kinds have in common. After an exception, other ranks may be gone, so nothing waits for them."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save on all ranks."""
        self.complete(checkpoint, filepath)
        if not _is_interrupted(self):
            self._save_together(checkpoint, filepath, storage_options)
        elif not _all_ranks_stop():
            self._save_alone(checkpoint, filepath, storage_options)
        else:
            try:
                self._save_together(checkpoint, filepath, storage_options, _SIGTERM_SECONDS)
            except RankTimeoutError as error:
                _logger.warning("%s", error)
                self._save_alone(checkpoint, filepath, storage_options)

    def _save_together(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any, timeout_seconds: float | None = None
    ) -> None:
        self.snapshots.save_on_all_ranks(
            checkpoint, filepath, self._sharing(), storage_options, timeout_seconds=timeout_seconds
        )

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks, unless they may be gone."""
        if not _is_interrupted(self):
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Give all ranks what one has, unless they may be gone."""
        return obj if _is_interrupted(self) else super().broadcast(obj, src)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Combine what all ranks have, unless they may be gone."""
        return tensor if _is_interrupted(self) else super().reduce(tensor, *args, **kwargs)

    def reduce_boolean_decision(self, decision: Any, *args: Any, **kwargs: Any) -> Any:
        """Decide together, unless the others may be gone."""
        return decision if _is_interrupted(self) else super().reduce_boolean_decision(decision, *args, **kwargs)


class ReplicatedStrategyMixin(_TogetherMixin):
    """For strategies with the whole model on each rank."""

    replaced = ("save_checkpoint",)

    def _setup_model(self, model: Any) -> Any:
        made = super()._setup_model(model)  # type: ignore[misc]  # the strategy is the next class in line
        if self.exact_resume is not None:
            self.exact_resume.prepare(made)
        return made

    def _sharing(self) -> StateSharing:
        # Between two averages of the models, they differ.
        is_equal = getattr(self, "_model_averager", None) is None
        replicated = replicated_tensors(self.lightning_module, self.optimizers) if is_equal else ()
        return StateSharing(_SHARED_KEYS, replicated)

    def optimizer_state(self, optimizer: Any) -> Any:
        """The state of an optimizer, on rank 0 alone if each rank has a part of it."""
        return {} if _is_alone(self) and _is_partitioned(optimizer) else super().optimizer_state(optimizer)

    def _save_alone(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        if any(map(_is_partitioned, self.optimizers)):
            _warn_of_missing_parts(self, filepath, "optimizer")
        elif self.is_global_zero:
            self.snapshots.save_checkpoint(checkpoint, filepath, storage_options)


class ShardedStrategyMixin(_TogetherMixin):
    """For strategies with a part of the model on each rank."""

    replaced = (
        "save_checkpoint",
        "load_checkpoint",
        "lightning_module_state_dict",
        "optimizer_state",
    )

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state of the model, in parts."""
        self.begin_save()
        return {} if _is_alone(self) else model_state(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state of an optimizer, in parts."""
        return {} if _is_alone(self) else optimizer_state(self.model, getattr(optimizer, "_optimizer", optimizer))

    def load_checkpoint(self, checkpoint_path: Any, **how: Any) -> Any:
        """Load this rank's parts into model and optimizers; the rest is returned.

        Args:
            checkpoint_path: Snapshot, or what the strategy itself has saved.
            how: ``weights_only``, from Lightning 2.6 on.
        """
        if is_stock_checkpoint(checkpoint_path, self.snapshots.storage_options):
            return super().load_checkpoint(checkpoint_path, **how)
        module = self.lightning_module
        is_fit = module.trainer.state.fn == "fit"
        state = ShardedState(self.model, self.optimizers if is_fit else [])
        targets = {
            **tensors_by_path({"state_dict": state.model_targets, "optimizer_states": state.optimizer_targets}),
            **tensors_by_path({"optimizer_states": state.numbered_optimizer_targets}),
        }
        skip = () if is_fit else ("optimizer_states",)
        checkpoint = self.snapshots.load_into(checkpoint_path, targets, skip=skip, **how)
        state.take_model(checkpoint.pop("state_dict"), strict=module.strict_loading)
        states = checkpoint.pop("optimizer_states", [])
        if states and len(states) != len(self.optimizers):
            msg = f"{checkpoint_path}: expected {len(self.optimizers)} optimizers, found {len(states)}"
            raise TargetMismatchError(msg)
        for number, each in enumerate(states):
            state.take_optimizer(number, each)
        return checkpoint

    def teardown(self) -> None:
        """Also that of the plugin, which these strategies forget."""
        super().teardown()
        self.checkpoint_io.teardown()

    def _sharing(self) -> StateSharing:
        return StateSharing(_SHARED_KEYS, ())

    def _save_alone(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:  # noqa: ARG002  # as above
        _warn_of_missing_parts(self, filepath, "model")


def _is_partitioned(optimizer: Any) -> bool:
    return hasattr(optimizer, "consolidate_state_dict")  # how Lightning recognises ZeroRedundancyOptimizer


def _warn_of_missing_parts(strategy: Any, filepath: Any, what: str) -> None:
    if strategy.is_global_zero:
        _logger.warning(
            "%s is not saved: after an exception other ranks may be gone, and each has a part of the %s", filepath, what
        )


def _is_interrupted(strategy: Any) -> bool:
    """Whether training has ended with an exception, which other ranks may not have."""
    trainer = getattr(strategy.lightning_module, "_trainer", None)
    return trainer is not None and trainer.state.status == "interrupted" and strategy.world_size > 1


def _all_ranks_stop() -> bool:
    """Whether the exception that is being handled is the one that Lightning raises on all ranks at the same step."""
    return type(sys.exc_info()[1]).__name__ == "SIGTERMException"


def _is_alone(strategy: Any) -> bool:
    return _is_interrupted(strategy) and not _all_ranks_stop()
