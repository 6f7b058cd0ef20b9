"""The two ready-made stateful objects of torchsnapshot's API, and the protocol that they follow."""

from collections import UserDict
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch

__all__ = ["RNGState", "StateDict", "Stateful", "copies_tensors_as_they_are"]


@runtime_checkable
class Stateful(Protocol):
    """Anything that gives and takes its state: modules, optimizers, schedulers, data loaders, `StateDict`."""

    def state_dict(self) -> dict[str, Any]:
        """The state. Tensors in it are read in place while the snapshot is written."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take the state back."""
        ...


class StateDict(UserDict[str, Any]):
    """A dictionary that is its own state: ``StateDict(step=0, best=0.5)``."""

    def state_dict(self) -> dict[str, Any]:
        """The plain dictionary inside."""
        return self.data

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace the content."""
        self.data.clear()
        self.data.update(state_dict)


class RNGState:
    """The state of torch's CPU random number generator.

    As in torchsnapshot, `Snapshot.take` leaves the generator as it found it, and `Snapshot.restore` sets it last, so
    that nothing that other objects do on the way changes the numbers that follow.
    """

    def state_dict(self) -> dict[str, torch.Tensor]:
        """``{"rng_state": uint8 vector}``."""
        return {"rng_state": torch.get_rng_state()}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Set the generator."""
        torch.set_rng_state(state_dict["rng_state"])


def copies_tensors_as_they_are(stateful: object) -> bool:
    """Whether an object takes each tensor of a state for the very tensor of its own that has that key, or drops it.

    Only then may its own tensors be filled before ``load_state_dict`` sees them: code that swaps or changes what it
    loads would otherwise work on tensors that change under its hands.
    """
    if isinstance(stateful, StateDict):
        return type(stateful) is StateDict
    if isinstance(stateful, torch.optim.Optimizer):
        hooks = (stateful._optimizer_load_state_dict_pre_hooks, stateful._optimizer_load_state_dict_post_hooks)  # noqa: SLF001  # no public way to ask
        return _is_libraries_own(stateful.load_state_dict) and not any(hooks)
    if not isinstance(stateful, torch.nn.Module) or not _is_libraries_own(stateful.load_state_dict):
        return False
    return not any(
        not all(map(_is_libraries_own, (part._load_from_state_dict, *part._load_state_dict_pre_hooks.values())))  # noqa: SLF001  # as above
        for part in stateful.modules()
    )


def _is_libraries_own(method: Any) -> bool:
    method = getattr(method, "hook", method)  # how torch wraps hooks
    while isinstance(method, partial):
        method = method.func
    return getattr(method, "__module__", "").partition(".")[0] in {"torch", "torchmetrics"}
