"""Tensors, their bytes, and putting them together again."""

import itertools
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_snapshot.errors import MetadataError, UnsupportedValueError
from lightning_snapshot.geometry import Box, intersect, whole
from lightning_snapshot.manifest import Shard, ShardedTensorEntry, TensorEntry, TensorNote
from lightning_snapshot.read_plan import plan_read, stored_tensor
from lightning_snapshot.tensors import (
    TensorSource,
    TensorTarget,
    compact,
    dtype_named,
    finish,
    is_fillable,
    is_piece,
    is_same_view,
    memory_key,
    portable,
    storage_kind,
    stored_dtype,
    tensor_note,
    tensor_spec,
    tensors_by_path,
)
from lightning_snapshot.write_plan import TensorSpec
from tests.engine.strategies import bits, cpu_dtypes, dense_tensors, from_bytes, same

CPU = torch.device("cpu")
BASE = torch.arange(24.0).reshape(4, 6)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
]


class Subclass(torch.Tensor):
    pass


def quantized(dtype: torch.dtype = torch.qint8) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.linspace(-3, 3, 20), 0.1, 3, dtype)


def half_bytes() -> torch.Tensor:
    return torch.quantize_per_channel(torch.rand(4, 8), torch.ones(4), torch.zeros(4), 0, torch.quint4x2)


@pytest.mark.parametrize("dtype", cpu_dtypes(), ids=str)
def test_every_dtype_is_stored_as_one_of_the_same_width_that_torchsnapshot_reads(dtype):
    stored = stored_dtype(dtype)
    assert stored.itemsize == dtype.itemsize
    known = {"float64", "float32", "float16", "bfloat16", "complex128", "complex64", "bool"}
    known |= {"int64", "int32", "int16", "int8", "uint8"}
    assert str(stored).removeprefix("torch.") in known
    assert (stored == dtype) == (str(dtype).removeprefix("torch.") in known)
    assert dtype_named(str(dtype), "a") is dtype
    spec = tensor_spec(from_bytes(b"\0" * 3 * dtype.itemsize, dtype, (3,)))
    assert spec == TensorSpec(str(stored), dtype.itemsize, (3,))


@pytest.mark.parametrize("name", ["torch.float33", "float32x", "torch.Tensor", "", "torch."])
def test_names_of_no_dtype_are_refused(name):
    with pytest.raises(MetadataError, match=f"^m/w: expected the name of a dtype, found '{name}'"):
        dtype_named(name, "m/w")


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: BASE, "dense"),
        (lambda: torch.nn.Parameter(BASE.t()), "dense"),
        (lambda: torch.tensor(5), "dense"),
        (lambda: BASE[:0], "zip"),
        (quantized, "zip"),
        (half_bytes, "object"),
        (BASE.to_sparse, "object"),
        (BASE.to_sparse_csr, "object"),
        (lambda: torch.nested.nested_tensor([BASE, BASE]), "object"),
        (lambda: BASE.as_subclass(Subclass), "object"),
    ],
)
def test_how_a_tensor_is_stored(make, kind):
    assert storage_kind(make(), "m/w") == kind


@pytest.mark.parametrize("make", [lambda: torch.ones(3, device="meta"), torch.nn.UninitializedParameter])
def test_tensors_without_data_are_refused_with_their_place(make):
    with pytest.raises(UnsupportedValueError, match=r"^m/w: a tensor without data"):
        storage_kind(make(), "m/w")


@settings(max_examples=150)
@given(dense_tensors().filter(lambda tensor: tensor.numel() > 0), st.data())
def test_a_source_gives_its_row_major_bytes_in_any_stretches(tensor, data):
    item_bytes = tensor.element_size()
    cuts = sorted(data.draw(st.sets(st.integers(1, tensor.numel()), max_size=4)) | {0, tensor.numel()})
    # The place in the staging buffer is a multiple of the element size.
    shift = data.draw(st.integers(0, 3)) * item_bytes
    buffer = torch.full((shift + tensor.numel() * item_bytes + 16,), 99, dtype=torch.uint8)
    for begin, end in itertools.pairwise(cuts):
        out = buffer[shift + begin * item_bytes : shift + end * item_bytes]
        TensorSource(tensor).copy_into(begin * item_bytes, out)
    assert buffer[shift:-16].numpy().tobytes() == bits(tensor)
    assert set(buffer[:shift].tolist()) | set(buffer[-16:].tolist()) == {99}


@st.composite
def strided(draw, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A zero tensor of this shape whose elements lie in any order and with gaps."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.integers(1, 2)) for _ in shape]
    memory = from_bytes(
        bytes(math.prod(s * k for s, k in zip(shape, steps, strict=True)) * dtype.itemsize), dtype, (-1,)
    )
    spread = memory.view([shape[d] * steps[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
    return spread[tuple(slice(None, None, step) for step in steps)]


@settings(max_examples=200)
@given(
    st.data(),
    st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex64, torch.complex128]),
)
def test_stretches_of_shards_fill_a_target_of_any_strides(data, shape, dtype):
    """Shards along any dimension, packed into a file at any offset, read in stretches into a box of the tensor."""
    raw = bytes(index * 37 % 251 for index in range(math.prod(shape) * dtype.itemsize))
    source = from_bytes(raw, dtype, shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    file, shards = bytearray(data.draw(st.integers(0, 9))), []
    for first in range(0, shape[dim], step := data.draw(st.integers(1, shape[dim]))):
        piece = source.narrow(dim, first, min(step, shape[dim] - first))
        offsets, begin = tuple(first if d == dim else 0 for d in range(len(shape))), len(file)
        file += bits(piece)
        entry = TensorEntry("f", "buffer_protocol", str(dtype), tuple(piece.shape), False, (begin, len(file)))
        shards.append(Shard(offsets, tuple(piece.shape), entry))
    extents = [data.draw(st.integers(1, size)) for size in shape]
    box = Box(tuple(data.draw(st.integers(0, s - e)) for s, e in zip(shape, extents, strict=True)), tuple(extents))
    target = TensorTarget(data.draw(strided(box.sizes, dtype)), box)
    stored = stored_tensor("w", ShardedTensorEntry(shards))
    content = torch.frombuffer(file, dtype=torch.uint8)
    for fetch in plan_read({"w": (stored, dtype.itemsize, box)}, {}).fetches:
        stretch_bytes = data.draw(st.integers(1, 5)) * dtype.itemsize
        for begin in range(fetch.begin_bytes, fetch.end_bytes, stretch_bytes):
            target.scatter(fetch, begin, content[begin : min(begin + stretch_bytes, fetch.end_bytes)])
    assert bits(target.tensor) == bits(source[box.slices])


@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
def test_whole_pieces_fill_a_target(data, shape):
    source = torch.arange(1.0, math.prod(shape) + 1).reshape(shape)
    boxes = []
    for _ in range(2):
        extents = [data.draw(st.integers(1, size)) for size in shape]
        offsets = [data.draw(st.integers(0, s - e)) for s, e in zip(shape, extents, strict=True)]
        boxes.append(Box(tuple(offsets), tuple(extents)))
    piece, box = boxes
    target = TensorTarget(torch.zeros(box.sizes), box)
    target.place(piece, source[piece.slices].clone().requires_grad_())
    expected = torch.zeros(shape)
    common = intersect(piece, box)
    if common is not None:
        expected[common.slices] = source[common.slices]
    assert torch.equal(target.tensor, expected[box.slices])
    assert not target.tensor.requires_grad


@pytest.mark.parametrize("dtype", cpu_dtypes(), ids=str)
def test_fresh_memory_of_every_dtype_is_taken_without_a_warning(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = TensorTarget.allocate(dtype, whole((2, 3)), (1, 0), CPU, "m/w").tensor
    assert (tensor.dtype, tensor.shape, tensor.stride()) == (dtype, (2, 3), (1, 2))
    assert TensorTarget.allocate(dtype, whole(()), None, CPU, "m/w").tensor.shape == ()


@pytest.mark.parametrize(
    ("shape", "dim_order"),
    [
        ((2, 3), (0,)),
        ((2, 3), (0, 0)),
        ((2, 3), (0, 5)),
        ((2, 3), (0, 2**63 - 1)),
        ((2**62, 2**62), None),
        ((2**46,), None),
    ],
)
def test_memory_that_cannot_be_had_is_an_error_of_the_metadata(shape, dim_order):
    with pytest.raises(
        MetadataError, match=r"^m/w: cannot allocate a tensor of shape \[\d+(, \d+)?\] and torch.float64: "
    ):
        TensorTarget.allocate(torch.float64, whole(shape), dim_order, CPU, "m/w")


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (BASE, True),
        (BASE.t()[1:, ::2], True),
        (torch.nn.Parameter(BASE), True),
        (torch.zeros(0, 3), True),
        (torch.tensor(1.0), True),
        (BASE[:1].expand(5, 6), False),
        (BASE[:1].expand(1, 6), True),
        (torch.ones(3, dtype=torch.complex64).conj(), False),
        (torch.ones(3, dtype=torch.complex64).conj().imag, False),
        (BASE.to_sparse(), False),
        (torch.ones(3, device="meta"), False),
        (BASE.as_subclass(Subclass), False),
    ],
    ids=range(12),
)
def test_which_tensors_can_be_filled(tensor, expected):
    assert is_fillable(tensor) is expected


def test_quantized_and_nested_tensors_cannot_be_filled():
    assert not is_fillable(quantized())
    assert not is_fillable(torch.nested.nested_tensor([BASE, BASE]))


def test_memory_keys_are_equal_for_equal_views_only():
    key = memory_key(BASE)
    assert memory_key(torch.nn.Parameter(BASE)) == memory_key(BASE[:]) == memory_key(BASE.view(4, 6)) == key
    others = [BASE.clone(), BASE[1:], BASE.view(6, 4), BASE.view(torch.int32), BASE[:, :5], BASE.t()]
    assert key not in [memory_key(tensor) for tensor in others]
    number = torch.ones(3, dtype=torch.complex64)
    assert memory_key(number) != memory_key(number.conj())


def test_only_the_same_view_counts_as_the_target():
    assert is_same_view(BASE.detach(), BASE)
    assert not is_same_view(BASE.clone(), BASE)
    assert not is_same_view(BASE.view(6, 4), BASE)
    assert not is_same_view(torch.zeros(0, 3), torch.zeros(0, 4))
    assert not is_same_view(BASE, BASE.to_sparse())
    assert not is_same_view(BASE.to_sparse(), BASE)


@pytest.mark.parametrize(
    ("make", "note"),
    [
        (lambda: BASE, None),
        (lambda: BASE[1:], None),
        (lambda: BASE[:, ::2], None),  # gaps need not come back
        (BASE.t, TensorNote(dim_order=(1, 0))),
        (lambda: BASE.clone().requires_grad_(), TensorNote(requires_grad=True)),
        (lambda: torch.nn.Parameter(BASE), TensorNote(parameter=True)),
        (lambda: torch.nn.Parameter(BASE, requires_grad=False), TensorNote(parameter=True, requires_grad=False)),
        (lambda: BASE.to(torch.float8_e5m2), TensorNote(dtype="torch.float8_e5m2")),
        (quantized, None),
        (lambda: BASE.to_sparse().requires_grad_(), TensorNote(requires_grad=True)),
        (lambda: BASE.as_subclass(Subclass), None),
    ],
)
def test_notes_say_what_entries_cannot(make, note):
    assert tensor_note(make()) == note


@pytest.mark.parametrize(
    ("note", "parameter", "requires_grad"),
    [
        (None, False, False),
        (TensorNote(dim_order=(0,)), False, False),
        (TensorNote(requires_grad=True), False, True),
        (TensorNote(parameter=True), True, True),
        (TensorNote(parameter=True, requires_grad=False), True, False),
    ],
)
def test_parameters_and_gradients_are_put_back(note, parameter, requires_grad):
    tensor = finish(torch.zeros(3), note, "m/w")
    assert (type(tensor) is torch.nn.Parameter, tensor.requires_grad) == (parameter, requires_grad)


@pytest.mark.parametrize("note", [TensorNote(requires_grad=True), TensorNote(parameter=True)])
def test_integers_cannot_have_gradients(note):
    with pytest.raises(MetadataError, match=r"^m/w: expected a dtype that can have gradients, found torch.int8$"):
        finish(torch.zeros(3, dtype=torch.int8), note, "m/w")


@pytest.mark.parametrize(
    ("value", "sizes", "expected"),
    [
        (BASE, (4, 6), True),
        (BASE, (6, 4), False),
        (BASE, (24,), False),
        (torch.ones(1), (), True),
        (torch.tensor(1.0), (1,), True),
        (BASE.to_sparse(), (4, 6), False),
        (torch.ones(4, 6, device="meta"), (4, 6), False),
    ],
    ids=range(7),
)
def test_which_tensors_of_a_file_can_be_a_piece(value, sizes, expected):
    assert is_piece(value, sizes) is expected


def test_portable_tensors_carry_no_memory_that_they_do_not_show():
    large = torch.zeros(10_000)
    assert portable(large[:0].reshape(0, 3)).untyped_storage().nbytes() == 0
    assert portable(large[:0].to(torch.uint16)).dtype == torch.int16
    part = portable(torch.quantize_per_tensor(large, 0.5, 1, torch.qint8)[3:5])
    assert part.untyped_storage().nbytes() == 2
    assert (part.q_scale(), part.q_zero_point(), part.int_repr().tolist()) == (0.5, 1, [1, 1])
    empty = portable(quantized()[:0])
    assert (empty.dtype, empty.shape, empty.q_scale()) == (torch.qint8, (0,), 0.1)


def test_compact_sparse_tensors_carry_no_memory_that_they_do_not_show():
    large = torch.zeros(10_000)
    sparse = torch.sparse_coo_tensor(torch.zeros(1, 10_000, dtype=torch.long)[:, :2], large[:2], (9,))
    small = compact(sparse)
    assert small._values().untyped_storage().nbytes() == 8
    assert small._indices().untyped_storage().nbytes() == 16
    assert same(small, sparse)
    assert compact(BASE) is BASE


def test_tensors_of_a_state_are_found_by_path():
    state = {"m": {"a/b": BASE, "l": [1, BASE.t()]}, "k" * 1100: BASE}
    found = tensors_by_path(state)
    assert list(found) == ["m/a%2Fb", "m/l/1"]
    assert found["m/a%2Fb"] is BASE
