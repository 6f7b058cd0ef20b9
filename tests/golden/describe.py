"""A loaded state as the tree of plain JSON that each golden's ``expected.json`` holds (see ``data/README.md``)."""

import hashlib
import json
import struct
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

Node = dict[str, Any]

_HEX_LIMIT_BYTES = 512


def describe(value: Any) -> Node:
    """Describe a state: containers and primitives as such, any other value as an object."""
    kind = type(value)
    if kind is list:
        return {"kind": "list", "items": [describe(item) for item in value]}
    if kind in (dict, OrderedDict) and is_flattened(value):
        return {"kind": kind.__name__, "items": [[key, describe(item)] for key, item in value.items()]}
    if kind in (int, bool, str, bytes, float) or isinstance(value, torch.Tensor):
        return describe_content(value)
    return {"kind": "object", "type": f"{kind.__module__}.{kind.__name__}", "value": describe_content(value)}


def is_flattened(value: dict[Any, Any]) -> bool:
    """Whether torchsnapshot gives the items of a dictionary entries of their own."""
    return all(isinstance(key, (str, int)) for key in value) and len({str(key) for key in value}) == len(value)


def describe_content(value: Any) -> Node:
    """Describe a value by its exact type, with all that it holds."""
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value)
    kind = type(value)
    match value:
        case int() if kind is int:
            return {"kind": "int", "value": str(value)}
        case bool() | str():
            return {"kind": kind.__name__, "value": value}
        case float() if kind is float:
            return {"kind": "float", "bits_le_hex": struct.pack("<d", value).hex(), "repr": repr(value)}
        case bytes() | bytearray():
            return {"kind": kind.__name__, "hex": value.hex()}
        case None:
            return {"kind": "none"}
        case complex() if kind is complex:
            return {"kind": "complex", "re": _exact(value.real), "im": _exact(value.imag)}
        case range():
            return {"kind": "range", "args": [value.start, value.stop, value.step]}
        case torch.Size():
            return {"kind": "torch.Size", "items": list(value)}
        case torch.dtype():
            return {"kind": "torch.dtype", "name": str(value)}
        case torch.device():
            return {"kind": "torch.device", "name": str(value)}
        case np.ndarray():
            return {"kind": "numpy.ndarray", "dtype": value.dtype.str, "shape": list(value.shape), **_array(value)}
        case np.generic():
            return {"kind": "numpy.generic", "dtype": value.dtype.str, **_array(np.asarray(value))}
        case tuple() | list() | set() | frozenset():
            items = sorted(value) if isinstance(value, (set, frozenset)) else value
            return {"kind": kind.__name__, "items": [describe_content(item) for item in items]}
        case dict():
            return {"kind": kind.__name__, "items": _pairs(value.items())}
    msg = f"expected.json has no form for {kind}"
    raise TypeError(msg)


def _pairs(items: Iterable[tuple[Any, Any]]) -> list[list[Any]]:
    return [
        [key if isinstance(key, (str, int)) else describe_content(key), describe_content(item)] for key, item in items
    ]


def _exact(number: float) -> str:
    # `float.hex` of a whole number, in the form of C99's %a with all digits.
    return float(number).hex()


def _array(array: np.ndarray[Any, Any]) -> Node:
    return blob(np.ascontiguousarray(array).tobytes())


def blob(data: bytes) -> Node:
    """Row-major little-endian bytes."""
    short = {"hex": data.hex()} if len(data) <= _HEX_LIMIT_BYTES else {}
    return {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), **short}


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Elements in row-major order."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return dense.view(torch.uint8).numpy().tobytes()


def _describe_tensor(tensor: torch.Tensor) -> Node:
    head = {"dtype": str(tensor.dtype), "shape": list(tensor.shape)}
    if not tensor.is_quantized:
        return {"kind": "tensor", **head, **blob(bytes_of(tensor))}
    node = {"kind": "qtensor", **head, "int_repr": blob(bytes_of(tensor.int_repr()))}
    if tensor.qscheme() is torch.per_tensor_affine:
        scale, zero_point = _exact(tensor.q_scale()), tensor.q_zero_point()
        return {**node, "qscheme": "per_tensor_affine", "scale": scale, "zero_point": zero_point}
    return {
        **node,
        "qscheme": "per_channel_affine",
        "axis": tensor.q_per_channel_axis(),
        "scales": [_exact(scale) for scale in tensor.q_per_channel_scales().tolist()],
        "zero_points": tensor.q_per_channel_zero_points().tolist(),
    }


def as_loaded(node: Any) -> Any:
    """What a reader without processes has to give for a node: the full tensor for a sharded one."""
    if isinstance(node, list):
        return [as_loaded(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("kind") in {"sharded_tensor", "dtensor"}:
        return {"kind": "tensor", "dtype": node["dtype"], "shape": node["global_shape"], **node["global"]}
    return {name: as_loaded(part) for name, part in node.items()}


def text_of(node: Any) -> str:
    """A tree as text, for comparisons that tell ``True`` from ``1`` and show what differs."""
    return json.dumps(node, indent=1, sort_keys=True)
