"""Everything that touches a tensor: its spec, its bytes, and putting it together again.

Tensors are handled as rows of integers of the same width, so that no bit changes on the way, whatever the dtype.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from lightning_snapshot.errors import MetadataError, UnsupportedFeatureError, UnsupportedValueError
from lightning_snapshot.geometry import Box, boxes_of_flat_range, intersect
from lightning_snapshot.manifest import TensorNote
from lightning_snapshot.memory import advise_huge_pages
from lightning_snapshot.read_plan import Fetch
from lightning_snapshot.tree import ALIAS_ROOT, flatten
from lightning_snapshot.write_plan import TensorSpec

__all__ = [
    "LocalPart",
    "TensorSource",
    "TensorTarget",
    "compact",
    "dtype_named",
    "finish",
    "is_fillable",
    "is_piece",
    "is_same_view",
    "is_spread",
    "is_tensor",
    "local_part",
    "mapped",
    "memory_key",
    "portable",
    "rejoined",
    "storage_kind",
    "stored_dtype",
    "tensor_note",
    "tensor_spec",
    "tensors_by_path",
    "unsqueezed",
    "without_overlaps",
]

# The dtypes that torchsnapshot reads as plain bytes (FORMAT 5.1).
_PORTABLE = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)
# The dtypes of quantized tensors that may stand in a tensor entry.
_PORTABLE_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32})
_SPREAD = frozenset({"DTensor", "ShardedTensor"})
# Same width, and copied bit for bit.
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def is_tensor(value: object) -> bool:
    """Whether a leaf is a tensor of any kind."""
    return isinstance(value, torch.Tensor)


def tensors_by_path(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Logical path → tensor of a state, to be read into."""
    leaves = flatten(state, is_tensor=is_tensor).leaves
    # Alias paths are numbered, and say nothing about which tensor it is.
    return {path: value for path, value in leaves if is_tensor(value) and not path.startswith(f"{ALIAS_ROOT}/")}


def storage_kind(tensor: torch.Tensor, place: str) -> str:
    """How a tensor is stored.

    Returns:
        ``"dense"`` (rows of elements), ``"spread"`` (the rows that this rank holds: see `local_part`), ``"zip"`` (a
        torch.save tensor) or ``"object"``.

    Raises:
        UnsupportedValueError: It has no data that could be stored.
    """
    if _is_dense(tensor) and not tensor.is_meta:
        return "dense" if tensor.numel() else "zip"
    if type(tensor).__name__ == "ShardedTensor" and is_spread(tensor):
        return "spread"  # one without a part on this rank does not say where it is
    if tensor.is_meta or isinstance(tensor, torch.nn.parameter.UninitializedParameter):
        msg = f"{place}: a tensor without data (meta device or uninitialized) cannot be stored; materialize it first"
        raise UnsupportedValueError(msg)
    if is_spread(tensor):
        return "spread"
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        return "object"
    if tensor.is_quantized:
        return "zip" if tensor.dtype in _PORTABLE_QUANTIZED else "object"
    return "object"


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of those of ``torch.distributed`` of which each rank holds a part."""
    # By name, because importing their modules takes long, and fails where torch was built without them.
    return type(tensor).__name__ in _SPREAD and type(tensor).__module__.startswith("torch.distributed")


class LocalPart(NamedTuple):
    """What one rank holds of a tensor.

    Attributes:
        tensor: An ordinary tensor; empty if this rank holds nothing.
        box: Which part of the whole it is.
        shape: Elements per dimension of the whole.
        holders: Number of ranks that the whole is spread over, if each of them holds all of it; else 0.
    """

    tensor: torch.Tensor
    box: Box
    shape: tuple[int, ...]
    holders: int

    def is_everywhere(self, world_size: int) -> bool:
        """Whether each of the ranks holds all of the tensor."""
        return self.holders == world_size


def local_part(tensor: torch.Tensor, place: str) -> LocalPart:
    """What this rank holds of a tensor that `is_spread`.

    Raises:
        UnsupportedValueError: It holds sums that are not added up yet.
        UnsupportedFeatureError: It holds several parts.
    """
    spread: Any = tensor.detach()
    shape = tuple(spread.size())
    if type(tensor).__name__ == "DTensor":
        if any(placement.is_partial() for placement in spread.placements):
            msg = f"{place}: a DTensor with partial sums cannot be stored; redistribute it first"
            raise UnsupportedValueError(msg)
        local = spread._local_tensor  # noqa: SLF001  # to_local() would wait for the result of a view of it
        chunks = spread.__create_chunk_list__() if local.numel() else ()
        parts = [(tuple(chunk.offsets), tuple(chunk.sizes), local) for chunk in chunks]
        is_replica = all(placement.is_replicate() for placement in spread.placements)
        holders = spread.device_mesh.size() if is_replica else 0
    else:
        shards = [(shard.metadata, shard.tensor.detach()) for shard in spread.local_shards()]
        parts = [(tuple(m.shard_offsets), tuple(m.shard_sizes), local) for m, local in shards if local.numel()]
        local, holders = torch.empty(0, dtype=spread.dtype), 0
    if len(parts) > 1:
        msg = f"{place}: this rank holds {len(parts)} parts of the {type(tensor).__name__}; expected one at most"
        raise UnsupportedFeatureError(msg)
    if not parts:
        nothing = (0,) * len(shape)
        sizes = tuple(local.shape) if local.dim() == len(shape) else nothing
        return LocalPart(local.reshape(sizes), Box(nothing, sizes), shape, holders)
    ((offsets, sizes, local),) = parts
    return LocalPart(local.reshape(sizes), Box(offsets, sizes), shape, holders)


def rejoined(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor spread over ranks as ``like`` is, of which this rank's part is ``local``."""
    spread: Any = like
    if type(like).__name__ == "DTensor":
        return type(spread).from_local(  # type: ignore[no-any-return]  # torch has no types for it
            local,
            spread.device_mesh,
            spread.placements,
            run_check=False,
            shape=spread.size(),
            stride=spread.stride(),
        )
    metadata = copy.deepcopy(spread.metadata())
    metadata.tensor_properties.dtype = local.dtype
    parts = [type(part)(local.reshape(part.metadata.shard_sizes), part.metadata) for part in spread.local_shards()]
    # Others of its constructors talk to the other ranks.
    make = type(spread)._init_from_local_shards_and_global_metadata  # noqa: SLF001  # see above
    return make(parts, metadata, process_group=spread._process_group, sharding_spec=spread.sharding_spec())  # type: ignore[no-any-return]  # noqa: SLF001  # torch has no types for it


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an ordinary one: elements of the usual kinds, at strides, in one memory."""
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        return False
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def is_fillable(tensor: torch.Tensor) -> bool:
    """Whether elements can be written straight into the memory of a tensor."""
    if not _is_dense(tensor) or tensor.is_meta or tensor.is_conj() or tensor.is_neg():
        return False
    if tensor.is_contiguous():
        return True
    # An expanded tensor, for one, shows one element in several places.
    reach = 0
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in strides if size > 1):
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def without_overlaps(targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The targets that share no memory with another one: two stored tensors cannot both go there."""
    spans = []
    for path, tensor in targets.items():
        size_bytes = tensor.nbytes
        if not tensor.is_contiguous():
            last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
            size_bytes = (last + 1) * tensor.element_size()
        begin = tensor.data_ptr()
        spans.append((_device_name(tensor.device), begin, begin + size_bytes, path))
    spans.sort()
    shared: set[str] = set()
    reached = ("", 0, "")  # device, end and path of the span that goes furthest
    for device, begin, end, path in spans:
        if device == reached[0] and begin < reached[1]:
            shared |= {path, reached[2]}
        reached = max(reached, (device, end, path))
    return {path: tensor for path, tensor in targets.items() if path not in shared}


@lru_cache(maxsize=64)
def _device_name(device: torch.device) -> str:
    return str(device)


def is_same_view(value: torch.Tensor, given: torch.Tensor) -> bool:
    """Whether a dense tensor shows the very memory of another one that `is_fillable`, in the same way."""
    return is_fillable(given) and value.layout == torch.strided and memory_key(value) == memory_key(given)


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype under which torchsnapshot can read the elements: the same, or integers of the same width."""
    return dtype if dtype in _PORTABLE else _RAW[dtype.itemsize]


def dtype_named(name: str, path: str) -> torch.dtype:
    """The dtype of a name such as ``"torch.float32"``.

    Raises:
        MetadataError: This torch has no such dtype.
    """
    dtype = _dtypes().get(name)
    if dtype is None:
        msg = f"{path}: expected the name of a dtype, found {name!r}, which torch {torch.__version__} does not know"
        raise MetadataError(msg)
    return dtype


@lru_cache(maxsize=1)
def _dtypes() -> dict[str, torch.dtype]:
    found = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    # Quantized tensors need more than elements; torch can do nothing with those that have nothing else.
    found = {name: dtype for name, dtype in found.items() if not name.startswith("torch.q")}
    return found | {name.removeprefix("torch."): dtype for name, dtype in found.items()}


def tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    """The spec of a dense tensor that this rank holds alone."""
    return _spec(tensor.dtype, tensor.shape)


# Models have few kinds of tensors. That equal specs are one object makes comparing two states cheap.
@lru_cache(maxsize=4096)
def _spec(dtype: torch.dtype, shape: torch.Size) -> TensorSpec:
    stored = stored_dtype(dtype)
    return TensorSpec(str(stored), stored.itemsize, tuple(shape))


def memory_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for dense, non-empty tensors that show the very same elements of the same memory."""
    view = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return tensor.device, tensor.data_ptr(), *view


def tensor_note(tensor: torch.Tensor) -> TensorNote | None:
    """What the entry of a tensor or its ``torch.save`` blob cannot say; ``None`` if it says everything."""
    if is_spread(tensor):
        return _note_on_spread(tensor)
    parameter = type(tensor) is torch.nn.Parameter
    if not parameter and type(tensor) is not torch.Tensor:
        return None
    dense = _is_dense(tensor)
    if dense and not parameter and not tensor.requires_grad and tensor.dtype in _PORTABLE and tensor.is_contiguous():
        return None
    note = TensorNote(
        dtype="" if not dense or tensor.dtype in _PORTABLE else str(tensor.dtype),
        parameter=parameter,
        requires_grad=None if tensor.requires_grad == parameter else tensor.requires_grad,
        dim_order=_dim_order(tensor) if dense else None,
    )
    return None if note == TensorNote() else note


def _note_on_spread(tensor: torch.Tensor) -> TensorNote:
    spread: Any = tensor
    is_mesh = type(tensor).__name__ == "DTensor"
    placements = ", ".join(map(str, spread.placements)) if is_mesh else "ShardedTensor"
    return TensorNote(
        dtype="" if tensor.dtype in _PORTABLE else str(tensor.dtype),
        requires_grad=tensor.requires_grad or None,
        placement=f"{placements} on {spread.device_mesh.mesh.tolist()}" if is_mesh else placements,
    )


def _dim_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Dimensions from slowest to fastest, if the tensor is dense in memory but not row-major."""
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))
    return order if tensor.permute(order).is_contiguous() else None


def portable(tensor: torch.Tensor) -> torch.Tensor:
    """An empty or quantized tensor in the form in which torchsnapshot takes it as a ``torch.save`` blob."""
    tensor = tensor.detach().contiguous()
    # A slice of a large tensor would take the whole memory of the latter along.
    if tensor.numel() == 0 and not tensor.is_quantized:
        return torch.empty(tensor.shape, dtype=stored_dtype(tensor.dtype))
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size() else tensor


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """A sparse tensor without the parts of larger tensors that its indices and values may be views of."""
    if tensor.layout == torch.strided:
        return tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as a uint8 vector."""
    # A tensor of one element counts as contiguous whatever its stride, and reshape keeps that.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _row_address(tensor: torch.Tensor) -> int:
    """Where the elements of a tensor lie one after the other in the memory of the CPU; 0 if they do not."""
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor.data_ptr()
    return 0


class TensorSource:
    """The row-major bytes of a dense tensor, read from the tensor itself when they are asked for.

    Attributes:
        tensor: The caller's tensor.
        address: Where its bytes lie in the memory of the CPU; 0 if they do not lie there one after the other.
    """

    __slots__ = ("address", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.address = _row_address(tensor)

    def copy_into(self, begin_bytes: int, out: torch.Tensor) -> None:
        """Copy the bytes that start at ``begin_bytes`` into the whole of ``out``, a uint8 vector on the CPU.

        ``begin_bytes``, the length of ``out`` and its place in memory are multiples of the element size.
        """
        tensor = self.tensor.detach()
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            out.copy_(_flat_bytes(tensor)[begin_bytes : begin_bytes + out.numel()], non_blocking=True)
            return
        item_bytes = tensor.element_size()
        first = begin_bytes // item_bytes
        rows = out.view(_RAW[item_bytes])
        done = 0
        for box in boxes_of_flat_range(tensor.shape, first, first + rows.numel()):
            part = tensor[box.slices].resolve_conj().resolve_neg().view(_RAW[item_bytes])
            rows[done : done + box.volume].view(box.sizes).copy_(part, non_blocking=True)
            done += box.volume


@dataclass(slots=True)
class TensorTarget:
    """A tensor that is being filled.

    Attributes:
        tensor: The memory to fill: any strides, any device, no two elements in one place.
        box: Global box of the stored tensor that it stands for.
        address: Where its elements lie in the memory of the CPU; 0 if they do not lie there one after the other.
    """

    tensor: torch.Tensor
    box: Box
    address: int = field(init=False)

    def __post_init__(self) -> None:
        self.address = _row_address(self.tensor)

    @classmethod
    def allocate(
        cls, dtype: torch.dtype, box: Box, dim_order: Sequence[int] | None, device: torch.device, path: str
    ) -> "TensorTarget":
        """Fresh memory for a box.

        Raises:
            MetadataError: ``dim_order`` does not fit, or the size is beyond what can be allocated.
        """
        # Making a tensor of some of the other dtypes warns that torch can do little with it.
        raw = stored_dtype(dtype)
        try:
            if dim_order is None:
                tensor = torch.empty(box.sizes, dtype=raw, device=device)
            else:
                tensor = torch.empty_permuted(box.sizes, tuple(dim_order), dtype=raw, device=device)
            advise_huge_pages(tensor)
            tensor = tensor if raw == dtype else tensor.view(dtype)
        except (RuntimeError, MemoryError) as error:
            msg = f"{path}: cannot allocate a tensor of shape {list(box.sizes)} and {dtype}: {error}"
            raise MetadataError(msg) from error
        return cls(tensor, box)

    def address_of(self, fetch: Fetch) -> int:
        """Where the first element of a fetch goes, if all of it goes there in a row; 0 if it does not."""
        first = self._first_of(fetch) if self.address else None
        return 0 if first is None else self.address + first * fetch.item_bytes

    def _first_of(self, fetch: Fetch) -> int | None:
        """Number of the element where a fetch begins, if it consists of whole rows of the target."""
        box, piece = self.box, fetch.piece
        if box is piece:
            return fetch.first_element
        if piece.offsets[1:] != box.offsets[1:] or piece.sizes[1:] != box.sizes[1:]:
            return None
        skipped = (piece.offsets[0] - box.offsets[0]) * prod(box.sizes[1:]) if box.sizes else 0
        return skipped + fetch.first_element

    def scatter(self, fetch: Fetch, begin_bytes: int, data: torch.Tensor) -> None:
        """Put elements in their places.

        Args:
            fetch: What ``data`` is a stretch of.
            begin_bytes: Where in the file ``data`` starts; inside the fetch.
            data: uint8 vector on the CPU, whole elements.
        """
        row = self._first_of(fetch) if self.tensor.is_contiguous() else None
        if row is not None:
            start = row * fetch.item_bytes + begin_bytes - fetch.begin_bytes
            _flat_bytes(self.tensor)[start : start + data.numel()].copy_(data, non_blocking=True)
            return
        first = fetch.first_element + (begin_bytes - fetch.begin_bytes) // fetch.item_bytes
        piece = fetch.piece
        raw = _RAW[fetch.item_bytes]
        # torchsnapshot packs tensors without gaps, and views of wider elements must be aligned.
        data = data.clone() if data.storage_offset() % fetch.item_bytes else data
        rows, into = data.view(raw), self.tensor.view(raw)
        done = 0
        for box in boxes_of_flat_range(piece.sizes, first, first + rows.numel()):
            stretch = rows[done : done + box.volume].view(box.sizes)
            done += box.volume
            absolute = Box(tuple(o + p for o, p in zip(box.offsets, piece.offsets, strict=True)), box.sizes)
            part = intersect(absolute, fetch.wanted)
            if part is not None:
                source = stretch[part.relative_to(absolute.offsets).slices]
                into[part.relative_to(self.box.offsets).slices].copy_(source, non_blocking=True)

    def place(self, piece: Box, value: torch.Tensor) -> None:
        """Put a whole piece in its place."""
        part = intersect(piece, self.box)
        if part is not None:
            source = value.detach().reshape(piece.sizes)[part.relative_to(piece.offsets).slices]
            self.tensor[part.relative_to(self.box.offsets).slices].copy_(source)


def is_piece(value: torch.Tensor, sizes: Sequence[int]) -> bool:
    """Whether a tensor from a file can be the piece of these sizes of a dense tensor."""
    dense = value.layout == torch.strided and not value.is_quantized and not value.is_nested and not value.is_meta
    # Snapshots of autumn 2022 describe a 0-d tensor as one of shape [1], or the other way round.
    return dense and (tuple(value.shape) == tuple(sizes) or (value.numel() == prod(sizes) == 1))


def mapped(memory: Any, begin_bytes: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor | None:
    """A tensor that shows a part of a mapped file; ``None`` if its elements do not lie where such elements may."""
    if begin_bytes % dtype.itemsize:
        return None
    raw = torch.frombuffer(memory, dtype=stored_dtype(dtype), count=prod(shape), offset=begin_bytes)
    return (raw if raw.dtype == dtype else raw.view(dtype)).view(tuple(shape))


def unsqueezed(tensor: torch.Tensor, dimensions: Sequence[int]) -> torch.Tensor:
    """A view with dimensions of size 1 inserted; ``dimensions`` are ascending."""
    for dimension in dimensions:
        tensor = tensor.unsqueeze(dimension)
    return tensor


def finish(tensor: torch.Tensor, note: TensorNote | None, path: str) -> torch.Tensor:
    """The tensor as it was: a parameter, or one that requires gradients.

    Raises:
        MetadataError: The note asks for gradients of a tensor that can have none.
    """
    if note is None:
        return tensor
    requires_grad = note.parameter if note.requires_grad is None else note.requires_grad
    if requires_grad and not (tensor.is_floating_point() or tensor.is_complex()):
        msg = f"{path}: expected a dtype that can have gradients, found {tensor.dtype}"
        raise MetadataError(msg)
    if note.parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor
