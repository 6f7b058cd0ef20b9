"""``LightningModule.on_train_batch_end``, which Lightning calls after the callbacks that save at the end of a batch.

What it changes, such as an average of the weights, would not be in their checkpoints, and a resumed run, which goes on
with the next batch, would never do it. So it is called before such a save, and not again after it.
"""

from functools import partial
from typing import Any

__all__ = ["BatchEnd"]

_HOOK = "on_train_batch_end"


class BatchEnd:
    """The end of a batch, in the training thread.

    Args:
        trainer: The Trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        # With what Lightning will call the module's hook, while a callback runs that may save before that.
        self._coming: tuple[Any, ...] | None = None

    def watch(self) -> None:
        """Begin to note when checkpoint callbacks run: all others have run by then."""
        for callback in self._trainer.checkpoint_callbacks:
            if _HOOK not in vars(callback) or _is_ours(callback):
                setattr(callback, _HOOK, partial(self._run, callback))

    def leave(self) -> None:
        """Leave callbacks and module as they were."""
        for callback in self._trainer.checkpoint_callbacks:
            if _is_ours(callback):
                delattr(callback, _HOOK)
        if vars(self._trainer.lightning_module).get(_HOOK) == self._skip:
            self._skip()

    def finish(self) -> None:
        """Called before a save."""
        if self._coming is None:
            return
        module, arguments = self._trainer.lightning_module, self._coming
        self._coming = None  # the module's hook may save, too
        with self._trainer.profiler.profile(f"[LightningModule]{type(module).__name__}.{_HOOK}"):
            module.on_train_batch_end(*arguments)
        vars(module)[_HOOK] = self._skip

    def _run(self, callback: Any, trainer: Any, module: Any, *arguments: Any) -> None:
        is_free = _HOOK not in vars(module)  # neither by an earlier save of this batch, nor by the user
        self._coming = arguments if is_free else None
        try:
            getattr(type(callback), _HOOK)(callback, trainer, module, *arguments)
        finally:
            self._coming = None

    def _skip(self, *_: Any) -> None:
        """In place of the module's hook, once."""
        del vars(self._trainer.lightning_module)[_HOOK]


def _is_ours(callback: Any) -> bool:
    """Whether a hook of a callback is that of a `BatchEnd`, perhaps one that an exception has left behind."""
    function = getattr(vars(callback).get(_HOOK), "func", None)
    return isinstance(getattr(function, "__self__", None), BatchEnd)
