"""numpy's arrays, scalars and dtypes out of a pickle, without numpy's own unpickling code.

That code believes what a pickle says about memory: ``numpy.ndarray((1,), "O", b"…")`` makes an object of any address,
and a dtype takes its flags from the pickle. So the names under which a pickle asks for numpy lead to the stand-ins
here, which check everything and build arrays from plain bytes.
"""

import math
import pickle
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["NumpyArray", "NumpyDtype", "load_with_arrays", "new_array", "new_scalar"]

# How many stand-ins for arrays the pickle that this thread reads has made.
_thread = threading.local()

_BYTE_ORDERS = frozenset("<>|=")
_FOREIGN_ORDER = ">" if sys.byteorder == "little" else "<"
# Positions in the state of a dtype.
_FIELD_NAMES, _FIELDS, _ITEM_BYTES = 3, 4, 5
_DATETIME_METADATA = 8
# Dimensions of a shape, fields of a record. What numbers without end would ask for takes time without end.
_MAX_PARTS = 1000


class NumpyDtype:
    """A ``numpy.dtype`` that is being unpickled."""

    def __init__(self, code: object, *_: object) -> None:
        """Take what `numpy.dtype` is called with in a pickle; the rest does not change what a dtype of a code is."""
        if not isinstance(code, str):
            msg = f"expected the code of a numpy dtype, found {type(code).__name__}"
            raise TypeError(msg)
        self._code = code
        self.value = import_module("numpy").dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Take byte order, fields and the unit of dates; nothing about memory."""
        numpy = import_module("numpy")
        order, subarray = state[1], state[2]
        if order not in _BYTE_ORDERS:
            msg = f"expected the byte order of a numpy dtype, found {order!r}"
            raise ValueError(msg)
        if subarray is not None:
            base, shape = subarray
            self.value = numpy.dtype((base.value, shape))
        elif state[_FIELDS] is not None:
            _check_tuple(state[_FIELD_NAMES])
            fields = [state[_FIELDS][name] for name in state[_FIELD_NAMES]]
            self.value = numpy.dtype(
                {
                    "names": list(state[_FIELD_NAMES]),
                    "formats": [field[0].value for field in fields],
                    "offsets": [field[1] for field in fields],
                    "itemsize": state[_ITEM_BYTES],
                }
            )
        elif len(state) > _DATETIME_METADATA:
            unit, count = state[_DATETIME_METADATA][1][:2]
            self.value = numpy.dtype(f"{self._code}[{int(count)}{unit.decode()}]")
        if order == _FOREIGN_ORDER:
            self.value = self.value.newbyteorder(order)


class NumpyArray:
    """A ``numpy.ndarray`` that is being unpickled; `load_with_arrays` puts the real one in its place."""

    def __init__(self) -> None:
        """Take no arguments: whatever a pickle wants to pass here is about memory."""
        self.value: Any = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Take shape, dtype and elements."""
        _, shape, dtype, is_fortran, elements = state
        _check_tuple(shape)
        numpy = import_module("numpy")
        count = math.prod(shape)
        if dtype.value.kind == "O":
            flat = numpy.empty(len(_checked_objects(elements, count)), dtype=object)
            for index, element in enumerate(elements):
                flat[index] = element
        else:
            flat = numpy.frombuffer(_checked(dtype, elements, count), dtype.value)
        self.value = flat.reshape(shape, order="F" if is_fortran else "C").copy(order="K")


def new_array(kind: type, shape: tuple[int, ...], code: bytes) -> NumpyArray:
    """Stands for ``numpy.core.multiarray._reconstruct``."""
    if kind is not NumpyArray:
        msg = f"expected an ordinary numpy array, found one of {kind!r}"
        raise TypeError(msg)
    del shape, code  # of the empty array that the state replaces
    _thread.made += 1
    return NumpyArray()


def new_scalar(dtype: NumpyDtype, element: bytes) -> Any:
    """Stands for ``numpy.core.multiarray.scalar``."""
    return import_module("numpy").frombuffer(_checked(dtype, element, 1), dtype.value)[0]


def _check_tuple(parts: object) -> None:
    if type(parts) is not tuple or len(parts) > _MAX_PARTS:
        msg = f"expected a tuple of at most {_MAX_PARTS} parts, found {type(parts).__name__}"
        raise ValueError(msg)


def _checked(dtype: NumpyDtype, elements: Any, count: int) -> bytes:
    # Text and bytes of length zero have elements of no bytes, which frombuffer refuses as well.
    if not isinstance(elements, bytes) or dtype.value.hasobject or len(elements) != count * dtype.value.itemsize:
        msg = f"expected {count} elements of {dtype.value} as bytes, found {type(elements).__name__}"
        raise ValueError(msg)
    return elements


def _checked_objects(elements: Any, count: int) -> list[Any]:
    if not isinstance(elements, list) or len(elements) != count:
        msg = f"expected a list of {count} objects, found {type(elements).__name__}"
        raise ValueError(msg)
    return elements


def load_with_arrays(load: Callable[[], Any]) -> Any:
    """Unpickle, then put real arrays in the place of stand-ins.

    Args:
        load: Unpickles with the names of numpy leading to this module.

    Returns:
        The value. Arrays may be anywhere in lists, tuples, dictionaries, deques and arrays of objects.

    Raises:
        UnpicklingError: There is one in another kind of object.
    """
    _thread.made = 0
    exchange = _Exchange()
    value = exchange.real(load())
    if exchange.found != _thread.made:
        msg = "GLOBAL numpy.ndarray inside another object"
        raise pickle.UnpicklingError(msg)
    return value


class _Exchange:
    def __init__(self) -> None:
        self._done: dict[int, Any] = {}
        self._keep: list[Any] = []  # ids are only good as long as the objects live
        self.found = 0

    def real(self, value: Any) -> Any:
        if id(value) in self._done:
            return self._done[id(value)]
        self._keep.append(value)
        self._done[id(value)] = value
        if type(value) in {NumpyArray, NumpyDtype}:
            self.found += type(value) is NumpyArray
            self._done[id(value)] = value.value
            if type(value) is NumpyArray and value.value.dtype.kind == "O":
                flat = value.value.reshape(-1, order="A")
                self._items(range(flat.size), flat.__getitem__, flat.__setitem__)
            return value.value
        if type(value) in {list, deque}:
            self._items(range(len(value)), value.__getitem__, value.__setitem__)
        elif type(value) in {dict, OrderedDict, defaultdict}:
            self._items(list(value), value.__getitem__, value.__setitem__)
        elif type(value) is tuple:
            items = [self.real(item) for item in value]
            if any(new is not old for new, old in zip(items, value, strict=True)):
                self._done[id(value)] = tuple(items)
        return self._done[id(value)]

    def _items(self, keys: Any, get: Callable[[Any], Any], put: Callable[[Any, Any], None]) -> None:
        for key in keys:
            old = get(key)
            new = self.real(old)
            if new is not old:
                put(key, new)
