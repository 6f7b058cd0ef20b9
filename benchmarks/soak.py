"""Many saves in one process, old snapshots removed: memory, open files, threads and disk space must not grow.

A Trainer trains a small model, and at every step saves a top-k snapshot, removes the worst one, and overwrites
``last.ckpt``. The first fifth of the run is warm-up. Ends with exit code 1 if anything grows.
"""

import argparse
import ctypes
import gc
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import common
import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_snapshot import SnapshotCheckpointIO, latest

_MIB = 2**20
_STATE_BYTES = 40 * _MIB
_SAVES_PER_STEP = 2
_MODES = {"sync": {}, "async": {"async_save": True}, "overlap": {"overlap": True}}
_WARM_UP = 0.2
# What is measured → how much it may grow from the end of the warm-up to the end, along the fitted line.
_LIMITS = {"rss_bytes": 8 * _MIB, "open_files": 0.5, "threads": 0.5, "disk_bytes": _MIB, "disk_entries": 0.5}


class _Model(pl.LightningModule):
    """Its weights and Adam's two averages are the state."""

    def __init__(self) -> None:
        super().__init__()
        rows = _STATE_BYTES // (3 * 4 * 64)
        self.table = torch.nn.Embedding(rows, 64)

    def training_step(self, batch, batch_idx):
        self.log("at", float(self.global_step))
        return self.table(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class _Samples(pl.Callback):
    """Looks at the process before each step, when the saves and removals of the step before are over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer, *_):
        trainer.strategy.checkpoint_io.wait()
        paths = list(self.folder.rglob("*"))
        self.rows.append(
            {
                "rss_bytes": _rss_bytes(),
                "open_files": len(os.listdir("/proc/self/fd")),
                "threads": len(os.listdir("/proc/self/task")),
                "disk_bytes": sum(path.stat().st_size for path in paths if path.is_file()),
                "disk_entries": len(paths),
            }
        )
        if trainer.global_step % 50 == 0:
            print(f"step {trainer.global_step} of {trainer.max_steps}", file=sys.stderr, flush=True)


def _rss_bytes() -> int:
    gc.collect()
    # What is free already, and kept by the allocator for the next step, is no leak.
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _train(folder: Path, steps: int, mode: str) -> tuple[list[dict[str, float]], float]:
    checkpoint = pl.callbacks.ModelCheckpoint(
        folder, filename="{step}", monitor="at", mode="max", save_top_k=3, save_last=True, every_n_train_steps=1
    )
    samples = _Samples(folder)
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=[checkpoint, samples],
        default_root_dir=folder,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        max_steps=steps,
        plugins=[SnapshotCheckpointIO(**_MODES[mode])],
    )
    seconds = common.seconds(lambda: trainer.fit(_Model(), DataLoader(torch.arange(2 * steps), batch_size=2)))
    newest = latest(folder)
    found = SnapshotCheckpointIO().load_checkpoint(newest)["global_step"] if newest else None
    if found != steps:
        msg = f"expected a snapshot of step {steps} at the end, found {found} in {newest}"
        raise SystemExit(msg)
    return samples.rows, seconds


def _judge(rows: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Name → its values after the warm-up, in the middle and at the end, the slope per 100 saves, and the growth."""
    begin = round(len(rows) * _WARM_UP)
    found = {}
    for name, limit in _LIMITS.items():
        values = np.array([row[name] for row in rows[begin:]])
        slope = float(np.polyfit(np.arange(len(values)), values, 1)[0])
        found[name] = {
            "start": float(values[0]),
            "middle": float(values[len(values) // 2]),
            "end": float(values[-1]),
            "per_100_saves": slope * 100 / _SAVES_PER_STEP,
            "growth": slope * (len(values) - 1),
            "limit": limit,
        }
    return found


def _table(found: dict[str, dict[str, float]]) -> str:
    rows = []
    for name, values in found.items():
        unit, digits = (_MIB, 1) if name.endswith("_bytes") else (1, 0)
        cells = [f"{values[key] / unit:,.{digits}f}" for key in ("start", "middle", "end")]
        rounded = (round(values[key] / unit, 2) for key in ("per_100_saves", "growth", "limit"))
        slope, growth, limit = (f"{number + 0.0:,.2f}" for number in rounded)  # no -0.00
        flat = "yes" if values["growth"] <= values["limit"] else "NO"
        rows.append([name.replace("_bytes", ", MiB").replace("_", " "), *cells, slope, growth, limit, flat])
    return common.table(["", "start", "middle", "end", "per 100 saves", "growth", "allowed", "flat"], rows)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--saves", type=int, default=500, help="default: 500")
    parser.add_argument("--mode", choices=_MODES, default="sync", help="how to save (default: sync)")
    parser.add_argument("--quick", action="store_true", help="60 saves")
    parser.add_argument("--dir", type=Path, default=common.ROOT / "build" / "bench", help="folder on the disk to use")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there, too")
    arguments = parser.parse_args()
    saves = 60 if arguments.quick else arguments.saves
    warnings.simplefilter("ignore")  # Lightning's advice on how to train
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    with common.scratch(arguments.dir) as folder:
        rows, seconds = _train(folder, saves // _SAVES_PER_STEP, arguments.mode)
    found = _judge(rows)
    print(_table(found))
    which = f"{saves} saves ({arguments.mode})"
    print(f"\n{which} of {_STATE_BYTES // _MIB} MiB in {seconds:.0f} s, the first {_WARM_UP:.0%} as warm-up")
    if arguments.json:
        content = {"date": f"{time.strftime('%Y-%m-%d')}", "saves": saves, "seconds": seconds}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**content, "found": found, "samples": rows}, indent=2)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    growing = [name for name, values in found.items() if values["growth"] > values["limit"]]
    if growing:
        print(f"growing: {', '.join(growing)}", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
