"""Pickled objects: plain data is read, nothing else runs."""

import collections
import datetime
import decimal
import enum
import fractions
import functools
import http
import io
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import types
import uuid
import zipfile
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from lightning_snapshot.errors import DataError, UnsafeObjectError, UnsupportedValueError
from lightning_snapshot.objects import dumps, find_class, loads, type_name
from lightning_snapshot.stateful import StateDict
from tests.engine.strategies import same

CPU = torch.device("cpu")

called: list[object] = []


class Evil:
    """Runs code when it is read."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self.recipe = (function, arguments)

    def __reduce__(self):
        return self.recipe


class Own:
    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is Own and other.value == self.value

    __hash__ = None

    def __setstate__(self, state: dict[str, object]) -> None:
        called.append(state)
        self.__dict__.update(state)


class Colour(enum.Enum):
    RED = "red"


class Point(NamedTuple):
    x: int


class Outer:
    class Inner(NamedTuple):
        x: int


def read(value: object, *, trusted: bool = False, protocol: int = 2) -> Any:
    return loads(saved(value, protocol), "0/m/o", trusted=trusted, device=CPU)


def saved(value: object, protocol: int = 2) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_protocol=protocol)
    return buffer.getvalue()


def with_pickle(program: bytes) -> bytes:
    """A file of torch.save whose pickle is replaced by this program."""
    old, new = zipfile.ZipFile(io.BytesIO(saved({}))), io.BytesIO()
    with zipfile.ZipFile(new, "w") as archive:
        for name in old.namelist():
            archive.writestr(name, program if name.endswith("/data.pkl") else old.read(name))
    return new.getvalue()


PLAIN = [
    *(None, True, 5, -0.0, 1j, "\ud800", b"\xff", bytearray(b"a"), range(3), slice(1, None, 2), object),
    *((1, (2,)), [1, [2]], {1: {2: 3}}, {1, 2}, frozenset({(1,)}), 1 << 5000, (-(3**2000),)),
    *(collections.deque([1], 5), collections.Counter("aab"), collections.OrderedDict(a=1), collections.UserDict(a=1)),
    *(collections.defaultdict(list, a=[1]), collections.defaultdict(None, {1: 2}), StateDict(a=[1])),
    *(datetime.date(2024, 1, 1), datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc), datetime.time(1, 2)),
    *(datetime.timedelta(1, 2, 3), decimal.Decimal("1.20"), fractions.Fraction(1, 3), uuid.UUID(int=7)),
    *(types.SimpleNamespace(a=[1]), http.HTTPStatus.OK, signal.SIGTERM, uuid.SafeUUID.safe),
    *(pathlib.PurePosixPath("/a"), pathlib.PureWindowsPath("c:/a"), pathlib.Path("a")),
    *(torch.Size([1, 2]), torch.bfloat16, torch.device("cuda:1"), torch.strided),
    *(torch.ones(3), torch.nn.Parameter(torch.ones(2))),
    *(numpy.float64(0.1), numpy.int8(-1), numpy.str_("a"), numpy.datetime64("2024-01-01"), numpy.dtype("U3")),
    *(numpy.arange(6).reshape(2, 3), numpy.array(["a", "bc"]), numpy.array([None, 1], dtype=object)),
    # What torch's unpickler has no words for, around what only torch writes.
    *(collections.deque([torch.ones(3), torch.uint16, torch.Size([1]), torch.device("cpu"), torch.strided, b"\xff"]),),
    *(collections.defaultdict(list, t=torch.nn.Parameter(torch.ones(2)), n=[numpy.ones(3), uuid.UUID(int=1)]),),
    *(collections.deque([types.SimpleNamespace(a=1), collections.UserDict(a=1), torch.ones(2, dtype=torch.uint16)]),),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_data_is_read_without_trust(value):
    loaded = read(value)
    if isinstance(value, numpy.ndarray) and value.dtype == object:
        assert loaded.tolist() == value.tolist()
    else:
        assert same(loaded, value)


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_what_is_written_can_be_read_by_torch_alone(value):
    assert type(torch.load(io.BytesIO(dumps(value, "m/o")), weights_only=False)) is type(value)


def names_of(kind: type, *names: str) -> list[tuple[type, str]]:
    return [(kind, name) for name in names]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *names_of(pathlib.PurePosixPath, "pathlib.PurePosixPath", "pathlib._local.PurePosixPath"),
        *names_of(StateDict, "torchsnapshot.state_dict.StateDict", "lightning_snapshot.stateful.StateDict"),
    ],
)
def test_classes_are_known_under_the_names_of_all_versions(kind, name):
    module, _, class_name = name.rpartition(".")
    program = b"\x80\x02c" + f"{module}\n{class_name}\n".encode() + b")\x81."
    assert type(loads(with_pickle(program), "m", trusted=False, device=CPU)) is kind


@pytest.mark.parametrize("core", ["core", "_core"])
def test_numpy_is_known_under_the_names_of_all_versions(core):
    program = pickle.dumps(numpy.float32(0.5), 2).replace(b"numpy._core.", f"numpy.{core}.".encode())
    program = program.replace(b"numpy.core.", f"numpy.{core}.".encode())
    assert same(loads(with_pickle(program), "m", trusted=False, device=CPU), numpy.float32(0.5))


ATTACKS: dict[str, Any] = {
    "os.system": Evil(os.system, "touch attacked"),
    "eval": Evil(eval, "called.append(1)"),
    "exec in a deque": collections.deque([Evil(exec, "open('attacked', 'w')")]),
    "getattr": Evil(getattr, "a", "upper"),
    "partial": collections.deque([functools.partial(print, "attacked")]),
    "import": Evil(__import__, "antigravity"),
    "subprocess": collections.defaultdict(list, a=Evil(subprocess.check_output, ["touch", "attacked"])),
    "factory": collections.defaultdict(os.getcwd, a=1),
    "own class": Own(5),
    "own class in a deque": collections.deque([Own(5)]),
    "own enum": Colour.RED,
    "torch.load": collections.deque([Evil(torch.load, "attacked")]),
    "function": collections.deque([os.getcwd]),
    "pattern": re.compile("a"),
}  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
def test_nothing_else_is_read_and_nothing_runs(name, protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    called.clear()
    data = saved(ATTACKS[name], protocol)
    with pytest.raises(UnsafeObjectError, match=r"^0/m/o: reading this value needs .*trusted=True"):
        loads(data, "0/m/o", trusted=False, device=CPU)
    assert not called
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "refused", "is_class"),
    [
        (Own(5), f"{__name__}.Own", True),
        (Colour.RED, f"{__name__}.Colour", True),
        (collections.deque([Own(5)]), f"{__name__}.Own", True),
        (os.getcwd, r"posix.getcwd|nt.getcwd", False),
        (re.compile("a"), r"re\._compile", False),
        (..., r"(builtins\.)?Ellipsis", False),
    ],
)
def test_what_is_refused_is_named(value, refused, is_class):
    message = rf"needs the class or function ({refused}), which is not known"
    with pytest.raises(UnsafeObjectError, match=message) as caught:
        read(value)
    # To allow a function is to let the snapshot call it.
    assert ("add_safe_globals" in str(caught.value)) == is_class


def program(*steps: bytes) -> bytes:
    # An empty deque gets an item first, so that torch's unpickler gives up and Python's has to refuse the rest.
    return b"\x80\x02ccollections\ndeque\n)RK\x01a0" + b"".join(steps) + b"."


TARGETS = {
    "a class": (b"cuuid\nUUID\n", lambda: getattr(uuid.UUID, "attacked", None)),
    "a function": (
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        lambda: getattr(torch._utils._rebuild_tensor_v2, "attacked", None),
    ),
    "an enumeration": (b"chttp\nHTTPStatus\nK\xc8\x85R", lambda: getattr(http.HTTPStatus.OK, "attacked", None)),
    "a dtype": (b"ctorch\nfloat32\n", lambda: getattr(torch.float32, "attacked", None)),
}


@pytest.mark.parametrize("state", [b"}X\x08\x00\x00\x00attackedK\x01s", b"N}X\x08\x00\x00\x00attackedK\x01s\x86"])
@pytest.mark.parametrize("name", TARGETS)
def test_shared_objects_of_the_program_cannot_be_changed(name, state):
    target, look = TARGETS[name]
    with pytest.raises(UnsafeObjectError):
        loads(with_pickle(program(target, state, b"b")), "m", trusted=False, device=CPU)
    assert look() is None
    with pytest.raises(UnsafeObjectError):
        loads(with_pickle(b"\x80\x02" + target + state + b"b."), "m", trusted=False, device=CPU)
    assert look() is None


def test_attributes_of_plain_instances_can_be_set():
    steps = [b"ctypes\nSimpleNamespace\n)R", b"}X\x01\x00\x00\x00aK\x01s", b"b"]
    assert loads(with_pickle(program(*steps)), "m", trusted=False, device=CPU) == types.SimpleNamespace(a=1)


def test_trust_reads_everything():
    called.clear()
    assert read(Own(5), trusted=True) == Own(5)
    assert called == [{"value": 5}]
    assert read(Colour.RED, trusted=True) is Colour.RED
    assert read(re.compile("a"), trusted=True) == re.compile("a")


def test_classes_that_the_program_registered_are_safe():
    with torch.serialization.safe_globals([Own, Colour]):
        assert read([Own(5), Colour.RED]) == [Own(5), Colour.RED]
        assert read(collections.deque([Own(5)])) == collections.deque([Own(5)])
    with pytest.raises(UnsafeObjectError):
        read(Own(5))


def test_what_the_program_registered_stays_registered():
    entries = [decimal.Decimal, uuid.UUID, (Own, "elsewhere.Own")]
    with torch.serialization.safe_globals(entries):
        before = set(torch.serialization.get_safe_globals())
        assert read([decimal.Decimal(1), uuid.UUID(int=1)]) == [decimal.Decimal(1), uuid.UUID(int=1)]
        assert set(torch.serialization.get_safe_globals()) == before
    before = set(torch.serialization.get_safe_globals())
    read(decimal.Decimal(1))
    assert set(torch.serialization.get_safe_globals()) == before


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: data[:-30], lambda data: b"garbage", lambda data: data[40:]]
)
def test_damaged_bytes_are_an_error_of_the_data(trusted, damage):
    with pytest.raises((DataError, UnsafeObjectError), match=r"^0/m/o: "):
        loads(damage(saved([torch.ones(3), {1}])), "0/m/o", trusted=trusted, device=CPU)


def test_a_class_that_fails_while_it_is_read_is_an_error_of_the_data():
    with pytest.raises(DataError, match=r"^0/m/o: the stored value cannot be read: ZeroDivisionError: "):
        read(Evil(divmod, 1, 0), trusted=True)


def test_tensors_go_where_they_are_wanted():
    loaded = loads(saved([torch.ones(3)]), "m", trusted=False, device=torch.device("meta"))
    assert loaded[0].is_meta


def test_jagged_tensors_are_read_by_a_program_that_has_not_used_them(tmp_path):
    jagged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    (tmp_path / "jagged").write_bytes(dumps(jagged, "m"))
    code = (
        "import sys, torch; from lightning_snapshot.objects import loads; "
        "print(loads(open(sys.argv[1], 'rb').read(), 'm', trusted=False, device=torch.device('cpu')).values().numel())"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "jagged")]
    assert subprocess.run(command, capture_output=True, check=True, text=True).stdout == "3\n"


@pytest.mark.parametrize("value", [lambda: 0, (x for x in ()), types.ModuleType("m"), {"a": {1: sys.stdout}}])
def test_what_pickle_refuses_is_named_with_its_place(value):
    with pytest.raises(
        UnsupportedValueError, match=rf"^m/o: a value of type {re.escape(type_name(value))} cannot be stored"
    ):
        dumps(value, "m/o")


def test_errors_of_own_classes_while_they_are_stored_are_wrapped():
    class Broken:
        def __getstate__(self):
            raise RuntimeError("no state today")

    with pytest.raises(UnsupportedValueError, match=r"^m/o: .*Broken cannot be stored.*\(no state today\)"):
        dumps(Broken(), "m/o")


def test_type_names_are_those_of_torchsnapshot():
    values = [None, (1,), numpy.float32(1), numpy.zeros(1), torch.Size(), Outer.Inner(1)]
    assert [type_name(value) for value in values] == [
        "builtins.NoneType", "builtins.tuple", "numpy.float32", "numpy.ndarray", "torch.Size", f"{__name__}.Inner",
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [(Point, "Point"), (Outer.Inner, "Outer.Inner")])
def test_named_tuples_are_found_if_trusted_or_registered(kind, name):
    assert find_class("m/p", f"{__name__}:{name}", trusted=True) is kind
    with torch.serialization.safe_globals([kind]):
        assert find_class("m/p", f"{__name__}:{name}", trusted=False) is kind
    with pytest.raises(UnsafeObjectError, match=rf"^m/p: .*needs the class {__name__}.{name}\. .*trusted=True"):
        find_class("m/p", f"{__name__}:{name}", trusted=False)


@pytest.mark.parametrize("name", ["no_such_module:A", f"{__name__}:Absent", f"{__name__}:Outer.Absent", "", ":"])
def test_named_tuples_that_are_gone_are_named(name):
    with pytest.raises(
        DataError, match=rf"^m/p: the class {name.replace(':', '.')} of this named tuple cannot be imported"
    ):
        find_class("m/p", name, trusted=True)
