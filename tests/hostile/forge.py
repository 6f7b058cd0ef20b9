"""Snapshots made by hand, byte by byte, with right checksums where they have any."""

import io
import json
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash

from lightning_snapshot.manifest import EXTENSION_KEY, seal

BLOCK_BYTES = 1024

Json = dict[str, Any]


def tensor(location: str, shape: list[Any], begin: Any = 0, **changes: Any) -> Json:
    """The entry of a float32 tensor."""
    size = 4
    for extent in shape:
        size *= extent if isinstance(extent, int) else 1
    entry = {"type": "Tensor", "location": location, "serializer": "buffer_protocol", "dtype": "torch.float32"}
    return {**entry, "shape": shape, "replicated": False, "byte_range": [begin, begin + size], **changes}


def chunked(shape: list[int], *boxes: tuple[list[int], list[int]], location: str = "data") -> Json:
    """The entry of a float32 tensor in pieces at these offsets and of these sizes, all with the same bytes."""
    chunks = [{"offsets": at, "sizes": sizes, "tensor": tensor(location, sizes)} for at, sizes in boxes]
    return {"type": "ChunkedTensor", "dtype": "torch.float32", "shape": shape, "chunks": chunks, "replicated": False}


def value(location: str) -> Json:
    """The entry of an object."""
    return {"type": "object", "location": location, "serializer": "torch_save", "obj_type": "x", "replicated": False}


def write(root: Path, metadata: bytes, files: Mapping[str, bytes]) -> None:
    for location, content in files.items():
        path = root / location
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    root.mkdir(exist_ok=True)
    (root / ".snapshot_metadata").write_bytes(metadata)


def foreign(root: Path, entries: Mapping[str, Any], files: Mapping[str, bytes] = {}, world_size: Any = 1) -> None:
    """A snapshot as torchsnapshot writes it: no checksums, no notes."""
    write(root, text_of(entries, world_size), files)


def own(root: Path, entries: Mapping[str, Any], data: Mapping[str, bytes], notes: Json, **changes: Any) -> None:
    """A snapshot as this project writes it, with everything sealed that can be sealed."""
    extension = {"save_id": "s", "writer": "w", "block_bytes": BLOCK_BYTES, "format": 1, "ranks": {"0": notes}}
    records = {location: record(content) for location, content in data.items()}
    content = json.dumps({**extension, "files": records, **changes})
    own_entry = {"type": EXTENSION_KEY, "checksum": "0" * 32, "content": content}
    write(root, seal(text_of({**entries, EXTENSION_KEY: own_entry})), data)


def text_of(entries: Mapping[str, Any], world_size: Any = 1) -> bytes:
    return json.dumps({"version": "0.1.0", "world_size": world_size, "manifest": entries}).encode()


def record(content: bytes) -> Json:
    blocks = [content[begin : begin + BLOCK_BYTES] for begin in range(0, len(content), BLOCK_BYTES)]
    return {"size_bytes": len(content), "hashes": "".join(map(xxhash.xxh3_64_hexdigest, blocks))}


def blob(value: object) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def blob_of(program: bytes, members: Mapping[str, bytes] = {}, compression: int = zipfile.ZIP_STORED) -> bytes:
    """A file of torch.save with this pickle and these further files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
        for name, content in members.items():
            archive.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def text(content: str | bytes) -> bytes:
    """The opcodes that put a text on a pickle's stack."""
    raw = content.encode() if isinstance(content, str) else content
    return b"X" + len(raw).to_bytes(4, "little") + raw


def number(value: int) -> bytes:
    """The opcodes that put a number on a pickle's stack."""
    return pickle.dumps(value, 2)[2:-1]


def storage(key: str | bytes, count: int, kind: bytes = b"ctorch\nFloatStorage\n") -> bytes:
    """The opcodes that put the content of a file in the zip on a pickle's stack."""
    return b"(" + text("storage") + kind + text(key) + text("cpu") + number(count) + b"tQ"
