"""What the ranks of a training have in common, and whose part of a snapshot a rank loads."""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import distributed, nn

from lightning_snapshot.manifest import Manifest
from lightning_snapshot.tensors import is_fillable, memory_key
from lightning_snapshot.view import keys_of_single_ranks

__all__ = ["RESUME_KEY", "StateSharing", "part_to_load", "rank_and_world_size", "replicated_tensors", "tensors_in"]

# Top-level key of what exact resume stores.
RESUME_KEY = "exact_resume"
_logger = logging.getLogger("lightning_snapshot")


def rank_and_world_size() -> tuple[int, int]:
    """Of this process among all; ``(0, 1)`` without a process group."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def part_to_load(manifest: Manifest) -> int:
    """Whose part of a snapshot this process loads: its own, or rank 0's if there were more or fewer ranks then.

    The latter is said once, by rank 0, if something is lost that way.
    """
    rank, world_size = rank_and_world_size()
    if manifest.world_size == world_size:
        return rank
    # Whoever resumes says what becomes of that.
    keys = [key for key in keys_of_single_ranks(manifest) if key != RESUME_KEY]
    if keys and rank == 0:
        _logger.warning(
            "the snapshot was saved by %d ranks and is loaded by %d, so all of them get rank 0's part of what each "
            "rank had of its own: %s",
            manifest.world_size,
            world_size,
            ", ".join(keys),
        )
    return 0


class StateSharing:
    """Which parts of a state all ranks have in common; see `lightning_snapshot.save_as_one.MainRankSharing`.

    Args:
        keys: Top-level keys of which rank 0's value counts.
        replicated: Tensors that all ranks hold alike. The same memory in a state means the same tensor.
    """

    def __init__(self, keys: Collection[str], replicated: Iterable[torch.Tensor]) -> None:
        self._keys = frozenset(keys)
        self._replicated = {memory_key(tensor) for tensor in replicated}

    def is_shared(self, key: str) -> bool:
        """Whether rank 0's value of a top-level key counts."""
        return key in self._keys

    def is_split(self, path: str, tensor: torch.Tensor) -> bool:  # noqa: ARG002  # the protocol's
        """Whether all ranks hold a tensor alike."""
        return memory_key(tensor) in self._replicated


def replicated_tensors(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """What ``DistributedDataParallel`` keeps equal on all ranks: parameters, and what optimizers derive from them.

    Buffers are not among them: those of batch norm differ until the next forward pass.

    Args:
        module: The one inside the wrapper.
        optimizers: Those of its parameters.
    """
    # How DistributedDataParallel is told what to leave alone; a parameter of the module itself begins with a dot there.
    ignored = {name.removeprefix(".") for name in getattr(module, "_ddp_params_and_buffers_to_ignore", ())}
    parameters = {parameter for name, parameter in module.named_parameters() if name not in ignored}
    yield from filter(is_fillable, parameters)
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if parameter in parameters:
                yield from tensors_in(state)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors with memory of their own in mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        if is_fillable(value):
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
