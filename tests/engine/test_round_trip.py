"""What is saved comes back: the same values, types, order, strides and aliasing; and no byte too many is stored."""

import dataclasses
import datetime
import enum
import fractions
import http
import random
import types
import warnings
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from decimal import Decimal
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from uuid import UUID

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from lightning_snapshot.errors import EntryNotFoundError, UnsafeObjectError, UnsupportedValueError
from lightning_snapshot.manifest import ChunkedTensorEntry, DictEntry, TensorEntry
from lightning_snapshot.options import Options
from lightning_snapshot.restore import load, read_manifest, read_value
from lightning_snapshot.save import save
from lightning_snapshot.stateful import StateDict
from lightning_snapshot.storage import METADATA_NAME, Storage, open_storage
from lightning_snapshot.storage.memory import MemoryStorage
from tests.engine.strategies import (
    SMALL,
    Colour,
    Point,
    bits,
    cpu_dtypes,
    dense_tensors,
    from_bytes,
    new_storage,
    round_trip,
    same,
    states,
)

TRUSTED = dataclasses.replace(SMALL, trusted=True)
LARGE = Options()

# torch announces the end of its quantized tensors, and calls others a prototype.
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


@pytest.fixture(params=["memory", "local"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return new_storage() if request.param == "memory" else open_storage(tmp_path / "epoch=1.ckpt")


def stored_bytes(storage: MemoryStorage) -> int:
    return sum(len(content) for name, content in storage.files.items() if name != METADATA_NAME)


@dataclasses.dataclass
class Config:
    rate: float
    weights: torch.Tensor


class Level(enum.IntEnum):
    HIGH = 3


class OwnDict(dict[str, Any]):
    pass


def example_state() -> dict[str, Any]:
    weight = torch.arange(300.0).reshape(20, 15)
    shared = [torch.ones(3), 5]
    metadata = OrderedDict(w=torch.nn.Parameter(weight), b=torch.zeros(7, dtype=torch.bfloat16))
    metadata._metadata = OrderedDict([("", {"version": 1})])
    return {
        "epoch": 3,
        "state_dict": metadata,
        "optimizer": {
            "state": {0: {"step": torch.tensor(7.0), "exp_avg": weight * 2}, 1: {"step": torch.tensor(7.0)}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 1], "foreach": None}],
        },
        "hparams": {"path": Path("/data"), "when": datetime.timedelta(seconds=5), ("odd", 1): torch.ones(2), 1.5: "x"},
        "tied": [weight, weight, weight[:5]],
        "shared": [shared, shared],
        "points": (Point(torch.ones(1), [shared]), torch.zeros(0, 4)),
        "": {"long" * 400: {"漢字" * 300: torch.full((70,), 3, dtype=torch.int16)}},
        "rng": random.Random(5).getstate(),
        "numpy": numpy.random.default_rng(3).bit_generator.state,
    }


@pytest.mark.parametrize("options", [SMALL, LARGE], ids=["small blocks", "defaults"])
def test_a_checkpoint_comes_back(storage, options):
    state = example_state()
    save(state, storage, save_id="first", options=options)
    with torch.serialization.safe_globals([Point]):
        loaded = load(storage, rank=0, options=options)
    assert same(loaded, state)
    assert loaded["tied"][0].data_ptr() == loaded["tied"][1].data_ptr() == loaded["state_dict"]["w"].data_ptr()
    assert loaded["shared"][0] is loaded["shared"][1] is loaded["points"][0].y[0]


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(states())
def test_any_state_comes_back(state):
    assert same(round_trip(state), state)


@settings(max_examples=150)
@given(dense_tensors())
def test_any_dense_tensor_comes_back_and_takes_only_its_own_bytes(tensor):
    storage = new_storage()
    save({"a": tensor}, storage, save_id="first", options=SMALL)
    assert same(load(storage, rank=0, options=SMALL)["a"], tensor)
    if tensor.numel():
        # Chunks of a tensor start on multiples of 64 bytes.
        chunks = -(-tensor.numel() * tensor.element_size() // SMALL.chunk_bytes)
        assert stored_bytes(storage) < tensor.numel() * tensor.element_size() + 64 * max(1, 2 * chunks)


# --- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (37,), (5, 7), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("dtype", cpu_dtypes(), ids=str)
def test_every_dtype_comes_back_with_all_bits(dtype, shape):
    data = bytes((7 * index + 129) % 256 for index in range(37 * 16))
    tensor = from_bytes(data[: torch.Size(shape).numel() * dtype.itemsize], dtype, shape)
    loaded = round_trip({"a": tensor})["a"]
    assert (loaded.dtype, loaded.shape) == (dtype, tensor.shape)
    assert bits(loaded) == bits(tensor)
    if len(shape) > 1:
        turned = tensor.transpose(0, 1)
        loaded = round_trip({"a": turned})["a"]
        assert (bits(loaded), loaded.stride()) == (bits(turned), turned.stride()) or not tensor.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float64])
def test_nan_payloads_and_signed_zeros_survive(dtype):
    nan = {2: "c07f81ff", 4: "010080ff5500c07f", 8: "0100000000000080010000c00000f87f"}[dtype.itemsize]
    tensor = from_bytes(bytes.fromhex(nan) + b"\0" * (dtype.itemsize - 1) + b"\x80", dtype, (3,))
    assert bits(round_trip({"a": tensor})["a"]) == bits(tensor)


def test_loading_warns_of_nothing():
    state = {str(dtype): from_bytes(b"\1" * 3 * dtype.itemsize, dtype, (3,)) for dtype in cpu_dtypes()}
    storage = new_storage()
    save(state, storage, save_id="first", options=SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(load(storage, rank=0, options=SMALL)) == list(state)


BASE = torch.arange(24.0).reshape(4, 6)
COMPLEX = torch.complex(BASE, -BASE)
VIEWS = {
    "slice": BASE[1:3],
    "column": BASE[:, 2],
    "step": BASE[::2, 1::2],
    "transposed": BASE.t(),
    "expanded": BASE[:1].expand(5, 6),
    "expanded 0-d": torch.tensor(3.0).expand(70),
    "one element with a stride": BASE[::3, ::5][:1, :1],
    "channels last": torch.arange(120.0).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "channels last 3d": torch.rand(2, 3, 2, 2, 2).contiguous(memory_format=torch.channels_last_3d),
    "permuted": torch.arange(60.0).reshape(3, 4, 5).permute(2, 0, 1),
    "permuted with a gap": torch.arange(60.0).reshape(3, 4, 5)[:, 1:].permute(2, 0, 1),
    "conj": COMPLEX.conj(),
    "conj transposed": COMPLEX.conj().t(),
    "conj slice": COMPLEX.conj()[1:, ::2],
    "neg": COMPLEX.conj().imag,
    "neg slice": COMPLEX.conj().imag[:, 3],
    "conj 0-d": torch.tensor(1 + 2j).conj(),
    "real": COMPLEX.real,
    "shifted": torch.arange(100, dtype=torch.uint8)[3:],
    "0-d": BASE[2, 3],
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_come_back_and_store_only_what_they_show(name):
    tensor = VIEWS[name]
    storage = new_storage()
    save({"a": tensor}, storage, save_id="first", options=LARGE)
    assert stored_bytes(storage) == tensor.numel() * tensor.element_size()
    loaded = load(storage, rank=0, options=LARGE)["a"]
    assert torch.equal(loaded, tensor)
    assert same(loaded, tensor)
    assert loaded.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    assert not loaded.is_conj()
    assert not loaded.is_neg()


def test_memory_formats_are_kept():
    loaded = round_trip({"a": VIEWS["channels last"], "b": VIEWS["permuted"], "c": VIEWS["channels last 3d"]})
    assert loaded["a"].is_contiguous(memory_format=torch.channels_last)
    assert loaded["b"].stride() == VIEWS["permuted"].stride()
    assert loaded["c"].is_contiguous(memory_format=torch.channels_last_3d)


def test_a_slice_of_a_large_tensor_is_small_also_where_torch_would_save_all_of_it():
    large = torch.zeros(50_000)
    quantized = torch.quantize_per_tensor(large, 0.1, 3, torch.qint8)
    storage = new_storage()
    state = {
        "dense": large[:7],
        "empty": large[:0].reshape(0, 3),
        "quantized": quantized[5:9],
        "sparse": torch.sparse_coo_tensor(torch.zeros(1, 50_000, dtype=torch.long)[:, :2], large[:2], (9,)),
    }
    save(state, storage, save_id="first", options=SMALL)
    assert stored_bytes(storage) < 12_000
    assert same(load(storage, rank=0, options=SMALL), state)


def quantized_per_channel(rows: int = 4) -> torch.Tensor:
    scales, zero_points = torch.linspace(0.1, 1, 5, dtype=torch.float64), torch.arange(5)
    return torch.quantize_per_channel(
        torch.linspace(-3, 3, rows * 5).reshape(rows, 5), scales, zero_points, 1, torch.quint8
    )


def quantized(dtype: torch.dtype = torch.qint8) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.linspace(-3, 3, 200), 0.1, 3, dtype)


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(5, 3)], layout=torch.jagged)


UNUSUAL = {
    "coo": lambda: torch.eye(40).to_sparse(),
    "coo, not coalesced": lambda: torch.sparse_coo_tensor([[0, 0, 2]], [1.0, 2.0, -0.0], (3,)),
    "coo with gradients": lambda: torch.eye(3).to_sparse().requires_grad_(),
    "coo parameter": lambda: torch.nn.Parameter(torch.eye(3).to_sparse()),
    "coo parameter without gradients": lambda: torch.nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False),
    "csr": lambda: torch.eye(40).to_sparse_csr(),
    "csc": lambda: torch.eye(4).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "per tensor": quantized,
    "per tensor, quint8": lambda: quantized(torch.quint8),
    "per tensor, qint32": lambda: quantized(torch.qint32),
    "per tensor, 0-d": lambda: torch.quantize_per_tensor(torch.tensor(1.0), 0.1, 3, torch.qint8),
    "per tensor, empty": lambda: torch.quantize_per_tensor(torch.ones(0, 3), 0.1, 3, torch.qint8),
    "per tensor, turned": lambda: quantized().reshape(20, 10).t(),
    "per channel": quantized_per_channel,
    "per channel, slice": lambda: quantized_per_channel(9)[2:5],
    "quantized parameter": lambda: torch.nn.Parameter(quantized(), requires_grad=False),
    "nested": lambda: torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(50, 3)]),
    "nested parameter": lambda: torch.nn.Parameter(torch.nested.nested_tensor([torch.rand(2), torch.rand(3)])),
    "jagged": jagged,
    "jagged with gradients": lambda: jagged().requires_grad_(),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_tensors_come_back(name, storage):
    tensor = UNUSUAL[name]()
    save({"a": {"b": tensor}, "c": (tensor, 1)}, storage, save_id="first", options=SMALL)
    loaded = load(storage, rank=0, options=SMALL)
    assert same(loaded["a"]["b"], tensor)
    assert loaded["c"][0] is loaded["a"]["b"]


def test_quantized_tensors_with_half_bytes_come_back():
    scales = torch.linspace(0.1, 1, 4)
    tensor = torch.quantize_per_channel(
        torch.linspace(0, 9, 32).reshape(4, 8), scales, torch.zeros(4), 0, torch.quint4x2
    )
    storage = new_storage()
    save({"a": tensor}, storage, save_id="first", options=SMALL)
    loaded = load(storage, rank=0, options=SMALL)["a"]
    assert loaded.dtype == torch.quint4x2
    assert torch.equal(loaded.dequantize(), tensor.dequantize())
    # torchsnapshot fails on all of a snapshot in which a tensor entry has a dtype that it does not know.
    assert read_manifest(storage).entries["0/a"].obj_type == "torch.Tensor"


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("kind", [torch.nn.Parameter, lambda data, grad: data.requires_grad_(grad)])
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 2)])
def test_parameters_and_gradients_come_back(kind, requires_grad, shape):
    tensor = kind(torch.rand(shape), requires_grad)
    loaded = round_trip({"a": tensor})["a"]
    assert same(loaded, tensor)
    assert loaded.is_leaf


def test_a_result_of_a_computation_is_saved_as_it_is_now():
    weight = torch.ones(3, requires_grad=True)
    loaded = round_trip({"a": weight * 2})["a"]
    assert loaded.is_leaf
    assert loaded.requires_grad
    assert loaded.tolist() == [2, 2, 2]


# --- aliasing ---------------------------------------------------------------------------------------------------------


def test_tied_tensors_are_stored_once_and_come_back_tied():
    weight = torch.arange(100.0)
    parameter = torch.nn.Parameter(weight.view(100))
    storage = new_storage()
    state = {"a": {"w": parameter}, "b": [parameter, weight], "c": parameter.detach()[:], "d": weight.clone()}
    save(state, storage, save_id="first", options=LARGE)
    assert stored_bytes(storage) == 800
    loaded = load(storage, rank=0, options=LARGE)
    assert same(loaded, state)
    assert loaded["a"]["w"] is loaded["b"][0]
    loaded["b"][1][7] = -1
    assert loaded["a"]["w"][7] == loaded["c"][7] == -1
    assert loaded["d"][7] == 7


def test_tied_chunks_are_stored_once():
    weight = torch.arange(100.0).reshape(50, 2)
    storage = new_storage()
    save({"a": weight, "b": weight.detach()}, storage, save_id="first", options=SMALL)
    assert stored_bytes(storage) == 400
    assert isinstance(read_manifest(storage).entries["0/b"], ChunkedTensorEntry)
    loaded = load(storage, rank=0, options=SMALL)
    assert same(loaded, {"a": weight, "b": weight})
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()


def test_each_of_some_tied_tensors_can_be_loaded_alone():
    weight = torch.arange(5.0)
    storage = new_storage()
    save({"a": weight, "b": weight.detach()}, storage, save_id="first", options=SMALL)
    assert same(load(storage, rank=0, options=SMALL, keys=["b"]), {"b": weight})
    assert same(read_value(storage, "0/b", options=SMALL), weight)


def test_views_that_differ_are_not_tied():
    weight = torch.arange(6.0)
    state = {"a": weight, "b": weight[:5], "c": weight.view(2, 3), "d": weight.view(torch.int32), "e": weight[1:]}
    assert same(round_trip(state), state)


def test_empty_tensors_are_not_tied():
    loaded = round_trip({"a": torch.empty(0), "b": torch.empty(0), "c": torch.empty(0, dtype=torch.int8)})
    assert loaded["a"] is not loaded["b"]
    assert loaded["c"].dtype == torch.int8


def test_shared_objects_are_shared_again():
    items, config, codes = [1, torch.ones(1)], {1.5: [2]}, numpy.arange(3)
    state = {"a": [items, items], "b": {"x": items, "y": config, "z": codes}, "c": [config, codes], "d": [1, [2]]}
    loaded = round_trip(state)
    assert same(loaded, state)
    assert loaded["a"][0] is loaded["a"][1] is loaded["b"]["x"]
    assert loaded["b"]["y"] is loaded["c"][0]
    assert loaded["b"]["z"] is loaded["c"][1]
    assert loaded["a"][0] is not loaded["d"]


# --- containers and objects -------------------------------------------------------------------------------------------

PLAIN: dict[str, Any] = {
    "none": None,
    "bools": [True, False],
    "floats": [0.1, -0.0, float("inf"), float("nan"), 5e-324],
    "integers": [0, -1, 2**63, 10**300],
    "texts": ["", "é", "\0", "\x85\u2028", "𐀀", "\ud800", "x" * 70_000, "漢" * 70_000],
    "bytes": [b"", bytes(range(256)), b"x" * 70_000],
    "complex": complex(-0.0, 1),
    "tuples": (1, "a", (None, [2.5]), ()),
    "sets": [{1, "a", None}, frozenset({(1, 2)}), set()],
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
    "default": defaultdict(list, b=[1], a=[]),
    "default of default": defaultdict(dict, {5: defaultdict(int, x=1)}),
    "default without factory": defaultdict(None, a=1),
    "default with tensor": defaultdict(int, b=torch.ones(2), a=torch.zeros(1)),
    "counter": Counter("abcab"),
    "deques": [deque([1, 2], maxlen=5), deque([torch.ones(2)]), deque()],
    "user dict": UserDict(a=[1]),
    "state dict": StateDict(step=5),
    "namespace": types.SimpleNamespace(a=1, b=[2]),
    "range": [range(5), range(9, 1, -2)],
    "slice": slice(1, None, 2),
    "bytearray": bytearray(b"\0\xff"),
    "type": int,
    "paths": [Path("/a b/ç"), PurePosixPath(), PureWindowsPath("c:/x")],
    "times": [
        datetime.datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=datetime.timezone.utc),
        datetime.datetime(2024, 1, 1, fold=1, tzinfo=datetime.timezone(datetime.timedelta(hours=-3), "name")),
        datetime.date(1, 1, 1),
        datetime.time(23, 59),
        datetime.timedelta(days=-1, microseconds=1),
    ],
    "numbers": [Decimal("-1.50"), Decimal("NaN").is_nan(), fractions.Fraction(1, 3)],
    "uuid": UUID("12345678123456781234567812345678"),
    "enum": http.HTTPStatus.NOT_FOUND,
    "torch": [torch.Size([2, 3]), torch.float8_e5m2, torch.device("cuda", 1), torch.sparse_coo, torch.Size([])],
    "python's generator": random.Random(1).getstate(),
    "numpy's generators": [numpy.random.default_rng(1).bit_generator.state, numpy.random.RandomState(1).get_state()],
    "numpy scalars": [numpy.array([3]).astype(code)[0] for code in "?bBhHiIlLefdgFDGM"[:-1]],
    "numpy dates": [numpy.datetime64("2024-01-01T00:00", "m"), numpy.timedelta64(5, "s")],
    "numpy text": [numpy.str_("é"), numpy.bytes_(b"ab")],
    "numpy arrays": [numpy.arange(6).reshape(2, 3).astype(code) for code in "?bBhHiIlLefdgFDGSU"],
    "numpy shapes": [numpy.zeros(()), numpy.zeros((0, 3)), numpy.asfortranarray(numpy.eye(3))[:, ::2]],
    "numpy dates array": numpy.array(["2024-01-01"], dtype="M8[D]"),
    "numpy record": numpy.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8", (1,))]),
    "numpy objects": [numpy.array(["a", None, [1]], dtype=object).tolist(), numpy.dtype("f4"), numpy.dtype("M8[ns]")],
    "odd keys": {None: 1, 1.5: 2, (1, "a"): 3, b"b": 4, frozenset({1}): 5, -0.0: 6},
    "bool keys": {True: [1], False: {"a": None}},
    "number-like keys": {"5": 1, 5: 2, "+5": 3, "²": 4, "٣": 5},
    "path-like keys": {"a/b": 1, "a%2Fb": 2, "..": {".": {"": {"/": 3}}}},
    "enum keys": {http.HTTPStatus.OK: 1},
    "negative keys": {-1: "a", 10**300: "b"},
    "odd keys with tensors": {None: torch.ones(1), (1, 2): [torch.zeros(2)], "\ud800": 5},
    "ordered odd keys with tensors": OrderedDict([(2.5, torch.ones(1)), (None, 1)]),
    "nested": [[[[[{"a": [({"b": (torch.ones(1),)},)]}]]]]],
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_data_comes_back_without_trust(name):
    assert same(round_trip({"a": {"b": PLAIN[name]}}), {"a": {"b": PLAIN[name]}})


def test_plain_data_comes_back_from_disk(storage):
    save(PLAIN, storage, save_id="first", options=SMALL)
    assert same(load(storage, rank=0, options=SMALL), PLAIN)


def test_integers_beyond_what_python_prints_come_back():
    value = {"a": [1 << 14_001, (-(10**5000), {7**6000})], 10**4400: 1}
    assert round_trip({"a": value}) == {"a": value}


def test_big_endian_arrays_keep_their_values():
    # numpy's own pickles turn them to the order of the machine.
    array = numpy.array([1, 2, 70_000], dtype=">i4")
    assert round_trip({"a": array})["a"].tolist() == array.tolist()


def test_attributes_of_ordered_dictionaries_come_back(storage):
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    state = {"plain": module.state_dict(), "odd": OrderedDict([((1, 2), torch.ones(1))])}
    state["odd"]._metadata = {"x": 1}
    save(state, storage, save_id="first", options=SMALL)
    loaded = load(storage, rank=0, options=SMALL)
    assert same(loaded, state)
    assert loaded["plain"]._metadata == module.state_dict()._metadata
    assert loaded["odd"]._metadata == {"x": 1}


def test_a_whole_state_that_is_an_ordered_dictionary_comes_back():
    state = OrderedDict([("b", 1), ("a", torch.ones(1))])
    state._metadata = {"version": 3}
    assert same(round_trip(state), state)
    assert not hasattr(round_trip(state, keys=["a"]), "_metadata")


@pytest.mark.parametrize("state", [{}, OrderedDict(), {"a": {}}, {"a": [], "b": OrderedDict(), "c": {"": {}}}])
def test_empty_states_come_back(state, storage):
    save(state, storage, save_id="first", options=SMALL)
    assert same(load(storage, rank=0, options=SMALL), state)


OWN = {
    "enum": Colour.RED,
    "int enum": Level.HIGH,
    "enum keys": {Level.HIGH: 1, Colour.RED: 2},
    "dataclass": Config(0.5, torch.ones(3)),
    "dictionary": OwnDict(a=[1], b=torch.ones(2)),
    "named tuple": Point(1, [2]),
    "named tuple with tensor": Point(torch.ones(2), Point(1, torch.zeros(1))),
}


@pytest.mark.parametrize("name", OWN)
def test_own_classes_come_back_if_trusted_and_are_named_otherwise(name, storage):
    value = OWN[name]
    save({"a": {"b/c": value}}, storage, save_id="first", options=SMALL)
    loaded = load(storage, rank=0, options=TRUSTED)["a"]["b/c"]
    if isinstance(value, Config):
        assert same(vars(loaded), vars(value))
    assert type(loaded) is type(value)
    assert isinstance(value, Config) or same(loaded, value)
    with pytest.raises(
        UnsafeObjectError, match=r"a/b%2Fc(/1)?: .*tests\.engine\.\w+\.\w+.*trusted=True.*add_safe_globals"
    ):
        load(storage, rank=0, options=SMALL)


@pytest.mark.parametrize("name", ["named tuple", "named tuple with tensor", "dictionary"])
def test_own_classes_come_back_if_registered(name):
    with torch.serialization.safe_globals([Point, OwnDict]):
        if name == "dictionary":
            # torch's unpickler sets no items of such a dictionary, and Python's does it under the same rules.
            assert same(round_trip({"a": OWN[name]}), {"a": OWN[name]})
        assert same(round_trip({"a": OWN[name]}), {"a": OWN[name]})


def test_states_of_generators_come_back():
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    state = round_trip({"rng": generator.get_state()})["rng"]
    expected = torch.rand(5, generator=generator)
    assert torch.equal(torch.rand(5, generator=torch.Generator().set_state(state)), expected)


# --- parts ------------------------------------------------------------------------------------------------------------


def test_keys_select_what_is_read():
    storage = new_storage()
    save({"a": {"x": torch.ones(3)}, "b": torch.ones(400), "c": [5]}, storage, save_id="first", options=SMALL)
    reader = MemoryStorage(storage.url)
    assert same(load(reader, rank=0, options=SMALL, keys=["c", "a"]), {"c": [5], "a": {"x": torch.ones(3)}})
    assert sum(operation == "read" for operation, _ in reader.operations) == 1


def test_single_values_are_read():
    storage = new_storage()
    save({"a": {"x/y": torch.arange(60), 5: 7, "o": {1, 2}}}, storage, save_id="first", options=SMALL)
    assert same(read_value(storage, "0/a/x%2Fy", options=SMALL), torch.arange(60))
    assert read_value(storage, "0/a/5", options=SMALL) == 7
    assert read_value(storage, "0/a/o", options=SMALL) == {1, 2}
    for path in ("0/a/6", "0/b", "0/a"):
        with pytest.raises(EntryNotFoundError, match=f"'{path}'"):
            read_value(storage, path, options=SMALL)


def test_a_new_rank_sees_no_values_that_rank_0_had_for_itself():
    storage = new_storage()
    save(
        {"n": 5, "a": {"x": 1, "t": torch.ones(2)}, "l": [1], "t": (torch.ones(1),)},
        storage,
        save_id="first",
        options=SMALL,
    )
    assert load(storage, rank=1, options=SMALL) == {"a": {}, "l": []}


def test_entries_are_those_that_torchsnapshot_knows():
    storage = new_storage()
    state = {
        "a": {"f": torch.ones(2), "u": torch.ones(2, dtype=torch.uint16), "e": torch.ones(0, 3), "c": torch.ones(90)}
    }
    save(state, storage, save_id="first", options=SMALL)
    entries = read_manifest(storage).entries
    assert entries["0/a"] == DictEntry(["f", "u", "e", "c"])
    assert entries["0/a/f"] == TensorEntry(".data/first/0_0", "buffer_protocol", "torch.float32", (2,), False, (0, 8))
    assert entries["0/a/u"].dtype == "torch.int16"
    assert (entries["0/a/e"].serializer, entries["0/a/e"].shape) == ("torch_save", (0, 3))
    assert [chunk.sizes for chunk in entries["0/a/c"].chunks] == [(45,), (45,)]


# --- in place ---------------------------------------------------------------------------------------------------------


def targets(**shapes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"a/{name}": tensor for name, tensor in shapes.items()}


def test_targets_of_equal_dtype_and_shape_are_filled_and_returned(storage):
    weight, bias = torch.arange(100.0).reshape(20, 5), torch.arange(7, dtype=torch.int16).view(torch.uint16)
    save({"a": {"w": weight, "b": bias, "c": weight + 1}}, storage, save_id="first", options=SMALL)
    parameter = torch.nn.Parameter(torch.zeros(20, 5))
    turned = torch.zeros(5, 20).t()
    place = torch.zeros(9, dtype=torch.uint16)
    given_targets = targets(w=parameter, b=place[1:8], c=turned)
    loaded = load(storage, rank=0, options=SMALL, targets=given_targets)["a"]
    assert loaded["w"] is parameter
    assert loaded["b"] is given_targets["a/b"]
    assert loaded["c"] is turned
    assert torch.equal(parameter, weight)
    assert place.tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 0]
    assert torch.equal(turned, weight + 1)
    assert turned.stride() == (1, 20)
    assert parameter.requires_grad
    assert parameter.grad_fn is None


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(3, 4, dtype=torch.float64),
        torch.zeros(3, 4, dtype=torch.int32),
        torch.zeros(4, 3),
        torch.zeros(12),
        torch.zeros(1, 4).expand(3, 4),
        torch.zeros(3, 4, dtype=torch.complex64).conj().imag,
        torch.zeros(3, 4).to_sparse(),
        torch.zeros(3, 4, device="meta"),
    ],
    ids=lambda tensor: f"{tensor.dtype} {list(tensor.shape)} {tensor.layout} {tensor.device}",
)
def test_other_targets_are_left_alone(target):
    weight = torch.arange(12.0).reshape(3, 4)
    storage = new_storage()
    save({"a": {"w": weight}}, storage, save_id="first", options=SMALL)
    loaded = load(storage, rank=0, options=SMALL, targets=targets(w=target))["a"]["w"]
    assert loaded is not target
    assert same(loaded, weight)
    if not target.is_meta:
        assert not target.to_dense().any() if target.layout == torch.sparse_coo else not target.any()


@pytest.mark.parametrize(
    "name", ["slice", "step", "transposed", "channels last", "permuted", "0-d", "one element with a stride"]
)
def test_targets_of_any_strides_take_any_tensor(name):
    source = VIEWS[name].clone(memory_format=torch.contiguous_format) + 1
    base = torch.full_like(VIEWS[name].contiguous(), -1)
    target = torch.as_strided(torch.full((600,), -1.0), base.shape, VIEWS[name].stride(), 7)
    storage = new_storage()
    save({"a": {"w": source}}, storage, save_id="first", options=SMALL)
    memory = torch.as_strided(target, (600,), (1,), 0)
    assert load(storage, rank=0, options=SMALL, targets=targets(w=target))["a"]["w"] is target
    assert torch.equal(target, source)
    assert (memory != -1).sum() == source.numel()


def test_tied_targets_are_filled_once_and_stay_tied():
    weight = torch.arange(5.0)
    storage = new_storage()
    save({"a": {"w": weight, "v": weight.detach()}}, storage, save_id="first", options=SMALL)
    first = torch.nn.Parameter(torch.zeros(5))
    second = first.detach()
    loaded = load(storage, rank=0, options=SMALL, targets=targets(w=first, v=second))["a"]
    assert loaded["w"] is first
    assert loaded["v"].data_ptr() == second.data_ptr() == first.data_ptr()
    assert torch.equal(first, weight)


def test_tied_targets_do_not_mix_tensors_that_were_saved_apart():
    state = {"a": {"w": torch.arange(5.0), "v": torch.arange(5.0, 10.0)}}
    storage = new_storage()
    save(state, storage, save_id="first", options=SMALL)
    first = torch.zeros(5)
    assert same(load(storage, rank=0, options=SMALL, targets=targets(w=first, v=first.detach())), state)


def test_a_single_value_is_read_into_a_target():
    storage = new_storage()
    save({"a": {"w": torch.arange(50.0)}}, storage, save_id="first", options=SMALL)
    target = torch.zeros(50)
    assert read_value(storage, "0/a/w", options=SMALL, target=target) is target
    assert torch.equal(target, torch.arange(50.0))


# --- what cannot be stored --------------------------------------------------------------------------------------------


def cyclic() -> list[Any]:
    value: list[Any] = [torch.ones(1)]
    value.append({"again": value})
    return value


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.ones(3, device="meta"), "without data"),
        (torch.nn.UninitializedParameter, "without data"),
        (lambda: Path(__file__).open("rb"), "a value of type _io.BufferedReader cannot be stored"),  # noqa: SIM115  # closed below
        (lambda: lambda: 0, "a value of type builtins.function cannot be stored, because pickle refuses"),
        (lambda: {1, lambda: 0}, "a value of type builtins.set cannot be stored"),
        (lambda: (x for x in "ab"), "a value of type builtins.generator cannot be stored"),
        (lambda: types.ModuleType("os"), "a value of type builtins.module cannot be stored"),
    ],
)  # fmt: skip
def test_what_cannot_be_stored_is_refused_before_anything_is_touched(make, message):
    value = make()
    storage = new_storage()
    with pytest.raises(UnsupportedValueError, match=rf"^a/x%2Fy/1: .*{message}"):
        save({"ok": torch.ones(5), "a": {"x/y": [1, value]}}, storage, save_id="first", options=SMALL)
    assert (storage.operations, storage.files) == ([], {})
    if hasattr(value, "close"):
        value.close()


def test_values_that_contain_themselves_are_refused_before_anything_is_touched():
    storage = new_storage()
    with pytest.raises(UnsupportedValueError, match=r"^a/1/again: this list contains itself"):
        save({"ok": 1, "a": cyclic()}, storage, save_id="first", options=SMALL)
    assert (storage.operations, storage.files) == ([], {})


def test_what_cannot_be_stored_leaves_the_old_snapshot(storage):
    save({"a": torch.ones(5)}, storage, save_id="first", options=SMALL)
    with pytest.raises(UnsupportedValueError):
        save({"a": torch.ones(6), "b": lambda: 0}, storage, save_id="second", options=SMALL)
    assert same(load(storage, rank=0, options=SMALL), {"a": torch.ones(5)})


def test_a_later_save_replaces_an_earlier_one(storage):
    save({"a": torch.ones(500), "b": {1, 2}}, storage, save_id="first", options=SMALL)
    save({"a": torch.zeros(3), "c": 5}, storage, save_id="second", options=SMALL)
    assert same(load(storage, rank=0, options=SMALL), {"a": torch.zeros(3), "c": 5})


@pytest.mark.parametrize("block_bytes", [16, 48, 4096])
@pytest.mark.parametrize("threads", [1, 4])
def test_blocks_and_threads_make_no_difference(block_bytes, threads):
    options = Options(memory_budget_bytes=1, threads=threads, block_bytes=block_bytes, chunk_bytes=100, file_bytes=300)
    state = {f"t{index}": torch.arange(index * 7, dtype=torch.float64).reshape(index, 7) for index in range(9)}
    state |= {f"c{index}": (torch.rand(index, 5) * 1j).t() for index in range(1, 5)}
    assert same(round_trip(state, options), state)


def test_a_snapshot_is_read_with_other_blocks_than_it_was_written_with():
    storage = new_storage()
    state = {"a": torch.rand(100), "b": torch.rand(30, 30).t()}
    save(state, storage, save_id="first", options=SMALL)
    assert same(load(storage, rank=0, options=LARGE), state)


def test_bytes_between_tensors_are_zero_and_not_what_a_buffer_held_before():
    storage = new_storage()
    state = {str(index): torch.full((50 + index,), 255, dtype=torch.uint8) for index in range(20)}
    save(state, storage, save_id="first", options=dataclasses.replace(SMALL, memory_budget_bytes=1))
    content = b"".join(content for name, content in storage.files.items() if name != METADATA_NAME)
    assert content.count(b"\xff") == sum(tensor.numel() for tensor in state.values())
    assert set(content) == {0, 255}
