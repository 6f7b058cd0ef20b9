"""Values that are neither tensors nor containers nor primitives ↔ bytes in ``torch.save``'s format.

Reading them means unpickling. By default only torch's weights-only unpickler does that, with a list of classes that
hold nothing but data; it calls nothing else, whatever the bytes say. What it cannot express (items of a ``deque`` or a
``defaultdict``, very large integers) is read by Python's unpickler under the same rules. Classes that the program
itself registered with ``torch.serialization.add_safe_globals`` count as safe, too.
"""

import codecs
import collections
import datetime
import decimal
import fractions
import functools
import http
import io
import pathlib
import pickle
import re
import signal
import sys
import threading
import types
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, ClassVar, TypeAlias

import torch

from lightning_snapshot import arrays, vetting
from lightning_snapshot.errors import DataError, UnsafeObjectError, UnsupportedValueError
from lightning_snapshot.stateful import StateDict

__all__ = ["dumps", "find_class", "how_to_allow", "loads", "type_name"]

# torch.serialization.safe_globals edits one list of the whole process.
_registry_lock = threading.Lock()

_Callable: TypeAlias = Callable[..., Any]

_PLAIN_DATA: tuple[type, ...] = (
    *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, slice, range, object),
    *(collections.deque, collections.Counter, collections.defaultdict, collections.OrderedDict, collections.UserDict),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    *(decimal.Decimal, uuid.UUID, types.SimpleNamespace),
    StateDict,
)
# Members of an enumeration are shared by the whole program: they may be looked up, but not changed.
_ENUMS = (http.HTTPStatus, signal.Signals, uuid.SafeUUID)
_MAX_QUOTED_CHARACTERS = 1000
_PATHS = (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)


def type_name(value: object) -> str:
    """Module and name of a value's class, as torchsnapshot writes it into ``obj_type``."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__name__}"


def dumps(value: object, place: str) -> bytes:
    """Store a value.

    Args:
        value: Anything that can be pickled.
        place: Where it is in the state, for the message.

    Raises:
        UnsupportedValueError: It cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Warning:  # the caller turned warnings into errors
        raise
    # Pickling runs __reduce__ and __getstate__ of any class, which may raise anything.
    except Exception as error:
        msg = (
            f"{place}: a value of type {type_name(value)} cannot be stored, because pickle refuses it ({error}); "
            "remove it from the state or replace it by plain data"
        )
        raise UnsupportedValueError(msg) from error
    return buffer.getvalue()


def loads(data: bytes | bytearray, place: str, *, trusted: bool, device: torch.device) -> Any:
    """Read a value back.

    Args:
        data: What `dumps`, ``torch.save`` or torchsnapshot wrote.
        place: Where it is in the snapshot, for messages.
        trusted: Whether classes that are not known as plain data may run their code.
        device: Where tensors in it go.

    Raises:
        UnsafeObjectError: It would run code that is not on the list, and ``trusted`` is false.
        DataError: The bytes are damaged, or the code of a trusted class fails.
    """
    if not trusted:
        _vet(data, place)
    if b"torch.nested._internal" in data:
        import_module("torch._dynamo")  # or else torch refuses nested tensors of the jagged layout
    try:
        with _registry_lock, _checked_sparse_tensors(), torch.serialization.safe_globals(_unregistered_safe_globals()):
            load = functools.partial(torch.load, io.BytesIO(data), map_location=device, weights_only=True)
            return arrays.load_with_arrays(load)
    except pickle.UnpicklingError as error:
        if not trusted:
            return _loads_plain(data, place, device, error)
    except Warning:  # the caller turned warnings into errors
        raise
    # Damaged bytes make torch and its zip reader raise anything from RuntimeError to KeyError.
    except Exception as error:
        if not trusted:
            msg = f"{place}: expected a value stored by torch.save, but it cannot be read: {_brief(error)}"
            raise DataError(msg) from error
    try:
        return torch.load(io.BytesIO(data), map_location=device, weights_only=False)
    # The caller's classes run here.
    except Exception as error:
        msg = f"{place}: the stored value cannot be read: {type(error).__name__}: {error}"
        raise DataError(msg) from error


def _vet(data: bytes | bytearray, place: str) -> None:
    try:
        vetting.check(data)
    except pickle.UnpicklingError as error:
        raise _refusal(place, str(error)) from error
    # Damaged or hostile bytes make Python's zip reader raise anything, too.
    except Exception as error:
        msg = f"{place}: expected a value stored by torch.save, found {_brief(error)}"
        raise DataError(msg) from error


def _checked_sparse_tensors() -> AbstractContextManager[object]:
    """Makes torch refuse sparse tensors whose indices lead out of them, and with that to foreign memory."""
    checks: Any = torch.sparse.check_sparse_tensor_invariants
    return checks(enable=True)  # type: ignore[no-any-return]  # torch has no types here


def _loads_plain(data: bytes | bytearray, place: str, device: torch.device, refusal: Exception) -> Any:
    """What torch's weights-only unpickler refused, if it is plain data nevertheless."""
    reader = types.SimpleNamespace(__name__="plain data", Unpickler=_PlainUnpickler)
    try:
        load = functools.partial(torch.load, io.BytesIO(data), map_location=device, weights_only=False)
        return arrays.load_with_arrays(functools.partial(load, pickle_module=reader))
    # Damaged or hostile bytes raise anything; whatever goes wrong here, the value is refused.
    except Exception as error:  # noqa: BLE001  # see above
        cause = error if isinstance(error, pickle.UnpicklingError) else refusal
        raise _refusal(place, _refused_global(cause)) from cause


def _refusal(place: str, what: str) -> UnsafeObjectError:
    return UnsafeObjectError(
        f"{place}: reading this value needs {what}, which is not known to be plain data. If you trust whoever wrote "
        "the snapshot, pass weights_only=False to Lightning, or trusted=True to SnapshotCheckpointIO, Snapshot or "
        f"load_from_checkpoint{how_to_allow(what.rsplit(maxsplit=1)[-1])}"
    )


def how_to_allow(name: str) -> str:
    """The end of a message that refuses something: how to register a class; nothing for a function, which may do harm.

    Args:
        name: Module and name of what was refused. It is not imported.
    """
    module, _, attribute = name.rpartition(".")
    known = getattr(sys.modules.get(module), attribute, None)
    is_class = known is None or isinstance(known, type)
    return "; or allow a class of yours with torch.serialization.add_safe_globals" if is_class else ""


# The one written in C cannot be told to refuse BUILD.
_PythonUnpickler: Any = pickle._Unpickler  # noqa: SLF001  # see above


class _PlainUnpickler(_PythonUnpickler):  # type: ignore[misc]  # typeshed leaves most of that class away
    """Python's unpickler, confined to the safe classes and functions.

    What a pickle can call is what `find_class` returns. It can change the attributes of instances of safe classes, but
    not of the classes and functions themselves.
    """

    def find_class(self, module: str, name: str) -> Any:
        module, name = vetting.current_name(module, name)
        safe = _by_name()
        if f"{module}.{name}" not in safe:
            msg = f"GLOBAL {module}.{name}"
            raise pickle.UnpicklingError(msg)
        return safe[f"{module}.{name}"]

    def load_build(self) -> None:
        kind = type(self.stack[-2])
        if not any(kind is safe for safe in _by_name().values()):
            msg = f"to change attributes of GLOBAL {kind.__module__}.{kind.__qualname__}"
            raise pickle.UnpicklingError(msg)
        super().load_build()

    dispatch: ClassVar = {**_PythonUnpickler.dispatch, pickle.BUILD[0]: load_build}


def find_class(path: str, name: str, *, trusted: bool) -> Any:
    """The class of a stored named tuple.

    Args:
        path: Where it is in the snapshot, for messages.
        name: ``module:qualified name``.
        trusted: Whether a module may be imported for it.

    Raises:
        UnsafeObjectError: It is no class registered as safe, and ``trusted`` is false.
        DataError: There is no such class any more.
    """
    dotted = name.replace(":", ".")
    for known in torch.serialization.get_safe_globals():
        kind, known_name = known if isinstance(known, tuple) else (known, f"{known.__module__}.{known.__qualname__}")
        if known_name == dotted:
            return kind
    if not trusted:
        msg = (
            f"{path}: reading this named tuple needs the class {dotted}. If you trust whoever wrote the snapshot, pass "
            "weights_only=False (Lightning) or trusted=True; or allow the class with "
            "torch.serialization.add_safe_globals"
        )
        raise UnsafeObjectError(msg)
    module, _, qualified_name = name.partition(":")
    try:
        return functools.reduce(getattr, qualified_name.split("."), import_module(module))
    # Importing a module runs it.
    except Exception as error:
        msg = f"{path}: the class {dotted} of this named tuple cannot be imported: {error}"
        raise DataError(msg) from error


@functools.cache
def _safe_globals() -> tuple[_Callable | tuple[_Callable, str], ...]:
    # Python 3.13 moved the path classes and back again; snapshots travel between versions.
    paths = tuple((kind, f"{module}.{kind.__name__}") for kind in _PATHS for module in ("pathlib", "pathlib._local"))
    enums = tuple((functools.partial(kind), f"{kind.__module__}.{kind.__qualname__}") for kind in _ENUMS)
    return (
        *_PLAIN_DATA,
        *paths,
        *enums,
        (_exact_fraction, "fractions.Fraction"),
        *_numpy_globals(),
        (StateDict, "torchsnapshot.state_dict.StateDict"),
    )


def _exact_fraction(*parts: int | str) -> fractions.Fraction:
    """A fraction of written-out numbers: an exponent may ask for billions of digits."""
    if any("e" in str(part).lower() for part in parts):
        msg = "GLOBAL fractions.Fraction with an exponent"
        raise pickle.UnpicklingError(msg)
    return fractions.Fraction(*parts)


def _unregistered_safe_globals() -> list[_Callable | tuple[_Callable, str]]:
    # safe_globals takes what it is given out of torch's list at the end, also what the program had put there.
    registered = torch.serialization.get_safe_globals()
    return [entry for entry in _safe_globals() if entry not in registered]


def _by_name() -> Mapping[str, Any]:
    """Full name → safe class or function."""
    registered = torch.serialization.get_safe_globals()
    pairs = (e if isinstance(e, tuple) else (e, f"{e.__module__}.{e.__qualname__}") for e in registered)
    return _built_in() | {name: entry for entry, name in pairs}


@functools.cache
def _built_in() -> dict[str, Any]:
    pairs = (e if isinstance(e, tuple) else (e, f"{e.__module__}.{e.__qualname__}") for e in _safe_globals())
    rebuild = vars(import_module("torch._utils"))
    functions = ("_rebuild_parameter", "_rebuild_tensor_v2", "_rebuild_tensor_v3")
    return {
        **{name: entry for entry, name in pairs},
        **{f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
        **{f"torch._utils.{name}": rebuild[name] for name in functions},
        "_codecs.encode": codecs.encode,  # protocol 2 writes bytes as text
        "torch.Size": torch.Size,
        "torch.device": torch.device,
        "torch.serialization._get_layout": vars(import_module("torch.serialization"))["_get_layout"],
        "torch.storage.UntypedStorage": torch.UntypedStorage,
    }


def _numpy_globals() -> tuple[_Callable | tuple[_Callable, str], ...]:
    # numpy 2 renamed numpy.core.
    functions = ((arrays.new_array, "_reconstruct"), (arrays.new_scalar, "scalar"))
    return (
        *((function, f"numpy.{core}.multiarray.{name}") for function, name in functions for core in ("core", "_core")),
        (arrays.NumpyArray, "numpy.ndarray"),
        (arrays.NumpyDtype, "numpy.dtype"),
    )


def _refused_global(error: Exception) -> str:
    for pattern in (r"GLOBAL (\S+)", r"but got <class '(\S+)'>", r"function (<.+>)"):
        if match := re.search(pattern, _brief(error)):
            return f"the class or function {match[1]}"
    return f"more than plain data ({_brief(error)})"


def _brief(error: Exception) -> str:
    """What an error says. torch, for one, quotes all of a hostile file's arguments, which may take megabytes."""
    return str(error)[:_MAX_QUOTED_CHARACTERS]
