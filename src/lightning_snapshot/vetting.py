"""What is looked at in a file of ``torch.save`` before it is read, if nobody vouches for the file.

The unpicklers of `lightning_snapshot.objects` run no foreign code. But they do whatever work a file asks for, and torch
believes what it says about sizes: thirty bytes can ask for gigabytes, two hundred for a year of hashing, and a few
million nested tuples overflow the stack of the process. So the zip file must be as ``torch.save`` writes it, and the
pickle in it is taken apart, without being run, to see what it would do.
"""

import io
import pickle
import pickletools
import re
import struct
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["check", "current_name"]

_END = struct.Struct("<4s4H2IH")
_LOCATOR_64 = struct.Struct("<4sIQI")
_END_64 = struct.Struct("<4sQ2H2I4Q")

# Work per byte of a pickle, in values that are looked at, that values of ordinary programs stay far below.
_MAX_WORK_PER_BYTE = 100
_MAX_WORK_OF_SMALL = 2**20
# Python's own pickler cannot write more.
_MAX_DEPTH = 1000

_ITEM_BYTES = {
    **dict.fromkeys(("ComplexDoubleStorage",), 16),
    **dict.fromkeys(("DoubleStorage", "LongStorage", "ComplexFloatStorage"), 8),
    **dict.fromkeys(("FloatStorage", "IntStorage", "QInt32Storage"), 4),
    **dict.fromkeys(("HalfStorage", "BFloat16Storage", "ShortStorage"), 2),
    **dict.fromkeys(("CharStorage", "ByteStorage", "BoolStorage", "QInt8Storage", "QUInt8Storage"), 1),
    **dict.fromkeys(("QUInt4x2Storage", "QUInt2x4Storage", "UntypedStorage"), 1),
}
# Pickles mention these as factories, and have opcodes of their own for values of them.
_NEVER_CALLED = frozenset(f"builtins.{name}" for name in ("bool", "int", "float", "str", "list", "tuple", "dict"))
# Nor do these say what is in the memory that they take.
_MAKES_MEMORY = re.compile(r"torch\.(.+\.)?\w*(Tensor|Storage)")
# It is given another function, a class, and the arguments of that function.
_ITS_ARGUMENTS = 2
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
_ADDITIONS = frozenset({"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"})
# How many values they take. Items and state of what they make are added to those.
_CALLS = {"REDUCE": 2, "NEWOBJ": 2, "NEWOBJ_EX": 3}
_TUPLES = frozenset({"EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"})
_CONSTANT_TYPES = {"int", "int_or_bool", "bool", "float", "None", "str", "bytes", "bytes_or_str", "bytearray"}
_CONSTANTS = frozenset(
    opcode.name
    for opcode in pickletools.opcodes
    if not opcode.stack_before and opcode.stack_after and opcode.stack_after[0].name in _CONSTANT_TYPES
)
# Not written for plain data: calls of another kind, code numbers of the program, memory and names from elsewhere.
_REFUSED = frozenset({"OBJ", "INST", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER", "PERSID"})


def check(data: bytes | bytearray) -> None:
    """Refuse a file of ``torch.save`` that would take memory or time out of proportion to its length.

    Raises:
        UnpicklingError: Its pickle asks for too much, or for what no pickle of plain data asks for.
        Exception: It is damaged: `BadZipFile` if it is not as ``torch.save`` writes it, or whatever Python's zip reader
            finds.
    """
    sizes, program = _open(data)
    values = list(_made_by(program))
    _check_work(values, _MAX_WORK_OF_SMALL + _MAX_WORK_PER_BYTE * len(program))
    for value in values:
        if value.opcode in _CALLS:
            _check_call(value)
        elif value.opcode == "BINPERSID":
            _check_storage(value, sizes)
    if any(value.name == "builtins.range" for value in values):
        _check_ranges(values)


def current_name(module: str, name: str) -> tuple[str, str]:
    """The module and name in this Python of what a pickle of Python 2 may call otherwise."""
    return NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))


# --- the zip file ----------------------------------------------------------------------------------------------------


def _open(data: bytes | bytearray) -> tuple[dict[str, int], bytes]:
    """The lengths of the storages by their keys, and the pickle."""
    _check_ends(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        names = {member.orig_filename.lower() for member in members}
        if len(names) < len(members) or not all(name.isascii() for name in names):
            msg = "two files of one name in it, which torch does not tell apart"
            raise zipfile.BadZipFile(msg)
        size_bytes = sum(member.file_size for member in members)
        if size_bytes > len(data):  # torch.save compresses nothing
            msg = f"files of {size_bytes} bytes in a zip file of {len(data)} bytes"
            raise zipfile.BadZipFile(msg)
        folder = members[0].orig_filename.partition("/")[0] if members else ""
        prefix = f"{folder}/data/"
        sizes = {
            member.orig_filename[len(prefix) :]: member.file_size
            for member in members
            if member.orig_filename.startswith(prefix)
        }
        return sizes, archive.read(f"{folder}/data.pkl")


def _check_ends(data: bytes | bytearray) -> None:
    """Make sure that Python and torch read the same table of contents."""
    end = len(data) - _END.size
    if end < 0 or data[:4] != b"PK\3\4":
        msg = "no zip file"
        raise zipfile.BadZipFile(msg)
    signature, *_, size, begin, comment = _END.unpack_from(data, end)
    is_sound = signature == b"PK\5\6" and not comment
    locator = end - _LOCATOR_64.size
    if locator >= _END_64.size and data[locator : locator + 4] == b"PK\6\7":
        end = locator - _END_64.size
        signature, *_, size, begin = _END_64.unpack_from(data, end)
        is_sound = is_sound and signature == b"PK\6\6" and _LOCATOR_64.unpack_from(data, locator)[2] == end
    if not is_sound or begin + size != end:
        msg = "no table of contents right before its end"
        raise zipfile.BadZipFile(msg)


# --- the pickle ------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False, repr=False)
class _Made:
    """A value that a pickle makes of other values. Constants stand for themselves.

    Attributes:
        opcode: What makes it.
        parts: What it is made of.
        name: Full name, if it is a class or function.
    """

    opcode: str
    parts: list[Any]
    name: str = ""


_MARK = _Made("MARK", [])


def _made_by(program: bytes) -> Iterator[_Made]:
    """All values but constants that a pickle makes, in order."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for opcode, argument, _ in pickletools.genops(program):
            made = _step(opcode, argument, stack, memo)
            if made is not None:
                yield made
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        msg = f"a pickle that cannot be read ({type(error).__name__}: {error})"
        raise ValueError(msg) from error


def _step(opcode: pickletools.OpcodeInfo, argument: Any, stack: list[Any], memo: dict[int, Any]) -> _Made | None:
    """Do to a stack what an opcode does; gives the new value, if it is no constant."""
    name = opcode.name
    if name in _REFUSED:
        msg = f"the pickle opcode {name}"
        raise pickle.UnpicklingError(msg)
    if name in _CONSTANTS:
        stack.append(argument)
    elif name == "MARK":
        stack.append(_MARK)
    elif name in _PUTS:
        memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
    elif name in _GETS:
        stack.append(memo[argument])
    elif name == "DUP":
        stack.append(stack[-1])
    elif name in _ADDITIONS:
        whole, *parts = _take(stack, opcode)
        whole.parts.extend(parts)
        stack.append(whole)
        return _Made(name, parts) if name == "BUILD" else None
    else:
        parts = _take(stack, opcode)
        if opcode.stack_after:
            made = _Made(name, parts, _name(name, argument, parts))
            stack.append(made)
            return made
    return None


def _name(opcode: str, argument: Any, parts: list[Any]) -> str:
    if opcode == "GLOBAL":
        module, _, name = argument.partition(" ")
        return ".".join(current_name(module, name))
    is_named = opcode == "STACK_GLOBAL" and all(type(part) is str for part in parts)
    return ".".join(current_name(*parts)) if is_named else ""


def _take(stack: list[Any], opcode: pickletools.OpcodeInfo) -> list[Any]:
    """Take from a stack what an opcode takes."""
    before = opcode.stack_before
    if pickletools.markobject in before:
        mark = len(stack) - 1
        while stack[mark] is not _MARK:
            mark -= 1
        begin = mark - before.index(pickletools.markobject)
        taken = [*stack[begin:mark], *stack[mark + 1 :]]
    else:
        begin = len(stack) - len(before)
        taken = stack[begin:]
    is_misplaced = any(part is _MARK for part in taken) and opcode.name != "POP"  # picklers pop marks, too
    if begin < 0 or is_misplaced:
        msg = f"nothing that {opcode.name} could take"
        raise IndexError(msg)
    del stack[begin:]
    return taken


def _check_work(values: list[_Made], limit: int) -> None:
    """Refuse values that are shared so often, or nested so deeply, that hashing or printing them never ends."""
    work: dict[_Made, int] = {}
    depths: dict[_Made, int] = {}
    for root in values:
        pending = [root]
        while pending:
            value = pending[-1]
            inner = [part for part in value.parts if type(part) is _Made]
            if value not in depths:
                depths[value] = 0  # what contains itself meets this
                pending += [part for part in inner if part not in depths]
                continue
            pending.pop()
            if value in work:
                continue
            texts = sum(len(part) for part in value.parts if isinstance(part, (str, bytes, bytearray)))
            work[value] = 1 + len(value.parts) + texts + sum(work.get(part, 0) for part in inner)
            depths[value] = 1 + max((depths[part] for part in inner), default=0)
            limit -= work[value]
            if limit < 0 or depths[value] > _MAX_DEPTH:
                msg = "far more work, or deeper nesting, than its length allows for"
                raise pickle.UnpicklingError(msg)


def _check_call(call: _Made) -> None:
    """Refuse the few calls of safe classes and functions whose results can be of any size, whatever they are given."""
    function, arguments = (part if type(part) is _Made else _Made("", []) for part in call.parts[:2])
    parts = arguments.parts
    defect = None
    if function.name in _NEVER_CALLED or _MAKES_MEMORY.fullmatch(function.name):
        defect = ""
    elif arguments.opcode not in _TUPLES:  # which alone stay as they are
        defect = " without a tuple of arguments"
    elif function.name == "builtins.bytearray" and parts and not _is_bytes(parts[0]):
        defect = " with something else than bytes"
    elif function.name == "_codecs.encode" and parts[1:] != ["latin1"]:
        defect = " for another encoding than latin1"
    elif function.name == "torch._tensor._rebuild_from_type_v2" and len(parts) > _ITS_ARGUMENTS:
        _check_call(_Made("REDUCE", [parts[0], parts[_ITS_ARGUMENTS]]))
    if defect is not None:
        msg = f"a call of {function.name}{defect}"
        raise pickle.UnpicklingError(msg)


def _name_of(part: Any) -> str:
    return part.name if type(part) is _Made else ""


def _is_bytes(part: Any) -> bool:
    if type(part) is _Made:
        return part.opcode in _CALLS and _name_of(part.parts[0]) == "_codecs.encode"
    return isinstance(part, (str, bytes))


def _check_ranges(values: list[_Made]) -> None:
    """Refuse ranges where something may write them out: in the arguments of a call, and in the place of a state."""
    for value in values:
        if value.opcode in _CALLS and _has_range(value.parts[1 : _CALLS[value.opcode]]):
            msg = f"a call of {_name_of(value.parts[0])} with a range"
            raise pickle.UnpicklingError(msg)
        if value.opcode == "BUILD" and _is_range(value.parts[0]):
            msg = "a range as the state of an object"
            raise pickle.UnpicklingError(msg)


def _is_range(value: Any) -> bool:
    return type(value) is _Made and value.opcode in _CALLS and _name_of(value.parts[0]) == "builtins.range"


def _has_range(values: list[Any]) -> bool:
    visited: set[_Made] = set()
    pending = [value for value in values if type(value) is _Made]
    while pending:
        value = pending.pop()
        if value in visited:
            continue
        visited.add(value)
        if _is_range(value):
            return True
        pending += [part for part in value.parts if type(part) is _Made]
    return False


def _check_storage(value: _Made, sizes: Mapping[str, int]) -> None:
    """Some versions of torch take the number of elements from the pickle, whatever the length of the file."""
    (identity,) = value.parts
    match identity.parts if type(identity) is _Made and identity.opcode in _TUPLES else []:
        case ["storage", _Made(name=name), str() as key, str(), int() as count]:
            item_bytes = _ITEM_BYTES.get(name.rpartition(".")[2])
            if item_bytes and 0 <= count * item_bytes <= sizes.get(key, -1):
                return
    msg = "a storage that its zip file does not hold"
    raise pickle.UnpicklingError(msg)
