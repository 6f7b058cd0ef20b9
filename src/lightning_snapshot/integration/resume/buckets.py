"""The order in which ``DistributedDataParallel`` lays gradients side by side to add them up over ranks.

Sums of more than two numbers depend on the order in which they are added, and that on where a gradient lies. DDP begins
with one order, and takes the one in which gradients came in its first step for all others. A resumed run has to begin
with that.
"""

import re
from typing import Any, TypeGuard

from torch.nn.parallel import DistributedDataParallel

__all__ = ["gradient_order", "set_gradient_order"]


def gradient_order(model: object) -> list[int] | None:
    """The numbers of a model's parameters in that order; None if it still has the one that it began with.

    To be called after a batch, on all ranks: what the next step begins with is done now, so that it is known to a save.

    Args:
        model: What the strategy trains.
    """
    if not _is_known(model):
        return None
    try:
        model.reducer._rebuild_buckets()  # noqa: SLF001  # torch has no public way
    except RuntimeError:
        return None  # parameters got no gradients: the next step says so, if there is one
    model.logger.set_runtime_stats_and_log()
    told = model._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")  # noqa: SLF001  # as above
    return [int(number) for number in re.findall(r"\d+", told)] or None


def set_gradient_order(model: object, order: list[int]) -> bool:
    """Let a model that has made no step yet begin with an order.

    Args:
        model: What the strategy trains.
        order: From `gradient_order`.

    Returns:
        Whether it has as many parameters.
    """
    if not _is_known(model):
        return False
    parameters, are_sparse = model._build_params_for_reducer()  # noqa: SLF001  # as above
    if sorted(order) != list(range(len(parameters))):
        return False
    ordered = [parameters[number] for number in order]
    names = model._build_debug_param_to_name_mapping(ordered)  # noqa: SLF001  # as above
    # Each holds memory for all gradients.
    del model.reducer, model.logger
    model._ddp_init_helper(ordered, [are_sparse[number] for number in order], names, model.static_graph)  # noqa: SLF001  # as above
    if model.static_graph:
        model.reducer._set_static_graph()  # noqa: SLF001  # as above
        model.logger._set_static_graph()  # noqa: SLF001  # as above
    model.reducer._push_all_rebuilt_params()  # noqa: SLF001  # as if they had come in their order
    return True


def _is_known(model: Any) -> TypeGuard[Any]:
    """Whether it is one that changes the order."""
    if not isinstance(model, DistributedDataParallel) or model.mixed_precision is not None:
        return False
    changes = model.static_graph or not model.find_unused_parameters
    return changes and not model._use_python_reducer  # noqa: SLF001  # as above
