"""State of models and optimizers that are spread over ranks, and loading into it: FSDP, FSDP2, tensor parallelism.

Model and optimizer states come from and go to ``torch.distributed.checkpoint.state_dict``, always in parts. Optimizer
state has parameter names for keys. Of what a single device or DDP has saved, with numbers for keys, the order counts.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn

from lightning_snapshot.errors import TargetMismatchError
from lightning_snapshot.stateful import copies_tensors_as_they_are

__all__ = ["ShardedState", "model_state", "optimizer_state"]


def _api() -> Any:
    # Takes long to import, and lacks where torch was built without distributed.
    return import_module("torch.distributed.checkpoint.state_dict")


def model_state(model: nn.Module) -> dict[str, Any]:
    """Name → tensor. Those that are spread over ranks are not gathered."""
    if _is_fsdp1(model) and torch.__version__ < "2.7":
        return _fsdp1_model_state(model)
    state: dict[str, Any] = _api().get_model_state_dict(model)
    return state


def _fsdp1_model_state(model: nn.Module) -> dict[str, Any]:
    # Before torch 2.7, `get_model_state_dict` fails on ranks that hold nothing of a tensor (pytorch issue 141799).
    fsdp: Any = import_module("torch.distributed.fsdp")
    configs = fsdp.ShardedStateDictConfig(), fsdp.ShardedOptimStateDictConfig()
    with fsdp.FullyShardedDataParallel.state_dict_type(model, fsdp.StateDictType.SHARDED_STATE_DICT, *configs):
        return model.state_dict()


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state by parameter name; by number if there is none yet."""
    # torch would make a step to have a state, from which a later run would start another way.
    if not optimizer.state and not _is_fsdp1(model):
        return optimizer.state_dict()
    state: dict[str, Any] = _api().get_optimizer_state_dict(model, optimizer)
    return state


class ShardedState:
    """A model and its optimizers, as the targets of a load.

    Args:
        model: Set up by its strategy.
        optimizers: Of its parameters.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._templates = [_api().get_optimizer_state_dict(model, optimizer) for optimizer in optimizers]

    @property
    def model_targets(self) -> dict[str, torch.Tensor]:
        """Name → tensor to read into."""
        state = model_state(self._model)
        if not copies_tensors_as_they_are(self._model):
            state = {name: value.clone() for name, value in state.items() if isinstance(value, torch.Tensor)}
        return state

    @property
    def optimizer_targets(self) -> list[dict[str, Any]]:
        """For each optimizer its state by parameter name, with the tensors to read into."""
        return self._templates

    @property
    def numbered_optimizer_targets(self) -> list[dict[str, Any]]:
        """The same by number."""
        return [_by_number(state) for state in self._templates]

    def take_model(self, state: dict[str, Any], *, strict: bool) -> None:
        """Load a state of the model, the tensors of which are parts like those of `model_targets`, or whole.

        Args:
            state: Name → tensor.
            strict: Whether names may neither lack nor be unknown.
        """
        _api().set_model_state_dict(self._model, state, options=_api().StateDictOptions(strict=strict))

    def take_optimizer(self, number: int, state: Mapping[str, Any]) -> None:
        """Load the state of an optimizer.

        Args:
            number: Which one.
            state: By parameter name, or by number.

        Raises:
            TargetMismatchError: It is of more or fewer parameters.
        """
        optimizer = self._optimizers[number]
        if not state["state"]:
            optimizer.load_state_dict(dict(state))
            return
        # A parameter that never had a gradient has no state.
        options = _api().StateDictOptions(strict=False)
        named = _by_name(state, self._templates[number])
        _api().set_optimizer_state_dict(self._model, optimizer, optim_state_dict=named, options=options)


def _is_fsdp1(model: nn.Module) -> bool:
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    return "FullyShardedDataParallel" in kinds


def _parameters(state: Mapping[str, Any]) -> list[str | int]:
    return [parameter for group in state["param_groups"] for parameter in group["params"]]


def _by_number(state: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {name: number for number, name in enumerate(_parameters(state))}
    return {"state": {numbers[name]: value for name, value in state["state"].items()}}


def _by_name(state: Mapping[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
    """A state whose keys are parameter names."""
    found, names = _parameters(state), _parameters(template)
    if all(isinstance(parameter, str) for parameter in found):
        return dict(state)
    if len(found) != len(names):
        msg = (
            f"expected the state of an optimizer of {len(names)} parameters, found {len(found)}; load with the "
            "optimizers that the model was saved with"
        )
        raise TargetMismatchError(msg)
    name_of = dict(zip(found, names, strict=True))
    groups = [{**group, "params": [name_of[number] for number in group["params"]]} for group in state["param_groups"]]
    by_name = {name_of[number]: value for number, value in state["state"].items()}
    return {**state, "state": by_name, "param_groups": groups}
