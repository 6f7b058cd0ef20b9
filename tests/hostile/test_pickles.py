"""Pickles that would run code, or that ask for endless memory or time."""

import collections
import os
import pickle
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hostile.forge import blob, blob_of, foreign, number, own, storage, tensor, text, value

PROTOCOL = b"\x80\x02"
# torch's unpickler gives up on the items of a deque, so that Python's has to refuse what follows.
SECOND = b"ccollections\ndeque\n)RK\x01a0"
CONTAINER = {"0/m": {"type": "dict", "keys": ["v"]}}
NOTES = {"roots": ["m"]}


class Called:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.recipe = function, arguments

    def __reduce__(self) -> Any:
        return self.recipe


# --- what a program can be in ----------------------------------------------------------------------------------------


def as_object(root: Path, content: bytes) -> None:
    foreign(root, {**CONTAINER, "0/m/v": value("data")}, {"data": content})


def as_tensor(root: Path, content: bytes) -> None:
    entry = tensor("data", [4], serializer="torch_save", byte_range=None)
    foreign(root, {**CONTAINER, "0/m/v": entry}, {"data": content})


def as_part_of_a_file(root: Path, content: bytes) -> None:
    entry = tensor("data", [4], serializer="torch_save", byte_range=[5, 5 + len(content)])
    foreign(root, {**CONTAINER, "0/m/v": entry}, {"data": b"begin" + content + b"end"})


def as_quantized(root: Path, content: bytes) -> None:
    entry = tensor("data", [4], serializer="torch_save", byte_range=None, dtype="torch.qint8")
    foreign(root, {**CONTAINER, "0/m/v": entry}, {"data": content})


def as_shard(root: Path, content: bytes) -> None:
    entry = tensor("data", [4], serializer="torch_save", byte_range=None)
    shards = [{"offsets": [0], "sizes": [4], "tensor": entry}]
    foreign(root, {**CONTAINER, "0/m/v": {"type": "ShardedTensor", "shards": shards}}, {"data": content})


def as_leaf_of_2022(root: Path, content: bytes) -> None:
    entry = {"type": "builtins.int", "location": "data", "replicated": False}
    foreign(root, {**CONTAINER, "0/m/v": entry}, {"data": content})


def as_factory(root: Path, content: bytes) -> None:
    notes = {**NOTES, "containers": {"m": {"kind": "defaultdict", "extra": "m/v"}}}
    own(root, {"0/m": {"type": "dict", "keys": []}, "0/m/v": value("data")}, {"data": content}, notes)


def as_attributes(root: Path, content: bytes) -> None:
    notes = {**NOTES, "containers": {"m": {"extra": "m/v"}}}
    own(root, {"0/m": {"type": "OrderedDict", "keys": []}, "0/m/v": value("data")}, {"data": content}, notes)


def as_keys(root: Path, content: bytes) -> None:
    entries = {"0/m": {"type": "list"}, "0/m/0": value("data"), "0/m/1": {"type": "list"}}
    own(root, entries, {"data": content}, {**NOTES, "containers": {"m": {"kind": "items"}}})


CARRIERS: dict[str, Callable[[Path, bytes], None]] = {
    function.__name__: function
    for function in (
        *(as_object, as_tensor, as_part_of_a_file, as_quantized, as_shard, as_leaf_of_2022),
        *(as_factory, as_attributes, as_keys),
    )
}


@pytest.mark.parametrize("carrier", CARRIERS)
def test_code_in_every_place_that_is_unpickled(root, assert_refused, carrier) -> None:
    attack = blob(Called(os.mkdir, str(root.parent / "executed")))
    CARRIERS[carrier](root, attack)
    path = "m/0" if carrier == "as_keys" else "m/v"
    assert_refused("UnsafeObjectError", f"{path}: reading this value needs .*mkdir", value=f"0/{path}")


# --- what would run --------------------------------------------------------------------------------------------------


def calls(root: Path) -> dict[str, Any]:
    made = str(root.parent / "executed")
    code = str(root.parent / "outside" / "code.py")
    return {
        "mkdir": Called(os.mkdir, made),
        "shell": Called(os.system, f"touch {made}"),
        "exec": Called(exec, f"open({made!r}, 'w')"),
        "eval": Called(eval, f"open({made!r}, 'w')"),
        "open": Called(open, made, "w"),
        "run a file": Called(runpy.run_path, code),
        "import": Called(__import__, "antigravity"),
        "attribute": Called(getattr, Called(__import__, "os"), "mkdir"),
        "torch.load": Called(torch.load, made),
        "hub": Called(torch.hub.load, made, "x"),
        "library": Called(pickle.loads, pickle.dumps(Called(os.mkdir, made))),
        "in a deque": collections.deque([Called(os.mkdir, made)]),
        "as factory": Called(collections.defaultdict, Called(os.mkdir, made)),
        "as key": {Called(os.mkdir, made): 1},
    }


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", calls(Path()))
def test_calls(root, assert_refused, name, protocol) -> None:
    as_object(root, blob_of(pickle.dumps(calls(root)[name], protocol)))
    assert_refused("UnsafeObjectError", "0/m/v: reading this value needs .*is not known to be plain data")


def opcodes(made: str) -> dict[str, bytes]:
    path, mkdir = text(made), b"cos\nmkdir\n"
    simple = b"ctypes\nSimpleNamespace\n)R"
    return {
        "REDUCE": mkdir + path + b"\x85R",
        "NEWOBJ": mkdir + path + b"\x85\x81",
        "NEWOBJ_EX": mkdir + path + b"\x85}\x92",
        "OBJ": b"(" + mkdir + path + b"o",
        "INST": b"(" + path + b"ios\nmkdir\n",
        "STACK_GLOBAL": text("os") + text("mkdir") + b"\x93" + path + b"\x85R",
        "extension registry": b"\x82\x01" + path + b"\x85R",
        "BUILD of a class": b"cuuid\nUUID\n}" + text("__init__") + mkdir + b"sb",
        "BUILD of a function": b"c_codecs\nencode\n}" + text("__code__") + b"Nsb",
        "BUILD of slots": simple + b"N}" + text("__class__") + mkdir + b"s\x86b",
        "attributes as calls": simple + b"}" + text("__setstate__") + mkdir + b"sb" + path + b"b",
        "method of a safe class": b"cuuid\nUUID.__init__.__globals__\n",
        "dotted name": b"\x8c\x04uuid\x8c\x14UUID.__init__.mkdir\x93" + path + b"\x85R",
        "through another module": b"cuuid\nos.mkdir\n" + path + b"\x85R",
        "Python 2 name": b"cposix\nmkdir\n" + path + b"\x85R",
        "rebuild with any function": b"ctorch._tensor\n_rebuild_from_type_v2\n("
        + mkdir
        + b"ctorch\nTensor\n"
        + path
        + b"\x85}tR",
        "storage of any type": b"(" + text("storage") + mkdir + text("0") + text("cpu") + b"K\x01tQ",
        "persistent number": b"K\x07Q",
        "persistent text": b"Pmodule\n",
    }


@pytest.mark.parametrize("prefix", [b"", SECOND], ids=["torch's unpickler", "ours"])
@pytest.mark.parametrize("name", opcodes(""))
def test_opcodes(root, open_hostile, name, prefix) -> None:
    program = PROTOCOL + prefix + opcodes(str(root.parent / "executed"))[name] + b"."
    as_object(root, blob_of(program, {"data/0": bytes(4)}))
    kind, message = open_hostile()["load"]
    assert kind in {"UnsafeObjectError", "DataError"}
    assert "0/m/v: " in message


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_script_of_torch(root, assert_refused) -> None:
    made = torch.jit.script(torch.nn.Linear(1, 1))
    torch.jit.save(made, str(root.parent / "script"))
    as_object(root, (root.parent / "script").read_bytes())
    assert_refused("DataError|UnsafeObjectError", "0/m/v: ")


# --- what would never end --------------------------------------------------------------------------------------------


def nested(levels: int, push: Callable[[bytes], bytes]) -> bytes:
    """Values that hold the one before several times."""
    return b"".join(b"q" + bytes([level]) + b"0" + push(b"h" + bytes([level])) for level in range(levels))


def pairs(previous: bytes) -> bytes:
    return previous * 2 + b"\x86"


def lists(previous: bytes) -> bytes:
    return b"](" + previous * 10 + b"e"


RANGE = b"cbuiltins\nrange\n" + number(2**24) + b"\x85R"
HUGE = {
    "hash of nested tuples": b"}K\x01\x85" + nested(200, pairs) + b"K\x01s",
    "hash of nested tuples in a set": b"cbuiltins\nset\n]K\x01\x85" + nested(200, pairs) + b"a\x85R",
    "hash of a tower": b"}K\x01" + b"\x85" * 200_000 + b"K\x01s",
    "tower of lists": b"]" * 50_000 + b"a" * 49_999,
    "text of nested lists": b"cbuiltins\nstr\n]K\x01a" + nested(200, lists) + b"\x85R",
    "message about nested lists": b"cbuiltins\nHTTPStatus\n]K\x01a" + nested(200, lists) + b"\x85R",
    "name of nested lists": b"]K\x01a" + nested(200, lists) + text("x") + b"\x93",
    "refusal of nested lists": b"]K\x01a" + nested(200, lists) + b")R",
    "fraction of nested lists": b"cfractions\nFraction\n]K\x01a" + nested(200, lists) + b"\x85R",
    "nested lists, top down": b"]q\x00]q\x01](" + b"h\x01" * 9 + b"e0h\x01(" + b"h\x00" * 9 + b"e0h\x00",
    "bytes": b"cbuiltins\nbytearray\n" + number(2**29) + b"\x85R",
    "bytes by an array's number": b"cbuiltins\nbytearray\ncnumpy.core.multiarray\nscalar\ncnumpy\ndtype\n"
    + text("i8")
    + b"\x85R"
    + b"c_codecs\nencode\n"
    + text("\0\0\0\x20\0\0\0\0")
    + text("latin1")
    + b"\x86R\x86R\x85R",
    "arguments that change": b"cbuiltins\nbytearray\n](" + text("x") + b"eK\x00" + number(2**29) + b"sR",
    "list of a range": b"cbuiltins\nlist\n" + RANGE + b"\x85R",
    "lists of a range": b"](cbuiltins\nlist\n" + RANGE + b"\x85Rq\x01" + b"cbuiltins\nlist\nh\x01\x85R" * 1000 + b"e",
    "set of a range": b"cbuiltins\nset\n" + RANGE + b"\x85R",
    "deque of a range": b"ccollections\ndeque\n" + RANGE + b"\x85R",
    "range as arguments": b"ccollections\ndeque\n" + RANGE + b"R",
    "range in a list of pairs": b"ccollections\nOrderedDict\n]" + RANGE + b"a\x85R",
    "through another function": b"ctorch._tensor\n_rebuild_from_type_v2\n(cbuiltins\nlist\ncbuiltins\nlist\n"
    + RANGE
    + b"\x85}tR",
    "bytes through another function": b"ctorch._tensor\n_rebuild_from_type_v2\n(cbuiltins\nbytearray\ncbuiltins\nset\n"
    + number(2**29)
    + b"\x85}tR",
    "shape of an array": b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85"
    + text("b")
    + b"\x87R(K\x01cbuiltins\nrange\nK\x01"
    + number(2**40)
    + b"\x86Rcnumpy\ndtype\n"
    + text("f8")
    + b"\x85R\x89"
    + text("")
    + b"tb",
    "fields of an array": b"cnumpy\ndtype\n"
    + text("V8")
    + b"\x85R(K\x03"
    + text("|")
    + b"Ncbuiltins\nrange\n"
    + number(2**40)
    + b"\x85Rccollections\ndefaultdict\ncbuiltins\nlist\n\x85RK\x08K\x01K\x10tb",
    "state of a tensor": b"ctorch._utils\n_rebuild_tensor_v2\n("
    + storage("0", 1)
    + b"K\x00K\x01\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
    + RANGE
    + b"b",
    "memory of a tensor": b"ctorch\nFloatTensor\n" + number(2**20) + b"\x85R",
    "memory of a storage": b"ctorch.storage\nUntypedStorage\n" + number(2**20) + b"\x85R",
    "old name of range": b"cbuiltins\nfrozenset\nc__builtin__\nxrange\n" + number(2**24) + b"\x85R\x85R",
    "old name of int": b"c__builtin__\nlong\ncdecimal\nDecimal\n" + text("1e99999999") + b"\x85R\x85R",
    "digits": b"cbuiltins\nint\ncdecimal\nDecimal\n" + text("1e99999999") + b"\x85R\x85R",
    "exponent": b"cfractions\nFraction\n" + text("1e99999999") + b"\x85R",
    "copies": b"](" + b"K\x01" * 10_000 + b"eq\x000](" + b"cbuiltins\nset\nh\x00\x85R" * 10_000 + b"e",
    "punycode": b"c_codecs\nencode\n" + text("é" * 10**6) + text("punycode") + b"\x86R",
    "array": b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text("b") + b"\x87R("
    b"K\x01" + number(2**40) + b"\x85cnumpy\ndtype\n" + text("f8") + b"\x85R\x89" + text("") + b"tb",
    "storage": b"ctorch.storage\nUntypedStorage\n" + number(2**45) + b"\x85R",
    "memo": b"r\xff\xff\xff\x7fj\xff\xff\xff\x7f",
    "frame": b"\x95" + b"\xff" * 8 + b"N",
    "long text": b"X\xff\xff\xff\xff",
    "long bytes": b"\x8e" + b"\xff" * 7 + b"\x7f",
    "long number": b"\x8b\xff\xff\xff\x7f",
}  # fmt: skip


@pytest.mark.parametrize("prefix", [b"", SECOND], ids=["torch's unpickler", "ours"])
@pytest.mark.parametrize("name", HUGE)
def test_work_out_of_proportion(root, open_hostile, name, prefix) -> None:
    as_object(root, blob_of(PROTOCOL + prefix + HUGE[name] + b".", {"data/0": bytes(4)}))
    outcome = open_hostile()["load"]
    if name == "nested lists, top down":
        assert outcome is None or outcome[0] == "UnsafeObjectError"
    else:
        assert outcome is not None
        assert outcome[0] in {"UnsafeObjectError", "DataError"}
        assert "0/m/v: " in outcome[1]


@pytest.mark.parametrize("keys", [[f"0\0{n}" for n in range(40)], ["ab", "aB", "Ab", "AB"], ["0"] * 40])
def test_one_storage_under_many_names(root, open_hostile, keys) -> None:
    count = 2**21
    program = PROTOCOL + b"](" + b"".join(storage(key, count) for key in keys) + b"e."
    as_object(root, blob_of(program, {"data/0": bytes(4 * count), "data/ab": bytes(4 * count)}))
    outcome = open_hostile()["load"]
    assert outcome is None if keys[0] == "0" else outcome[0] == "UnsafeObjectError"


@pytest.mark.parametrize("count", [2, 3, 2**40, -1])
def test_a_storage_longer_than_its_file(root, assert_refused, count) -> None:
    as_object(root, blob_of(PROTOCOL + storage("0", count) + b".", {"data/0": bytes(4)}))
    assert_refused("UnsafeObjectError", "0/m/v: .*a storage that its zip file does not hold")


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_a_sparse_tensor_with_indices_in_foreign_memory(root, assert_refused) -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2), (3,))
    sparse._indices()[0, 1] = 2**40
    as_object(root, blob(sparse))
    assert_refused("DataError", "0/m/v: .*index")


@pytest.mark.parametrize("shape", [[2**27], [2**40], [2**14, 2**13]])
def test_one_element_that_stands_for_many(root, assert_refused, shape) -> None:
    entry = tensor("data", shape, serializer="torch_save", byte_range=None)
    foreign(root, {**CONTAINER, "0/m/v": entry}, {"data": blob(torch.zeros(1).expand(shape))})
    assert_refused("DataError|MetadataError", "m/v: ")
