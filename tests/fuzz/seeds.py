"""The snapshots that the fuzzer damages and forges."""

import io
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_snapshot.save import save
from lightning_snapshot.storage.memory import MemoryStorage
from tests.engine.strategies import SMALL, cpu_dtypes, from_bytes
from tests.hostile.forge import text_of, value

GOLDENS = Path(__file__).parents[1] / "golden" / "data"


@dataclass(frozen=True, slots=True)
class Seed:
    """A snapshot.

    Attributes:
        name: What it is.
        files: Location → content.
        is_own: Whether this project wrote it, with checksums of everything.
    """

    name: str
    files: Mapping[str, bytes]
    is_own: bool


def seeds() -> list[Seed]:
    """All seeds, the same in every process."""
    found = [Seed(name, own_files(state), is_own=True) for name, state in states().items()]
    for folder in sorted(path.parent for path in GOLDENS.glob("*/.snapshot_metadata")):
        files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
        del files["expected.json"]
        found.append(Seed(folder.name, files, is_own=False))
    found.extend(Seed(f"object {index}", object_files(each), is_own=False) for index, each in enumerate(objects()))
    return found


def own_files(state: dict[str, Any]) -> dict[str, bytes]:
    storage = MemoryStorage(f"memory://{__name__}")
    storage.files.clear()
    save(state, storage, save_id="fuzz", options=SMALL)
    return dict(storage.files)


def object_files(content: object) -> dict[str, bytes]:
    """A snapshot of torchsnapshot with one pickled value."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return {".snapshot_metadata": text_of({"0/m": value("0/m")}), "0/m": buffer.getvalue()}


def states() -> dict[str, dict[str, Any]]:
    """Everything that a state can hold, in several small ones, because small snapshots load fast."""
    odd = {dtype: from_bytes(bytes(range(1, 33))[: 2 * dtype.itemsize], dtype, (2,)) for dtype in cpu_dtypes()}
    tied, shared = torch.arange(5.0), {"a": [1]}
    attributed = OrderedDict(w=torch.ones(2))
    attributed._metadata = OrderedDict(version=1)
    return {
        "own, small": {"m": {"w": torch.arange(6.0).reshape(2, 3), "n": 5}, "o": (1, None)},
        "own, dtypes": {str(dtype): tensor for dtype, tensor in odd.items()},
        "own, tensors": {
            "shapes": [torch.ones(()), torch.ones(0, 3), torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1)],
            "large": torch.arange(120, dtype=torch.int64).reshape(12, 10),
            "tied": [tied, tied, torch.nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)],
        },
        "own, containers": {
            "shared": [shared, shared, (tied.clone(), 1), {(1, 2): torch.ones(1), 1.5: None}],
            "state": attributed,
            "factory": defaultdict(list, {"a": torch.ones(2), "b": [1]}),
            "plain": {"i": 2**70, "f": -0.5, "s": "é\n", "b": b"\0\xff", "t": True, 5: None, "a/b%": [], "": {}},
            "k" * 1200: {"long": torch.ones(3)},
        },
        # Arrays of objects are never equal, bit for bit.
        "own, objects": dict(
            enumerate_texts(each for each in objects() if getattr(each, "dtype", None) != np.dtype("O"))
        ),
    }


def enumerate_texts(values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((str(index), value) for index, value in enumerate(values))


def objects() -> list[Any]:
    """Values that are pickled, or stored as files of torch.save."""
    records = np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", ">f8")])
    things = np.empty(2, dtype=object)
    things[0], things[1] = np.arange(2), "x"
    return [
        *((1, (2, None)), {1, 2}, frozenset({(1,)}), range(3), 1j, slice(1, 2), bytearray(b"ab"), torch.Size([1, 2])),
        *(deque([1], 5), defaultdict(list, a=[1]), OrderedDict(a=1), np.float32(0.5), np.arange(6).reshape(2, 3)),
        *(records, things, np.array(["ab", "c"]), [torch.ones(3), {"t": torch.ones(2, dtype=torch.complex64)}]),
        *(
            torch.eye(3).to_sparse(),
            torch.eye(3).to_sparse_csr(),
            torch.quantize_per_tensor(tensor(), 0.5, 1, torch.qint8),
        ),
        *(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), torch.nn.Parameter(torch.ones(2))),
        torch.quantize_per_channel(torch.ones(3, 2), torch.ones(3), torch.zeros(3), 0, torch.quint8),
    ]


def tensor() -> torch.Tensor:
    return torch.arange(3.0)
