"""What ``ModelCheckpoint`` believes to have saved, corrected where a save behind training has failed."""

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Rankings"]


class Rankings:
    """The lists of best and last checkpoints of a Trainer's callbacks.

    Args:
        trainer: Whose.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._scores: dict[str, Any] = {}

    def note(self) -> None:
        """Remember the scores of all checkpoints, for Lightning forgets them when it asks for a removal."""
        for callback in self._trainer.checkpoint_callbacks:
            self._scores |= getattr(callback, "best_k_models", {})

    def replace(self, path: str, kept: Sequence[str]) -> bool:
        """Put what stays in place of a checkpoint that is not there.

        Args:
            path: What is not there.
            kept: What stays, because it was to go when ``path`` is there.

        Returns:
            Whether a callback looks after it from now on.
        """
        # All of them, not only up to the first that says yes.
        replaced = [self._replace(callback, path, kept) for callback in self._trainer.checkpoint_callbacks]
        return any(replaced)

    def _replace(self, callback: Any, path: str, kept: Sequence[str]) -> bool:
        is_used = False
        best = getattr(callback, "best_k_models", {})
        if path in best:
            del best[path]
            again = {each: self._scores[each] for each in kept if each in self._scores}
            best |= again
            _rank(callback)
            is_used = bool(again)
        elif getattr(callback, "best_model_path", "") == path:
            callback.best_model_path = kept[0] if kept else ""
            is_used = bool(kept)
        if getattr(callback, "last_model_path", "") == path:
            callback.last_model_path = kept[0] if kept else ""
            is_used = is_used or bool(kept)
        return is_used


def _rank(callback: Any) -> None:
    """Say which of the listed checkpoints is the best and which one goes next, as ``ModelCheckpoint`` does it."""
    best = callback.best_k_models
    best_of, worst_of = (min, max) if callback.mode == "min" else (max, min)
    callback.best_model_path = best_of(best, key=best.get) if best else ""
    callback.best_model_score = best.get(callback.best_model_path)
    is_full = len(best) == callback.save_top_k
    callback.kth_best_model_path = worst_of(best, key=best.get) if is_full else ""
    callback.kth_value = best[callback.kth_best_model_path] if is_full else _beaten_by_all(callback.mode)


def _beaten_by_all(mode: str) -> torch.Tensor:
    return torch.tensor(torch.inf if mode == "min" else -torch.inf)
