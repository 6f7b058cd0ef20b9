"""The objects that `Snapshot.take` is given: what their state is, and what all ranks hold alike of it."""

import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_snapshot.errors import TargetMismatchError, UnsupportedValueError
from lightning_snapshot.stateful import RNGState, Stateful
from lightning_snapshot.tree import ALIAS_ROOT, encode_key

__all__ = ["Replicated", "check_rng_states", "state_dicts"]


def check_rng_states(app_state: Mapping[str, Stateful]) -> None:
    """Refuse a second `RNGState`.

    Raises:
        TargetMismatchError: There is one.
    """
    found = [key for key, stateful in app_state.items() if isinstance(stateful, RNGState)]
    if len(found) > 1:
        msg = f"expected at most one RNGState, found {found}"
        raise TargetMismatchError(msg)


def state_dicts(app_state: Mapping[str, Any]) -> dict[str, Any]:
    """All state dicts, with that of the `RNGState` taken first, and the generator put back at the end.

    Raises:
        TargetMismatchError: There are several.
        UnsupportedValueError: An object has no state.
    """
    check_rng_states(app_state)
    for key, stateful in app_state.items():
        if not isinstance(stateful, Stateful):
            msg = (
                f"{key}: expected an object with state_dict() and load_state_dict(), found {type(stateful).__name__}; "
                f"put plain values into a StateDict: StateDict({key}=…)"
            )
            raise UnsupportedValueError(msg)
    before = torch.get_rng_state()
    rng = {key: stateful.state_dict() for key, stateful in app_state.items() if isinstance(stateful, RNGState)}
    # As in `restore`, all ranks in one order.
    states = {key: rng[key] if key in rng else app_state[key].state_dict() for key in sorted(app_state)}
    states = {key: states[key] for key in app_state}
    if rng:
        torch.set_rng_state(before)
    return states


class Replicated:
    """What is stored once: values that a glob matches, and what ``DistributedDataParallel`` keeps equal on all ranks.

    Args:
        app_state: The objects.
        globs: Of logical paths.
    """

    def __init__(self, app_state: Mapping[str, Any], globs: Iterable[str]) -> None:
        self._matches = re.compile("|".join(map(fnmatch.translate, globs)) or r"(?!)").match
        self._parameters: set[str] = set()
        self._buffers: set[str] = set()
        for key, stateful in app_state.items():
            if isinstance(stateful, DistributedDataParallel):
                ignored = {f"module.{name}" for name in stateful.parameters_to_ignore}
                for found, named in (
                    (self._parameters, stateful.named_parameters(remove_duplicate=False)),
                    (self._buffers, stateful.named_buffers(remove_duplicate=False)),
                ):
                    found |= {f"{encode_key(key)}/{encode_key(name)}" for name, _ in named if name not in ignored}

    def is_shared(self, path: str) -> bool:
        """See `Sharing`."""
        if path in self._parameters or path in self._buffers:
            return True
        # What is under an alias has no name of its own that could be compared.
        return self._matches(path) is not None and not path.startswith(f"{ALIAS_ROOT}/")

    def is_split(self, path: str, tensor: torch.Tensor) -> bool:  # noqa: ARG002  # the protocol's
        """See `Sharing`: ranks may have seen different data since rank 0's buffers were sent to all."""
        return path not in self._buffers
