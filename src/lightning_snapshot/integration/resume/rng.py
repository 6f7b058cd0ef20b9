"""The states of random number generators, as plain data.

Texts of bytes stand for arrays as long as they stay in memory; `storable` makes tensors of them, so that they go to the
data files of a snapshot and not to its metadata.
"""

import random
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch

from lightning_snapshot.memory import memory_at

__all__ = ["Rng", "capture", "generators_of", "restore", "storable"]

Rng: TypeAlias = dict[str, Any]


def capture(generators: Sequence[torch.Generator] = (), *, cuda: bool = False) -> Rng:
    """The states of Python's, numpy's (if it is imported) and torch's global generators, and of some others.

    Args:
        generators: Further ones.
        cuda: Those of all CUDA devices, too.
    """
    version, words, gauss = random.getstate()
    state: Rng = {
        "python": {"version": version, "words": array("I", words).tobytes(), "gauss": gauss},
        "torch": _bytes_of(torch.get_rng_state()),
        "generators": [_bytes_of(generator.get_state()) for generator in generators],
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = _without_arrays(numpy.random.get_state(legacy=False))
    # Asking a device that was never used would wake it up, and its generator has drawn nothing.
    if cuda and torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no type there
        state["cuda"] = [_bytes_of(each) for each in torch.cuda.get_rng_state_all()]
    return state


def restore(state: Rng, generators: Sequence[torch.Generator] = ()) -> None:
    """Set all generators that a state knows and that are there.

    Args:
        state: From `capture`, with or without `storable`.
        generators: In the same order as then.
    """
    python = state["python"]
    words = array("I", _as_bytes(python["words"]))
    random.setstate((python["version"], tuple(words), python["gauss"]))
    torch.set_rng_state(_byte_tensor(state["torch"]))
    for generator, its_state in zip(generators, state["generators"], strict=False):
        generator.set_state(_byte_tensor(its_state))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(_with_arrays(state["numpy"], numpy))
    cuda = state.get("cuda", [])
    # Workers must not even ask for devices.
    if cuda and torch.cuda.is_available():
        for device, its_state in enumerate(cuda[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_byte_tensor(its_state), device)


def storable(value: Any) -> Any:
    """A copy of nested plain data with byte tensors in the place of bytes."""
    if isinstance(value, bytes):
        return _byte_tensor(value)
    if isinstance(value, dict):
        return {key: storable(item) for key, item in value.items()}
    return [storable(item) for item in value] if isinstance(value, list) else value


def generators_of(loader: object) -> list[torch.Generator]:
    """The generators of a data loader and its samplers, which are not the global ones."""
    return list({id(generator): generator for generator in _generators_of(loader)}.values())


def _generators_of(loader: object) -> Iterator[torch.Generator]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    for owner in (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            yield generator


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(memory_at(tensor.data_ptr(), tensor.nbytes))


def _as_bytes(value: bytes | torch.Tensor) -> bytes:
    return _bytes_of(value) if isinstance(value, torch.Tensor) else value


def _byte_tensor(value: bytes | torch.Tensor) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.frombuffer(bytearray(value), dtype=torch.uint8)


def _without_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_arrays(item) for key, item in value.items()}
    return {"dtype": value.dtype.str, "array": value.tobytes()} if hasattr(value, "tobytes") else value


def _with_arrays(value: Any, numpy: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return numpy.frombuffer(_as_bytes(value["array"]), dtype=value["dtype"])
    return {key: _with_arrays(item, numpy) for key, item in value.items()}
