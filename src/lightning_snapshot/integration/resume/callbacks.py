"""What Lightning's own callbacks change for a while, and do not store, or not as it is."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

__all__ = ["catch_up", "frozen", "put_averages_right"]


def frozen(trainer: Any) -> list[str] | None:
    """Names of the parameters that are not trained now; None if no callback changes that while training."""
    if not any(_named(trainer, "BaseFinetuning")):
        return None
    return [name for name, each in trainer.lightning_module.named_parameters() if not each.requires_grad]


def catch_up(trainer: Any, names: Sequence[str] | None) -> None:
    """Let a resumed run have what these callbacks had changed by the time of the save.

    Args:
        trainer: In the epoch in which it goes on.
        names: From `frozen`.
    """
    for callback in _named(trainer, "GradientAccumulationScheduler"):
        trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)
    if names is None or not any(_named(trainer, "BaseFinetuning")):
        return
    for name, parameter in trainer.lightning_module.named_parameters():
        parameter.requires_grad_(name not in names)
    for module in trainer.lightning_module.modules():
        # They freeze and release these with their parameters.
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:  # noqa: SLF001  # torch has no public name
            module.track_running_stats = module.weight.requires_grad


def put_averages_right(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Let a checkpoint that is saved between the batches of a validation have weights and averages where they belong.

    ``WeightAveraging`` has exchanged them for the validation, and stores them as if it had not.
    """
    if any(_named(trainer, "WeightAveraging")) and "current_model_state" in checkpoint:
        keys = ("state_dict", "current_model_state")
        checkpoint.update(zip(keys, [checkpoint[key] for key in reversed(keys)], strict=True))


def _named(trainer: Any, name: str) -> Iterator[Any]:
    """The callbacks of a class of either namespace."""
    return (each for each in trainer.callbacks if any(cls.__name__ == name for cls in type(each).__mro__))
