"""Gradients between two steps of the optimizer: what ``accumulate_grad_batches`` has collected on this rank."""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import nn

__all__ = ["capture", "restore"]


def capture(module: nn.Module) -> dict[str, Any] | None:
    """Copies of this rank's parts of all gradients, as plain data.

    Returns:
        Name → part; None if gradients are elsewhere than with their parameters, or spread over ranks in another way.
    """
    parameters = {name: each for name, each in module.named_parameters() if each.grad is not None}
    if any(_unreduced(module)) or any(_layout(each.grad) != _layout(each) for each in parameters.values()):
        return None
    return {
        name: {"part": _part(each.grad).detach().cpu().clone(), "layout": _layout(each)}
        for name, each in parameters.items()
    }


def restore(state: dict[str, Any] | None, module: nn.Module, agree: Callable[[bool], bool]) -> bool:
    """Give parameters their gradients again, on all ranks or on none; called on all ranks.

    Args:
        state: From `capture`.
        module: Spread over ranks as it was then.
        agree: Whether all ranks can do it.

    Returns:
        Whether it was done.
    """
    parameters = dict(module.named_parameters())
    fits = state is not None and all(
        name in parameters and _layout(parameters[name]) == each["layout"] for name, each in state.items()
    )
    # First all ranks, because a rank may hold nothing of a parameter by which others see that they cannot.
    if not agree(fits) or state is None:
        return False
    for name, each in state.items():
        parameters[name].grad = _with_part(parameters[name], each["part"])
    return True


def _part(tensor: Any) -> Any:
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _with_part(like: Any, part: torch.Tensor) -> torch.Tensor:
    # What was loaded may be a private mapping of a file, which a copy is independent of.
    part = part.to(_part(like).device, copy=True)
    if not hasattr(like, "to_local"):
        return part
    api: Any = import_module("torch.distributed.tensor")  # takes long to import
    shape = {"shape": like.shape, "stride": like.stride()}
    gradient: torch.Tensor = api.DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, **shape)
    return gradient


def _layout(tensor: Any) -> list[Any]:
    spread = [repr(tensor.placements), list(tensor.device_mesh.shape)] if hasattr(tensor, "to_local") else []
    return [list(_part(tensor).shape), *spread]


def _unreduced(module: Any) -> Iterator[bool]:
    """Whether ``fully_shard`` keeps gradients that ranks have not added up, as ``set_requires_gradient_sync`` lets it.

    It has no public way to tell.
    """
    states = [each._get_fsdp_state() for each in module.modules() if hasattr(each, "_get_fsdp_state")]  # noqa: SLF001  # as said
    for state in states:
        # Older versions of torch have one group at most for a module.
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # noqa: SLF001  # as said
        for group in filter(None, groups):
            yield group._partial_reduce_output is not None  # noqa: SLF001  # as said
            for each in group.fsdp_params:
                yield each.unsharded_accumulated_grad is not None
                yield getattr(getattr(each, "_unsharded_param", None), "grad", None) is not None
