"""Kill a training run of two ranks, resume it, and compare it with one that was left alone: ``make demo-ddp``.

``demo_ddp.py train FOLDER`` is the training itself: that of ``train_digits.py``, with ``strategy="ddp"``.
"""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from train_digits import DigitsCNN, Progress, loaders

from lightning_snapshot import Snapshot, SnapshotCallback, SnapshotCheckpointIO

RUNS = Path(__file__).resolve().parent.parent / "build" / "demo-ddp"
EPOCHS = 6
KILL_AFTER_EPOCH = 3


class LargeDigitsCNN(DigitsCNN):
    """Large enough to be shared evenly: what is below 1 MiB is not cut."""

    def __init__(self):
        super().__init__()
        self.net[8], self.net[10] = torch.nn.Linear(32 * 4 * 4, 2048), torch.nn.Linear(2048, 10)


def main():
    started = time.monotonic()
    shutil.rmtree(RUNS, ignore_errors=True)
    RUNS.mkdir(parents=True)

    print("\n1. Two ranks train, and nobody disturbs them\n", flush=True)
    first, last = run(RUNS / "reference")
    total = last - first

    print("\n2. The same, and both ranks are killed between two snapshots\n", flush=True)
    run(RUNS / "killed", kill=True)
    snapshot = Snapshot(RUNS / "killed" / "checkpoints" / "last.ckpt")
    saved = snapshot.read_object("0/global_step")
    print(f"\n   last.ckpt holds step {saved}, written by {snapshot.metadata.world_size} ranks.")

    print("\n3. The same command again\n", flush=True)
    first, last = run(RUNS / "killed")
    check(first == saved > 0, "the run must resume at the step that was saved")
    check(last - first == total - saved, "the run must not repeat or skip steps")
    print(f"\n   Resumed at step {first}, and ran {last - first} steps: {total} in all, less {saved} saved.")

    print("\n4. Who wrote what of final.ckpt, and what both ranks have in the end\n", flush=True)
    reports = [dict(torch.load(RUNS / "killed" / f"rank{rank}.pt")) for rank in (0, 1)]
    for rank, report in enumerate(reports):
        print(f"   rank {rank} wrote {report['bytes']:9,} bytes   weights {report['weights']}")
    written = [report["bytes"] for report in reports]
    check(max(written) < 1.1 * sum(written) / 2, "the ranks must share the work")
    check(reports[0]["weights"] == reports[1]["weights"], "the ranks must have the same weights")

    print("\n5. Is the resumed run the run that nobody disturbed?\n", flush=True)
    compare(*(Snapshot(RUNS / name / "final.ckpt") for name in ("reference", "killed")))
    print(f"\nDone in {time.monotonic() - started:.0f} seconds. The snapshots are in {os.path.relpath(RUNS)}.")


def train(folder):
    """What both ranks run; rank 0 talks."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    expected = "does not have many workers|no last checkpoint available|exists and is not empty|sync_dist"
    warnings.filterwarnings("ignore", f".*({expected})")
    seed_everything(0)
    checkpoint = ModelCheckpoint(folder / "checkpoints", monitor="val_loss", save_top_k=2, save_last=True)
    plugin = SnapshotCheckpointIO()
    trainer = Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        deterministic=True,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        callbacks=[checkpoint, SnapshotCallback(), Progress()],
        plugins=[plugin],
    )
    model = LargeDigitsCNN()
    trainer.fit(model, *loaders(), ckpt_path="last")
    trainer.save_checkpoint(folder / "final.ckpt")
    digest = hashlib.sha256(b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters()))
    report = {"bytes": plugin.last_save.data_bytes, "weights": digest.hexdigest()[:16]}
    torch.save(report, folder / f"rank{trainer.global_rank}.pt")


def run(folder, *, kill=False):
    """Run the training, show what rank 0 prints, and kill both ranks half way through an epoch if asked to.

    Returns:
        The first and the last step of the run.
    """
    with subprocess.Popen(
        [sys.executable, "-u", __file__, "train", folder],
        stdout=subprocess.PIPE,
        stderr=(folder.parent / f"{folder.name}.log").open("a"),
        start_new_session=True,  # so that both can be killed at once
        text=True,
    ) as process:
        steps, times = [], []
        for line in process.stdout:
            print(f"   {line}", end="", flush=True)
            words = line.split()
            steps += [int(words[words.index("step") + 1])] if "step" in words else []
            times += [time.monotonic()]
            if kill and line.startswith(f"epoch {KILL_AFTER_EPOCH:2}"):
                # Half of the time that an epoch takes: the next snapshot is on its way, but not there.
                time.sleep(min(later - earlier for earlier, later in pairwise(times)) / 2)
                os.killpg(process.pid, signal.SIGKILL)
    if kill:
        print("   SIGKILL to both ranks")
        check(process.returncode == -signal.SIGKILL, "the run must have been killed before its end")
        return None
    check(process.returncode == 0, f"the training failed, see {folder.parent}/{folder.name}.log")
    return steps[0], steps[-1]


def compare(expected, found):
    for key in ("state_dict", "optimizer_states"):
        both = (tensors(each.get_state_dict_for_key(key)) for each in (expected, found))
        pairs = list(zip(*both, strict=True))
        check(all(torch.equal(a, b) for a, b in pairs), f"{key} differs")
        print(f"   {key:16} {sum(a.numel() for a, _ in pairs):7,} numbers   equal, bit for bit")


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def check(holds, problem):
    if not holds:
        sys.exit(f"\nThe demo failed: {problem}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(Path(sys.argv[2]))
    else:
        main()
