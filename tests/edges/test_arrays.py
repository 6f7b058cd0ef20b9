"""numpy's values out of pickles: all kinds come back, and no pickle gets at memory through them."""

import collections
import io
import pickle
import types
import zipfile

import numpy as np
import pytest
import torch

from lightning_snapshot.errors import SnapshotError, UnsafeObjectError
from lightning_snapshot.objects import dumps, loads

CPU = torch.device("cpu")
RECORDS = np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "<i4"), ("b", ">f8")])
OBJECTS = np.empty(2, dtype=object)
OBJECTS[0], OBJECTS[1] = np.arange(2), [np.float32(1)]
VALUES = [
    *(
        np.float64(0.5),
        np.float32(1),
        np.bool_(True),
        np.complex64(1j),
        np.longdouble(1.5),
        np.str_("é"),
        np.bytes_(b"ab"),
    ),
    *(np.datetime64("2020-01-01"), np.timedelta64(3, "D"), RECORDS[0], np.dtype("f4"), np.dtype(">M8[us]")),
    *(
        np.zeros((0, 3)),
        np.zeros(()),
        np.arange(3, dtype=">i4"),
        np.array(["abc", "d"]),
        np.array([b"x"]),
        np.array([""]),
    ),
    *(np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.float16([1, 2])),
    *(np.array(["2020-01-01T00:00:00.123"], dtype="M8[ms]"), np.array([True, False]), RECORDS, OBJECTS),
]


def round_trip(value, *, trusted=False):
    return loads(dumps(value, "place"), "place", trusted=trusted, device=CPU)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_without_trust(value) -> None:
    found = round_trip(value)
    assert type(found) is type(value)
    assert repr(found) == repr(value)
    if isinstance(value, np.ndarray):
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert found.flags.f_contiguous == value.flags.f_contiguous
        assert found.flags.writeable


def test_arrays_are_found_in_containers_and_stay_shared() -> None:
    array = np.arange(3)
    found = round_trip([array, array, (array, {"k": array}), collections.deque([array])])
    assert all(item is found[0] for item in (found[1], found[2][0], found[2][1]["k"], found[3][0]))
    assert found[0].tolist() == [0, 1, 2]


def test_an_array_inside_another_object_needs_trust() -> None:
    value = types.SimpleNamespace(array=np.arange(3))
    with pytest.raises(UnsafeObjectError, match=r"numpy\.ndarray inside|numpy\.ndarray, which is not known"):
        round_trip(value)
    assert round_trip(value, trusted=True).array.tolist() == [0, 1, 2]


class Reduced:
    """Pickled as whatever call and state an attacker likes."""

    def __init__(self, *reduced) -> None:
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


def hostile(value) -> bytes:
    """A torch.save file with a pickle of our own."""
    file, forged = io.BytesIO(), io.BytesIO()
    torch.save(0, file)
    with zipfile.ZipFile(file) as good, zipfile.ZipFile(forged, "w") as bad:
        for name in good.namelist():
            bad.writestr(name, pickle.dumps(value, protocol=2) if name.endswith("data.pkl") else good.read(name))
    return forged.getvalue()


RECONSTRUCT, SCALAR = np.zeros(0).__reduce__()[0], np.float64(0).__reduce__()[0]
ADDRESS = b"AAAAAAAA"
# An object field with flags that deny it, so that numpy would take its bytes for plain ones.
LYING = Reduced(np.dtype, ("V8", False, True), (3, "|", None, ("f",), {"f": (np.dtype("O"), 0)}, 8, 1, 0))
LYING_OBJECT = Reduced(np.dtype, ("O", False, True), (3, "|", None, None, None, -1, -1, 0))


@pytest.mark.parametrize(
    "value",
    [
        Reduced(np.ndarray, ((1,), "O", ADDRESS)),
        Reduced(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, (1,), LYING, False, ADDRESS)),
        Reduced(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, (1,), LYING_OBJECT, False, ADDRESS)),
        Reduced(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, (10,), np.dtype("i8"), False, ADDRESS)),
        Reduced(SCALAR, (LYING, ADDRESS)),
        Reduced(SCALAR, (np.dtype("i8"), b"short")),
    ],
    ids=["buffer", "fields", "objects", "short array", "scalar", "short scalar"],
)
def test_no_pickle_makes_objects_of_addresses(value) -> None:
    with pytest.raises(SnapshotError):
        loads(hostile(value), "place", trusted=False, device=CPU)


def test_no_pickle_changes_a_dtype_that_the_program_uses() -> None:
    byte_order = np.dtype("i8").byteorder
    loads(
        hostile(Reduced(np.dtype, ("i8", False, False), (3, ">", None, None, None, -1, -1, 63))),
        "p",
        trusted=False,
        device=CPU,
    )
    assert np.dtype("i8").byteorder == byte_order
    assert np.arange(3).tolist() == [0, 1, 2]


def test_no_pickle_asks_for_endless_work() -> None:
    for value in (Reduced(list, (range(10**11),)), Reduced(__import__("fractions").Fraction, ("1e3000000000",))):
        with pytest.raises(UnsafeObjectError):
            loads(hostile(value), "place", trusted=False, device=CPU)
