"""Kill a training of two ranks again and again, resume it from what is there, and compare it with one left alone.

``python -m tests.chaos.chaos --kills 50``: every kill is a ``SIGKILL`` to both ranks. Some are aimed at saves, some at
batches in the middle of an epoch, some at any moment. In the end, weights, optimizers, metrics, random numbers and the
samples of every batch on each rank must be those of the run that nobody killed.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torchmetrics
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset

from lightning_snapshot import SnapshotCallback, SnapshotCheckpointIO
from tests.lightning.models import difference
from tests.lightning.ranks.worlds import join_world
from tests.ranks import processes

RANKS = 2
BATCHES = 8  # per epoch
PATIENCE_SECONDS = 120.0
_IN_SAVE = "between first write and commit of a save"


# --- what is trained -------------------------------------------------------------------------------------------------


class Noise(Dataset):
    def __len__(self):
        return BATCHES * RANKS * 2

    def __getitem__(self, index):
        return index, torch.rand(8) + np.random.rand() + random.random()  # noqa: NPY002 - the global generators are what is tested


class Model(pl.LightningModule):
    """About 20 MB with its optimizer, so that saves take a while."""

    def __init__(self, log: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 1300), nn.Dropout(0.3), nn.Linear(1300, 1300), nn.Linear(1300, 1))
        self.total = torchmetrics.SumMetric()
        self.log_file = log

    def say(self, kind: str, *values: Any) -> None:
        os.write(self.log_file, (json.dumps([kind, *values]) + "\n").encode())

    def training_step(self, batch, batch_idx):
        numbers, x = batch
        self.say("batch", self.current_epoch, batch_idx, numbers.tolist())
        loss = self.net((x + torch.rand_like(x)).float()).square().mean()
        self.total.update(loss.detach())
        self.log("total", self.total, on_epoch=True, on_step=False)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        self.say("epoch", self.current_epoch, float(self.trainer.callback_metrics["loss_epoch"]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def train_dataloader(self):
        return DataLoader(Noise(), batch_size=2, shuffle=True)


class SayingIO(SnapshotCheckpointIO):
    """Says when a save begins and when it has been published."""

    model: Any = None

    def save_on_all_ranks(self, *arguments: Any, **how: Any) -> None:
        self.model.say("save")
        super().save_on_all_ranks(*arguments, **how)
        self.model.say("saved")


def train(rank: int, port: int, folder: str, epochs: int, seed: int) -> None:
    """What a rank does, from ``last.ckpt`` on if there is one."""
    sys.stdout = sys.stderr = open(os.path.join(folder, f"{rank}.out"), "a", buffering=1)  # noqa: SIM115 - until it ends
    store = distributed.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    join_world()
    kept = os.path.join(folder, "checkpoints")
    # Who begins anew has to begin alike; who resumes has to be independent of it.
    resumes = os.path.exists(os.path.join(kept, "last.ckpt"))
    pl.seed_everything(seed if resumes else 1, verbose=False)
    model = Model(os.open(os.path.join(folder, f"{rank}.log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT))
    plugin = SayingIO()
    plugin.model = model
    checkpoint = pl.callbacks.ModelCheckpoint(
        kept, every_n_train_steps=2, monitor="step", mode="max", save_top_k=2, save_last=True
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=[checkpoint, SnapshotCallback()],
        default_root_dir=folder,
        devices=RANKS,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        max_epochs=epochs,
        plugins=[plugin],
        strategy="ddp",
    )
    trainer.fit(model, ckpt_path="last")
    end = {
        "weights": model.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "random": [torch.rand(2), random.random(), float(np.random.rand())],  # noqa: NPY002 - as above
    }
    torch.save(end, os.path.join(folder, f"{rank}.pt"))
    distributed.barrier()


# --- who kills it ----------------------------------------------------------------------------------------------------


class Watched:
    """A run of both ranks, and what rank 0 says."""

    def __init__(self, folder: Path, epochs: int, seed: int) -> None:
        server = distributed.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        self._server = server
        self._folder = folder
        self._before_save: set[str] = set()
        self._log = folder / "0.log"
        self._log.touch()
        self._file = self._log.open()
        self._file.seek(0, os.SEEK_END)
        self._rest = ""
        arguments = (server.port, str(folder), epochs, seed)
        self._ranks = [processes._context.Process(target=train, args=(rank, *arguments)) for rank in range(RANKS)]
        for process in self._ranks:
            process.start()
        self.said: list[Any] = []

    def listen(self) -> list[Any]:
        """What has been said since the last call."""
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        new = [json.loads(line) for line in lines]
        self.said += new
        if ["save"] in new:
            self._before_save = written(self._folder)
        return new

    def wait_for(self, kind: str, count: int) -> bool:
        """Wait until something has been said as often; False if the run ends before."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while sum(each[0] == kind for each in self.said) < count:
            if not self._is_alive():
                return False
            if time.monotonic() > deadline:
                self.kill()
                raise SystemExit(f"the run does not go on, see {self._log.parent}")
            self.listen()
            time.sleep(0.0005)
        return True

    def _is_alive(self) -> bool:
        alive = all(process.is_alive() for process in self._ranks)
        if not alive:
            self.join()
        return alive

    def wait_for_write(self) -> None:
        """Wait until the save that was begun last has written something, or is over."""
        while not self.has_written() and self.said[-1] == ["save"] and self._is_alive():
            self.listen()

    def has_written(self) -> bool:
        """Whether there is something of a save that was not there before."""
        return bool(written(self._folder) - self._before_save)

    def kill(self) -> None:
        for process in self._ranks:
            process.kill()
        for process in self._ranks:
            process.join()
        self.listen()
        self._file.close()

    def join(self) -> None:
        for process in self._ranks:
            process.join()
        if any(process.exitcode for process in self._ranks):
            raise SystemExit(f"a rank has failed, see {self._log.parent}")

    def place(self) -> str:
        """What was going on when it was killed."""
        kinds = Counter(each[0] for each in self.said)
        batches = [each for each in self.said if each[0] == "batch"]
        if kinds["save"] > kinds["saved"] and self.has_written():
            return _IN_SAVE
        if batches and self.said[-1][0] != "epoch" and batches[-1][2] < BATCHES - 1:
            return "mid-epoch"
        return "elsewhere"


def written(folder: Path) -> set[str]:
    """Names of what saves write, published or not."""
    kept = folder / "checkpoints"
    return {path.name for pattern in (".snapshot-*", "*/.data/*") for path in kept.glob(pattern)}


def kill_once(run: Watched, chance: random.Random, aim: str, save_seconds: float) -> bool:
    """Kill at a random moment; False if the run has ended before."""
    if aim == "save":
        if not run.wait_for("save", chance.randint(2, 5)):
            return False
        run.wait_for_write()
        time.sleep(chance.uniform(0.0, save_seconds / 2))
    elif aim == "batch":
        if not run.wait_for("batch", chance.randint(2, 7)):
            return False
        time.sleep(chance.uniform(0.0, 0.01))
    else:
        time.sleep(chance.uniform(0.0, 4.0))
        run.listen()
        if not run._is_alive():
            return False
    run.kill()
    return True


def main(kills: int, seed: int, folder: Path) -> int:
    """Run all of it; returns how many kills were between the first write and the commit of a save."""
    processes._context.set_forkserver_preload([*processes._PRELOADED, "tests.chaos.chaos"])
    chance = random.Random(seed)
    epochs = max(6, kills * 3 // 4)  # enough for all kills on a fast machine
    for name in ("alone", "killed"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name / "checkpoints").mkdir(parents=True)
    started = time.monotonic()
    alone = Watched(folder / "alone", epochs, seed=1)
    alone.wait_for("save", 3)
    begun = time.monotonic()
    alone.wait_for("saved", 12)
    save_seconds = max(0.02, (time.monotonic() - begun) / 10)
    alone.join()
    print(f"left alone: {epochs} epochs, {epochs * BATCHES} steps, {time.monotonic() - started:.0f} s", flush=True)

    counts: Counter[str] = Counter()
    aims = ["save", "batch", "any"] if kills < 10 else ["save"] * 5 + ["batch"] * 4 + ["any"]
    for number in range(kills):
        run = Watched(folder / "killed", epochs, seed=number + 2)
        aim = aims[number % len(aims)]
        if not kill_once(run, chance, aim, save_seconds):
            print(f"the run has ended after {number} kills")
            break
        place = run.place()
        counts[place] += 1
        if aim == "save" and place != _IN_SAVE:
            save_seconds *= 0.8  # the machine is faster now, or slow to kill
        batches = [each for each in run.said if each[0] == "batch"]
        at = f"epoch {batches[-1][1]} batch {batches[-1][2]}" if batches else "before the first batch"
        print(f"kill {number + 1:2}: {place}, {at}", flush=True)
    Watched(folder / "killed", epochs, seed=0).join()
    compare(folder)
    print(f"{sum(counts.values())} kills ({', '.join(f'{count} {place}' for place, count in sorted(counts.items()))})")
    print(f"equal, bit for bit, after {time.monotonic() - started:.0f} s")
    return counts[_IN_SAVE]


def compare(folder: Path) -> None:
    for rank in range(RANKS):
        ends = [torch.load(folder / name / f"{rank}.pt", weights_only=False) for name in ("killed", "alone")]
        found = difference(*ends)
        logs = [(folder / name / f"{rank}.log").read_text().splitlines() for name in ("killed", "alone")]
        said = [{tuple(each[:-1]): each[-1] for each in map(json.loads, log) if len(each) > 1} for log in logs]
        # A batch that was trained on again after a kill must have had the same samples each time.
        again = {line for line in logs[0] if len(json.loads(line)) > 1} - set(logs[1])
        found = found or difference(*[dict(sorted(each.items())) for each in said]) or (again and f"only once: {again}")
        if found:
            raise SystemExit(f"rank {rank} differs: {found}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        in_saves = main(chosen.kills, chosen.seed, chosen.folder or Path(scratch))
    if chosen.kills >= 50 and in_saves < 15:
        sys.exit(f"expected at least 15 kills in saves, found {in_saves}")
