"""What all benchmarks share: states, the page cache, durability, measuring, tables, goals and reports."""

import argparse
import gc
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "benchmarks.md"
OURS = "lightning_snapshot"

State = dict[str, torch.Tensor]

# Name of a ratio → its goal, as a factor, in seconds or in bytes. The first group must be reached, the second not
# exceeded.
AT_LEAST = {
    "save_vs_raw": 0.85,
    "save_vs_best_peer": 2.0,
    "save_vs_torchsnapshot": 4.0,
    "vs_torchsnapshot": 1.0,
    "load_vs_raw": 0.85,
    "load_vs_best_peer": 1.5,
    "async_speed_vs_sync": 0.8,
}
AT_MOST = {
    "extra_save_bytes": 128 * 2**20,
    "extra_load_bytes": 128 * 2**20,
    "small_save_vs_safetensors": 1.2,
    "small_load_vs_safetensors": 1.5,
    "open_vs_torchsnapshot": 0.1,
    "plan_1024_seconds": 10.0,
    "plan_growth_per_rank": 1.2,
    "received_growth": 1.1,
    "two_ranks_vs_one": 0.55,
    "stall_vs_copy": 1.15,
    "stall_vs_best_peer": 1.0,
    "overlap_stall_vs_sync": 0.02,
    "slowdown_percent": 2.0,
}

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_SYNC_THREADS = 4


# --- states ----------------------------------------------------------------------------------------------------------


def state_a(scale: float = 1.0) -> State:
    """12 transformer blocks of width 2048: 96 float32 tensors, 2.25 GiB; ``scale`` shrinks the width."""
    width = max(64, round(2048 * scale**0.5 / 64) * 64)
    shapes = {
        "attention.qkv": (3 * width, width),
        "attention.out": (width, width),
        "mlp.up": (4 * width, width),
        "mlp.down": (width, 4 * width),
        "norm1.weight": (width,),
        "norm1.bias": (width,),
        "norm2.weight": (width,),
        "norm2.bias": (width,),
    }
    return _random({f"blocks.{block}.{name}": shape for block in range(12) for name, shape in shapes.items()})


def state_b(count: int = 20_000) -> State:
    """Many float32 tensors of 16 by 16."""
    return _random({f"layers.{index // 100}.weights.{index % 100}": (16, 16) for index in range(count)})


def one_tensor(size_bytes: int) -> State:
    """A single float32 tensor."""
    return _random({"embedding": (size_bytes // 4,)})


def _random(shapes: Mapping[str, tuple[int, ...]]) -> State:
    # Random, so that nothing below us can compress or share it.
    generator = np.random.Generator(np.random.SFC64(2026))
    return {name: torch.from_numpy(generator.random(shape, dtype=np.float32)) for name, shape in shapes.items()}


def targets_of(state: State) -> State:
    """Tensors to load into, in memory that has been touched already."""
    return {name: torch.zeros_like(tensor).fill_(-1) for name, tensor in state.items()}


def size_of(state: State) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())


def check_equal(name: str, loaded: State, expected: State) -> None:
    """Stop the run if a load did not bring back what was saved."""
    for key, tensor in expected.items():
        if not torch.equal(loaded[key], tensor):
            msg = f"{name}: {key} is not what was saved"
            raise SystemExit(msg)


# --- the disk --------------------------------------------------------------------------------------------------------


def can_drop_page_cache() -> bool:
    """Whether the kernel lets us empty its page cache; otherwise only the files at hand are evicted."""
    return os.access(_DROP_CACHES, os.W_OK)


def drop_page_cache(path: Path) -> None:
    """Make the next read come from the device, and the next write not wait for older ones."""
    gc.collect()
    os.sync()
    if can_drop_page_cache():
        _DROP_CACHES.write_text("3", encoding="ascii")
    else:
        for file in files_below(path):
            _with_descriptor(file, lambda descriptor: os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED))


def sync_tree(path: Path) -> None:
    """Make a file, or all files and folders of a folder, durable, and its name, too."""
    folders = [entry for entry in path.rglob("*") if entry.is_dir()] if path.is_dir() else []
    with ThreadPoolExecutor(_SYNC_THREADS) as executor:
        list(executor.map(lambda file: _with_descriptor(file, os.fsync), files_below(path)))
    for folder in (*folders, path, path.parent):
        _with_descriptor(folder, os.fsync)


def files_below(path: Path) -> list[Path]:
    """A file itself, or the files in a folder at any depth."""
    return [path] if path.is_file() else [entry for entry in path.rglob("*") if entry.is_file()]


def _with_descriptor(path: Path, action: Callable[[int], None]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        action(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file or folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def seconds(action: Callable[[], object]) -> float:
    """How long something takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


# --- running ---------------------------------------------------------------------------------------------------------


def parse_arguments(
    description: str, more: Callable[[argparse.ArgumentParser], object] = lambda _: None
) -> argparse.Namespace:
    """The options that all benchmarks have, and more."""
    parser = argparse.ArgumentParser(description=description)
    more(parser)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of everything; medians count (default: 3)")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the state, for quick runs (default: 1)")
    parser.add_argument("--dir", type=Path, default=ROOT / "build" / "bench", help="folder on the disk to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    parser.add_argument("--update-docs", action="store_true", help="put the results into docs/benchmarks.md")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or not 0 < arguments.scale <= 1:
        parser.error("expected --rounds of at least 1, and --scale above 0 and at most 1")
    if arguments.update_docs and (arguments.scale != 1 or arguments.rounds < 3):
        parser.error("expected --scale 1 and at least 3 rounds with --update-docs: quick runs are not for readers")
    return arguments


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A folder of our own on the disk to measure."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="bench-", dir=folder) as path:
        yield Path(path)


def alternate(rounds: int, runs: Sequence[tuple[str, Callable[[], object]]]) -> None:
    """Run everything once per round, each round beginning with another one."""
    for index in range(rounds):
        shift = index * len(runs) // rounds
        for name, run in (*runs[shift:], *runs[:shift]):
            print(f"round {index + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            run()


def middle(samples: Sequence[float]) -> float:
    """The median."""
    return float(median(samples))


def span(samples: Sequence[float], digits: int) -> str:
    """The median, and the lowest and highest."""
    return f"{middle(samples):.{digits}f} ({min(samples):.{digits}f} to {max(samples):.{digits}f})"


# --- reporting -------------------------------------------------------------------------------------------------------


def machine(folder: Path) -> dict[str, Any]:
    """What the figures depend on."""
    device, file_system = _mount(folder)
    # The peers, where they are loaded.
    packages = ("lightning-snapshot", "torch", "lightning", "safetensors", "torchsnapshot", "torch_checkpointing")
    loaded = [name for name in packages if name.replace("-", "_") in sys.modules]
    return {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "file_system": file_system,
        "device": device,
        "kernel": ".".join(platform.release().split(".")[:2]),
        "python": platform.python_version(),
        "commit": _commit(),
        "packages": {name: version(name) for name in loaded},
        "page_cache_dropped": can_drop_page_cache(),
    }


def _mount(folder: Path) -> tuple[str, str]:
    mounts = [line.split()[:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    holding = [mount for mount in mounts if folder.resolve().is_relative_to(mount[1])]
    device, _, file_system = max(reversed(holding), key=lambda mount: len(mount[1]))
    return ("virtio disk" if Path(device).name.startswith("vd") else Path(device).name), file_system


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def describe(facts: Mapping[str, Any]) -> str:
    """The machine in one line."""
    packages = ", ".join(f"{name} {number}" for name, number in facts["packages"].items())
    cache = "page cache dropped before each" if facts["page_cache_dropped"] else "NO ROOT: files evicted one by one"
    return (
        f"{facts['date']}, {facts['cores']} cores, {facts['memory_bytes'] / 2**30:.0f} GiB, {facts['device']}, "
        f"{facts['file_system']}, Linux {facts['kernel']}, Python {facts['python']}, {packages}; "
        f"median of {facts['rounds']}, {cache}"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that reads well on a terminal and in Markdown. Columns after the first are aligned to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        [cell.ljust(width) if index == 0 else cell.rjust(width) for index, (cell, width) in enumerate(pairs)]
        for pairs in (zip(line, widths, strict=True) for line in lines)
    ]
    rule = ["-" * width if index == 0 else "-" * (width - 1) + ":" for index, width in enumerate(widths)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (padded[0], rule, *padded[1:]))


def goals_table(ratios: Mapping[str, float]) -> str:
    """Each ratio, its goal, and whether it is reached."""
    rows = []
    for name, value in ratios.items():
        least = name in AT_LEAST
        goal = AT_LEAST[name] if least else AT_MOST[name]
        found, wanted = (f"{v / 2**20:.1f} MiB" if name.endswith("_bytes") else f"{v:.2f}" for v in (value, goal))
        reached = value >= goal if least else value <= goal
        rows.append([f"`{name}`", found, f"{'≥' if least else '≤'} {wanted}", "yes" if reached else "NO"])
    return table(["ratio", "found", "goal", "reached"], rows)


def report(
    name: str,
    arguments: argparse.Namespace,
    results: str,
    rows: Sequence[Mapping[str, Any]],
    ratios: Mapping[str, float],
    *,
    picture: str = "",
) -> None:
    """Print the results; write them as JSON and, with a picture, into the documentation, if asked to."""
    facts = {**machine(arguments.dir), "rounds": arguments.rounds, "scale": arguments.scale}
    text = f"{results}\n\n{goals_table(ratios)}\n\n{describe(facts)}"
    if arguments.scale != 1:
        text += f"\n\nQuick run with --scale {arguments.scale}: the goals are about the full size."
    print(text)
    if arguments.json:
        content = {"benchmark": name, "machine": facts, "rows": rows, "ratios": ratios}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if arguments.update_docs:
        _update_document(name, f"{picture}\n\n{text}" if picture else text)


def _update_document(name: str, text: str) -> None:
    begin, end = f"<!-- results:{name} -->", f"<!-- /results:{name} -->"
    document = DOCUMENT.read_text(encoding="utf-8")
    if begin not in document or end not in document:
        msg = f"{DOCUMENT}: expected {begin} … {end}"
        raise SystemExit(msg)
    pattern = re.escape(begin) + ".*?" + re.escape(end)
    DOCUMENT.write_text(
        re.sub(pattern, lambda _: f"{begin}\n\n{text}\n\n{end}", document, flags=re.DOTALL), encoding="utf-8"
    )
