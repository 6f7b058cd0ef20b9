"""What is refused before it is unpickled, and what is not. The attacks themselves are in ``tests/hostile``."""

import collections
import pickle
import types
import zipfile

import pytest
import torch

from lightning_snapshot.objects import dumps, loads
from lightning_snapshot.vetting import check, current_name
from tests.engine.strategies import same
from tests.hostile.forge import blob_of

SHARED = {str(number): number for number in range(300)}


def nested(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value, value] if levels < 10 else (value,)
    return value


HARMLESS = {
    "shared by many": (*[SHARED] * 300,),
    "deep": nested(150),
    "twice at every level": {(1, 2): nested(9)},
    "factories": [collections.defaultdict(kind, a=1) for kind in (int, str, list, tuple, dict, bytearray)],
    "classes": {1, int, str, bytearray},
    "range": range(10**12),
    "range in containers": {(1,): [range(3), {"r": range(3)}]},
    "range in other containers": (collections.OrderedDict(r=range(3)), collections.deque([range(4)])),
    "range as an attribute": types.SimpleNamespace(r=range(3)),
    "bytes": (bytearray(b"\xff\0"), b"\xff\0", bytearray()),
    "long": (b"x" * 10**6, "é" * 10**5, 1 << 5000),
    "views of one storage": (torch.arange(6.0)[2:], torch.arange(6.0)[:0], torch.zeros(0)),
}


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_programs_store_passes(name, protocol) -> None:
    value = HARMLESS[name]
    check(dumps(value, "p"))
    if "storage" not in name:
        check(blob_of(pickle.dumps(value, protocol)))


@pytest.mark.parametrize("name", sorted(HARMLESS.keys() - {"range", "classes"}))
def test_what_passes_is_read(name) -> None:
    assert same(loads(dumps(HARMLESS[name], "p"), "p", trusted=False, device=torch.device("cpu")), HARMLESS[name])


def test_a_value_that_contains_itself_passes() -> None:
    value: list[object] = []
    value.extend([value, value])
    check(dumps(value, "p"))


@pytest.mark.parametrize(
    ("program", "error", "message"),
    [
        (b"\x80\x02cbuiltins\nint\n)R.", pickle.UnpicklingError, r"a call of builtins\.int"),
        (b"\x80\x02c__builtin__\nlong\n)R.", pickle.UnpicklingError, r"a call of builtins\.int"),
        (b"\x80\x04\x8c\x0b__builtin__\x8c\x04long\x93)R.", pickle.UnpicklingError, r"a call of builtins\.int"),
        (b"\x80\x02(cos\nmkdir\no.", pickle.UnpicklingError, "the pickle opcode OBJ"),
        (b"\x80\x02" + b"\x85" * 10, ValueError, "a pickle that cannot be read"),
        (b"\x80\x02.", ValueError, "a pickle that cannot be read .*nothing that STOP could take"),
        (b"\x80\x02(\x85.", ValueError, "nothing that TUPLE1 could take"),
        (b"\x80\x02N", ValueError, "a pickle that cannot be read"),
        (b"\x80\x02h\x07.", ValueError, "a pickle that cannot be read"),
        (b"\x80\x02K\x01K\x02a.", ValueError, "a pickle that cannot be read"),
    ],
)
def test_what_is_refused_is_described(program, error, message) -> None:
    with pytest.raises(error, match=message):
        check(blob_of(program))


def test_a_damaged_zip_file_is_no_refusal() -> None:
    with pytest.raises(zipfile.BadZipFile, match="no table of contents"):
        check(dumps(1, "p") + b"x")


def test_names_of_python_2() -> None:
    assert current_name("__builtin__", "xrange") == ("builtins", "range")
    assert current_name("copy_reg", "x") == ("copyreg", "x")
    assert current_name("os", "mkdir") == ("os", "mkdir")
