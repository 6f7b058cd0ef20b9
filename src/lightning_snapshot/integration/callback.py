"""`SnapshotCallback`: what the plugin cannot do alone, because it does not know the Trainer."""

from typing import Any

import torch

from lightning_snapshot.integration.namespaces import bases
from lightning_snapshot.integration.strategies import let_all_ranks_save
from lightning_snapshot.integration.wiring import plugin_of
from lightning_snapshot.stateful import copies_tensors_as_they_are
from lightning_snapshot.storage import clear_leftovers
from lightning_snapshot.tensors import tensors_by_path

__all__ = ["SnapshotCallback"]


class SnapshotCallback(*bases("pytorch", "callbacks.callback", "Callback")):  # type: ignore[misc]  # bases depend on what is installed
    """Lets all ranks save together, and checkpoints load straight into the model, without a second copy in memory.

    Lightning adds it by itself (through an entry point) where the program uses `SnapshotCheckpointIO`. Adding it once
    more does no harm. Without our plugin it does nothing.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002  # Lightning's hook, either namespace
        """Called right before Lightning restores a checkpoint."""
        plugin = plugin_of(trainer.strategy)
        if plugin is None:
            return
        let_all_ranks_save(trainer.strategy, plugin)
        if not _may_edit_checkpoint(trainer, pl_module):

            def tensors(path: Any) -> dict[str, torch.Tensor]:
                # Lightning notes the path right before it restores; whoever else loads gets tensors of his own.
                is_restore = trainer.ckpt_path is path
                return tensors_by_path({"state_dict": pl_module.state_dict()}) if is_restore else {}

            plugin.read_next_checkpoint_into(tensors)

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002  # as above
        """Called after the restore, as are the hooks below: a load from now on is somebody else's."""
        _take_back(trainer)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002  # as above
        """See `on_sanity_check_start`."""
        _take_back(trainer)

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002  # as above
        """Called before the first save, when all folders are known and the checkpoint to resume from is loaded."""
        _clear_leftovers(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002  # as above
        """Called also if there was nothing to resume from but a leftover, which must not stop the next start, too."""
        if trainer.state.fn == "fit":
            _clear_leftovers(trainer)


def _clear_leftovers(trainer: Any) -> None:
    if trainer.is_global_zero and plugin_of(trainer.strategy) is not None:
        folders = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
        for folder in dict.fromkeys([trainer.default_root_dir, *folders]):
            if folder is not None:
                clear_leftovers(folder)


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
)
