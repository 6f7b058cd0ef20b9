"""Ways to damage the files of a snapshot, and to forge its metadata and pickles. All follow from a random generator."""

import io
import json
import pickletools
import zipfile
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import torch
import xxhash
import yaml

from lightning_snapshot.manifest import EXTENSION_KEY, seal

METADATA = ".snapshot_metadata"

NUMBERS = [
    -(2**63),
    -1,
    0,
    1,
    2,
    3,
    7,
    64,
    1000,
    2**16,
    2**31,
    2**32,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    10**20,
    0.5,
    1e300,
]
TEXTS = [
    *("", "/", "..", "../x", "/etc/passwd", "a\0b", "0", "0/m", "m", "x-lightning-snapshot/1", "buffer_protocol"),
    *(
        "torch_save",
        "per_tensor_qtensor",
        "tuple",
        "namedtuple",
        "defaultdict",
        "items",
        "OrderedDict",
        "collections:x",
    ),
    *("list", "dict", "int", "str", "bool", "bytes", "float", "Tensor", "ChunkedTensor", "ShardedTensor", "DTensor"),
    *("object", "torch.Tensor", "x-other", "True", "AAAAAAAA4D8=", "9" * 400, "\ud800", "é" * 600),
    *(str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)),
]
GLOBALS = [
    *("collections OrderedDict", "collections deque", "collections defaultdict", "collections Counter", "builtins set"),
    *("builtins list", "builtins range", "builtins bytearray", "builtins complex", "builtins str", "builtins object"),
    *("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "torch._utils _rebuild_qtensor"),
    *("torch._utils _rebuild_sparse_tensor", "torch._utils _rebuild_nested_tensor", "torch FloatStorage"),
    *("torch._utils _rebuild_meta_tensor_no_storage", "torch._tensor _rebuild_from_type_v2", "torch LongStorage"),
    *("torch Size", "torch device", "torch Tensor", "torch float32", "torch.serialization _get_layout", "os system"),
    *("numpy.core.multiarray _reconstruct", "numpy.core.multiarray scalar", "numpy ndarray", "numpy dtype"),
    *("datetime datetime", "decimal Decimal", "fractions Fraction", "uuid UUID", "types SimpleNamespace"),
    *("http HTTPStatus", "pathlib PosixPath", "_codecs encode", "torch.storage UntypedStorage", "torch.nn Parameter"),
]


def damage(random: Random, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Change bytes, lengths and names of files, as a disk, a copy or a person with an editor would."""
    changed = dict(files)
    for _ in range(random.choice([1, 1, 1, 2, 5])):
        names = sorted(changed)
        name = METADATA if METADATA in changed and random.random() < 0.3 else random.choice(names)
        other = random.choice(names)
        match random.choice(["bytes"] * 8 + ["edit"] * 3 + ["swap", "copy", "rename", "remove", "old", "old"]):
            case "bytes":
                changed[name] = damaged_bytes(random, changed[name], changed[other])
            case "edit" if changed.get(METADATA, b"")[:1] == b"{":
                changed[METADATA] = edited(random, changed[METADATA])
            case "swap":
                changed[name], changed[other] = changed[other], changed[name]
            case "copy":
                changed[name] = changed[other]
            case "rename":
                changed[random.choice([f"{name}x", other, name.upper()])] = changed.pop(name)
            case "remove" if len(changed) > 1:
                del changed[name]
            case "old":  # a block that never reached the disk
                begin = random.randrange(len(changed[name]) + 1) // 64 * 64
                changed[name] = (
                    changed[name][:begin] + bytes(len(changed[name][begin : begin + 64])) + changed[name][begin + 64 :]
                )
    return changed


def edited(random: Random, text: bytes) -> bytes:
    """Metadata with another content, as it is without a seal."""
    try:
        content = json.loads(text)
        change_tree(random, content["manifest"], content)
    except (ValueError, KeyError, TypeError):  # it was damaged before
        return text
    changed = json.dumps(content).encode()
    # Who takes all of this project's own entry away makes a snapshot of torchsnapshot, which has no checksums.
    return changed if EXTENSION_KEY.encode() in changed or EXTENSION_KEY.encode() not in text else text


def damaged_bytes(random: Random, content: bytes, other: bytes) -> bytes:
    data = bytearray(content)
    begin = random.randrange(len(data) + 1)
    end = min(len(data), begin + random.choice([0, 1, 2, 4, 8, 100, len(data)]))
    match random.choice(["flip", "flip", "byte", "cut", "drop", "grow", "zero", "repeat", "splice", "number"]):
        case "flip" if data:
            data[min(begin, len(data) - 1)] ^= 1 << random.randrange(8)
        case "byte" if data:
            data[min(begin, len(data) - 1)] = random.choice([0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)])
        case "cut":
            del data[begin:]
        case "drop":
            del data[begin:end]
        case "grow":
            data += random.randbytes(random.choice([1, 16, 100])) if random.random() < 0.5 else bytes(64)
        case "zero":
            data[begin:end] = bytes(end - begin)
        case "repeat":
            data[begin:begin] = data[begin:end]
        case "splice" if other:
            start = random.randrange(len(other))
            data[begin:end] = other[start : start + random.choice([1, 8, 64, 500])]
        case "number":
            width = random.choice([2, 4, 8])
            data[begin : begin + width] = (random.choice([0, 1, 2**63, 2**64 - 1, 2**31, 2**40]) % 256**width).to_bytes(
                width, "little"
            )
    return bytes(data)


def forge(random: Random, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Change what metadata and pickles say, and seal the result as its writer would have."""
    changed = dict(files)
    content = yaml.safe_load(changed[METADATA]) if changed[METADATA][:1] != b"{" else json.loads(changed[METADATA])
    extension = content["manifest"].get(EXTENSION_KEY)
    notes = json.loads(extension["content"]) if extension else None
    for _ in range(random.choice([1, 1, 2, 3])):
        names = sorted(set(changed) - {METADATA})
        name = random.choice(names) if names else ""
        what = random.choice(["entries", "entries", "notes", "program", "file"])
        if what == "notes" and notes:
            change_tree(random, notes, notes)
        elif what == "program" and changed.get(name, b"").startswith(b"PK"):
            changed[name] = forged_archive(random, changed[name])
        elif what == "file" and name:
            changed[name] = damaged_bytes(random, changed[name], changed[random.choice(names)])
        else:
            change_tree(random, content["manifest"], content)
    if notes is not None and isinstance(content.get("manifest"), dict):
        if random.random() < 0.9:
            seal_files(notes, changed)
        own = {"type": EXTENSION_KEY, "checksum": "0" * 32, "content": json.dumps(notes)}
        content["manifest"][EXTENSION_KEY] = own
    changed[METADATA] = seal(json.dumps(content).encode())
    return changed


def seal_files(notes: dict[str, Any], files: Mapping[str, bytes]) -> None:
    """Put the right lengths and checksums into forged notes, where their form allows it."""
    block_bytes, records = notes.get("block_bytes"), notes.get("files")
    if type(block_bytes) is not int or block_bytes < 1 or not isinstance(records, dict):
        return
    for location in records:
        data = files.get(location)
        if data is not None:
            blocks = [data[begin : begin + block_bytes] for begin in range(0, len(data), block_bytes)]
            hashes = "".join(map(xxhash.xxh3_64_hexdigest, blocks))
            records[location] = {"size_bytes": len(data), "hashes": hashes}


def change_tree(random: Random, tree: Any, whole: Any) -> None:
    """Change one node of a tree of JSON, or a key."""
    parent, key = random_node(random, tree)
    if parent is None:
        return
    kinds = [
        "value",
        "nudge",
        "nudge",
        "nudge",
        "like",
        "like",
        "like",
        "like",
        "copy",
        "remove",
        "double",
        "key",
        "swap",
    ]
    match random.choice(kinds):
        case "value":
            parent[key] = random_value(random)
        case "nudge":
            parent[key] = nudged(random, parent[key])
        case "like":
            parent[key] = copied(random.choice([*values_at(key, whole), parent[key]]))
        case "copy":
            donor, from_key = random_node(random, whole)
            if donor is not None:
                parent[key] = copied(donor[from_key])
        case "remove":
            del parent[key]
        case "double" if isinstance(parent, list):
            parent.insert(key, copied(parent[key]))
        case "key" if isinstance(parent, dict):
            parent[random.choice([*TEXTS, f"{key}/0", f"0/{key}", *map(str, parent)])] = parent.pop(key)
        case "swap":
            other = random.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
            parent[key], parent[other] = parent[other], parent[key]


def copied(tree: Any) -> Any:
    return json.loads(json.dumps(tree))


def values_at(key: Any, tree: Any) -> Iterator[Any]:
    """All values in a tree that stand under the same key: other shapes for a shape, other files for a file."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            if key in node:
                yield node[key]
            pending.extend(node.values())
        elif isinstance(node, list):
            if type(key) is int and key < len(node):
                yield node[key]
            pending.extend(node)


def random_node(random: Random, tree: Any) -> tuple[Any, Any]:
    """A container in a tree and one of its keys; the deeper, the likelier."""
    parent, key, node = None, None, tree
    while isinstance(node, (dict, list)) and node and (parent is None or random.random() < 0.85):
        parent, key = node, random.choice(list(node) if isinstance(node, dict) else range(len(node)))
        node = parent[key]
    return parent, key


def random_value(random: Random) -> Any:
    return random.choice(
        [random.choice(NUMBERS), random.choice(TEXTS), None, True, False, [], {}, [random.choice(NUMBERS)] * 3]
    )


def nudged(random: Random, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return random.choice([value + 1, value - 1, value * 2, value // 2, -value, random.choice(NUMBERS)])
    if isinstance(value, str):
        position = random.randrange(len(value) + 1)
        return random.choice(
            [value[:position], value[:position] + random.choice(TEXTS) + value[position:], value.upper()]
        )
    return random_value(random)


def forged_archive(random: Random, archive: bytes) -> bytes:
    """A file of torch.save with another pickle, or other files beside it."""
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as old:
            members = {name: old.read(name) for name in old.namelist()}
    except Exception:  # noqa: BLE001  # it was damaged before
        return archive
    for name, content in members.items():
        if name.endswith("/data.pkl"):
            members[name] = forged_program(random, content)
        elif random.random() < 0.1:
            members[name] = damaged_bytes(random, content, archive)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", random.choice([zipfile.ZIP_STORED] * 20 + [zipfile.ZIP_DEFLATED])) as new:
        for name, content in members.items():
            new.writestr(name, content)
    return buffer.getvalue()


def forged_program(random: Random, program: bytes) -> bytes:
    """Change, add, remove or move opcodes of a pickle."""
    try:
        positions = [position for _, _, position in pickletools.genops(program)]
    except Exception:  # noqa: BLE001  # it was damaged before
        return program
    steps = [program[begin:end] for begin, end in zip(positions, [*positions[1:], len(program)], strict=True)]
    for _ in range(random.choice([1, 1, 2, 4])):
        index = random.randrange(1, max(2, len(steps)))
        match random.choice(["insert", "insert", "remove", "double", "move", "replace", "bytes"]):
            case "insert":
                steps.insert(index, random_step(random))
            case "remove":
                del steps[index:][:1]
                steps[index : index + 1] = []
            case "double":
                steps[index:index] = steps[index : index + random.choice([1, 3, 10])]
            case "move":
                steps.insert(random.randrange(1, len(steps) + 1), steps.pop(min(index, len(steps) - 1)))
            case "replace":
                steps[index : index + 1] = [random_step(random)]
            case "bytes":
                steps[index : index + 1] = [damaged_bytes(random, b"".join(steps[index : index + 1]), program)]
        if not steps:
            break
    return b"".join(steps)


def random_step(random: Random) -> bytes:
    """An opcode with an argument."""
    plain = [code.code.encode("latin1") for code in pickletools.opcodes if code.arg is None]
    number = random.choice([0, 1, 2, 4, 255, 2**31 - 1])
    text = random.choice(["0", "1", "storage", "cpu", "cuda:0", "meta", "x", "__class__", "__setstate__", "latin1"])
    return random.choice(
        [
            random.choice(plain),
            random.choice(plain),
            b"c" + random.choice(GLOBALS).replace(" ", "\n").encode() + b"\n",
            b"K" + bytes([number % 256]),
            b"J" + (random.choice([1, -1]) * number).to_bytes(4, "little", signed=True),
            b"\x8a\x08" + random.choice([2**40, 2**62, 2**63 - 1]).to_bytes(8, "little"),
            b"X" + len(text).to_bytes(4, "little") + text.encode(),
            b"h" + bytes([random.randrange(30)]),
            b"q" + bytes([random.randrange(30)]),
            b"G" + random.randbytes(8),
        ]
    )
