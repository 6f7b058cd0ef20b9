"""States to save: Hypothesis strategies, and a comparison that sees every bit and every stride."""

import enum
import itertools
import math
import struct
from collections import OrderedDict, defaultdict, deque
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from uuid import UUID

import numpy
import torch
from hypothesis import strategies as st

from lightning_snapshot.options import Options
from lightning_snapshot.restore import load
from lightning_snapshot.save import save
from lightning_snapshot.storage.memory import MemoryStorage

# Small enough for every state of a test to cross blocks, chunks and files.
SMALL = Options(memory_budget_bytes=256, threads=2, block_bytes=64, chunk_bytes=192, file_bytes=1024)

_numbers = itertools.count()


def new_storage() -> MemoryStorage:
    return MemoryStorage(f"memory://{__name__}/{next(_numbers)}")


def round_trip(state: dict[str, Any], options: Options = SMALL, **arguments: Any) -> dict[str, Any]:
    storage = new_storage()
    save(state, storage, save_id="first", options=options)
    return load(storage, rank=0, options=options, **arguments)


class Point(NamedTuple):
    x: Any
    y: Any


class Colour(enum.Enum):
    RED = "red"


def cpu_dtypes() -> list[torch.dtype]:
    """Every dtype of which the CPU holds ordinary tensors."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted((dtype for dtype in dtypes if not str(dtype).startswith("torch.q")), key=str)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _is_printable(dtype: torch.dtype) -> bool:
    try:
        repr(from_bytes(b"\1" * dtype.itemsize, dtype, (1,)))
    except (NotImplementedError, RuntimeError):
        return False
    return True


def from_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor with these very bits."""
    if not math.prod(shape):
        # Making a complex32 tensor directly warns that torch can do little with it.
        return torch.empty(shape, dtype=_INTEGERS.get(dtype.itemsize, dtype)).view(dtype)
    vector = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if dtype == torch.bool:
        vector = vector & 1  # what other bits mean for a bool is up to the compiler
    return vector.view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    """The row-major bytes of what a dense tensor shows."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.element_size() == 16:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()]).contiguous().reshape(-1).numpy().tobytes()


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal in type, order, bits, strides and gradients."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return _same_tensor(a, b)
    if isinstance(a, numpy.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, numpy.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, dict):
        same_kind = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        same_attributes = same(getattr(a, "__dict__", None), getattr(b, "__dict__", None))
        return same_kind and same_attributes and same([*a], [*b]) and same([*a.values()], [*b.values()])
    if isinstance(a, deque):
        return a.maxlen == b.maxlen and same([*a], [*b])
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.layout, a.requires_grad, a.is_nested) != (b.dtype, b.layout, b.requires_grad, b.is_nested):
        return False
    if a.is_nested:
        return all(map(_same_tensor, a.detach().unbind(), b.detach().unbind())) and a.size(0) == b.size(0)
    if a.shape != b.shape or a.is_quantized != b.is_quantized:
        return False
    if a.is_quantized:
        return same(_quantization(a), _quantization(b)) and torch.equal(a.int_repr(), b.int_repr())
    if a.layout == torch.sparse_coo:
        parts = [(t._indices(), t._values(), t.is_coalesced()) for t in (a.detach(), b.detach())]
        return same(*parts)
    if a.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return same(*[(t.crow_indices(), t.col_indices(), t.values()) for t in (a.detach(), b.detach())])
    if a.layout in {torch.sparse_csc, torch.sparse_bsc}:
        return same(*[(t.ccol_indices(), t.row_indices(), t.values()) for t in (a.detach(), b.detach())])
    strides = _order(a), _order(b)
    return bits(a) == bits(b) and (None in strides or strides[0] == strides[1])


def _order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Strides of a tensor that fills its memory; ``None`` for one with gaps or overlaps, which need not come back."""
    steps = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    expected = 1 if tensor.numel() else -1
    for stride, size in steps:
        if stride != expected:
            return None
        expected *= size
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def _quantization(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.qscheme() in {torch.per_tensor_affine, torch.per_tensor_symmetric}:
        return tensor.qscheme(), tensor.q_scale(), tensor.q_zero_point()
    scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return tensor.qscheme(), tensor.q_per_channel_axis(), scales.tolist(), zero_points.tolist()


# Hypothesis shows the values that make a test fail. The others have a test of their own.
PRINTABLE_DTYPES = [dtype for dtype in cpu_dtypes() if _is_printable(dtype)]


@st.composite
def dense_tensors(draw: Any) -> torch.Tensor:
    """Dense tensors of every dtype, with arbitrary bits, seen through arbitrary views."""
    dtype = draw(st.sampled_from(PRINTABLE_DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    size_bytes = math.prod(shape) * dtype.itemsize
    pattern = draw(st.binary(min_size=1, max_size=40))
    tensor = from_bytes((pattern * (size_bytes // len(pattern) + 1))[:size_bytes], dtype, shape)
    if shape:
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
        for dim, size in enumerate(tensor.shape):
            start = draw(st.integers(0, size))
            step = draw(st.integers(1, 3))
            if draw(st.booleans()):
                tensor = tensor[(slice(None),) * dim + (slice(start, None, step),)]
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(draw(st.integers(0, 3)), *tensor.shape)
    if dtype in {torch.complex64, torch.complex128} and draw(st.booleans()):
        tensor = tensor.conj()
        tensor = tensor.imag if draw(st.booleans()) else tensor
    if (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1 and draw(st.booleans()):
        gradients = draw(st.booleans())
        tensor = tensor.detach()
        return torch.nn.Parameter(tensor, gradients) if draw(st.booleans()) else tensor.requires_grad_(gradients)
    return tensor


_PLAIN = [
    *(
        None,
        True,
        -0.0,
        math.inf,
        struct.unpack("d", b"\x01\0\0\0\0\0\xf0\x7f")[0],
        10**300,
        -(2**63),
        b"",
        b"\0\xff",
        "",
        "é\n",
    ),
    *(
        "\ud800",
        1 - 2j,
        {1, "a"},
        frozenset({2.5}),
        range(1, 9, 2),
        slice(None, 3),
        bytearray(b"ab"),
        PurePosixPath("/a/b"),
    ),
    *(Decimal("1.10"), UUID(int=5), torch.Size([2, 0]), torch.bfloat16, torch.device("cuda:3"), torch.strided),
    *(numpy.float32(0.1), numpy.bool_(1), numpy.array([[1, 2]], dtype="<i2"), numpy.array(["a", "bc"])),
]
_keys = st.one_of(
    st.text(max_size=3),
    st.integers(-3, 300),
    st.sampled_from(["5", "+5", "²", "a/b", "%", "..", True, None, 1.5, (1, "a"), "k" * 1200, "漢" * 1001, "\udfff"]),
)


def states() -> st.SearchStrategy[dict[str, Any]]:
    huge = st.integers(2_000, 20_000).map(lambda shift: 1 << shift)
    leaves = st.one_of(dense_tensors(), st.sampled_from(_PLAIN), st.floats(), st.integers(), st.text(max_size=5), huge)

    def containers(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        dictionaries = st.dictionaries(_keys, values, max_size=4)
        return st.one_of(
            st.lists(values, max_size=4),
            st.lists(values, max_size=3).map(tuple),
            dictionaries,
            dictionaries.map(OrderedDict),
            dictionaries.map(lambda items: defaultdict(dict, items)),
        )

    return st.dictionaries(st.text(max_size=4), st.recursive(leaves, containers, max_leaves=10), max_size=3)


@st.composite
def basic_indices(draw: Any, shape: tuple[int, ...]) -> Any:
    """Indices as in ``tensor[index]`` that select a box: integers, slices with step 1, and an ellipsis."""
    head = draw(st.integers(0, len(shape)))
    tail = draw(st.integers(0, len(shape) - head))

    def item(size: int) -> int | slice:
        number = st.integers(-size, size - 1) if size else st.nothing()
        ends = st.none() | st.integers(-2 * size - 2, 2 * size + 2)
        return draw(number | st.builds(slice, ends, ends, st.sampled_from([None, 1])))

    items: list[Any] = [item(size) for size in shape[:head]]
    if tail or draw(st.booleans()):
        items += [..., *(item(size) for size in shape[len(shape) - tail :])]
    return items[0] if len(items) == 1 and draw(st.booleans()) else tuple(items)
