"""Kill a training run, resume it, and compare it with one that was left alone, bit for bit: ``make demo``.

The training itself is ``train_digits.py``, an ordinary Lightning program. This file only starts it, kills it, and looks
at the snapshots that it has written.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch

from lightning_snapshot import Snapshot

HERE = Path(__file__).resolve().parent
RUNS = HERE.parent / "build" / "demo"
TORCHSNAPSHOT = HERE.parent / ".interop" / "torchsnapshot-0.1.0"
KILL_AFTER_EPOCH = 5

# What a program with the real torchsnapshot does with our snapshot: restore a model, and hand over its weights.
READ_WITH_TORCHSNAPSHOT = """
import sys
from importlib.metadata import version
import torch, torchsnapshot
from train_digits import DigitsCNN

model = DigitsCNN()
torchsnapshot.Snapshot(sys.argv[1]).restore({"state_dict": model})
torch.save(model.state_dict(), sys.argv[2])
print(f"torchsnapshot {version('torchsnapshot')}, installed in {torchsnapshot.__path__[0]}")
"""


def main():
    started = time.monotonic()
    shutil.rmtree(RUNS, ignore_errors=True)
    RUNS.mkdir(parents=True)
    reference, killed = RUNS / "reference", RUNS / "killed"

    headline("1. A run that nobody disturbs")
    first, last = train(reference)
    total = last - first

    headline("2. The same run, killed between two snapshots")
    train(killed, kill=True)
    saved = Snapshot(killed / "checkpoints" / "last.ckpt").read_object("0/global_step")
    print(f"\n   last.ckpt holds step {saved}.")

    headline("3. The same command again: it resumes from last.ckpt")
    first, last = train(killed)
    print(f"\n   Resumed at step {first} and ran {last - first} steps: {total} in all, less {saved} saved.")
    check(first == saved > 0, "the run must resume at the step that was saved")
    check(last - first == total - saved, "the run must not repeat or skip steps")

    headline("4. Is the resumed run the run that nobody disturbed?")
    compare(Snapshot(reference / "final.ckpt"), Snapshot(killed / "final.ckpt"))

    headline("5. What the killed and resumed run has left on disk")
    list_snapshots(killed)

    headline("6. The real torchsnapshot opens it")
    open_with_torchsnapshot(killed / "final.ckpt")

    print(f"\nDone in {time.monotonic() - started:.0f} seconds. The snapshots are in {os.path.relpath(RUNS)}.")


def train(folder, *, kill=False):
    """Run the training script and show what it prints; kill it half way through an epoch if asked to.

    Returns:
        The first and the last step of the run.
    """
    with subprocess.Popen(
        [sys.executable, "-u", HERE / "train_digits.py", folder],
        stdout=subprocess.PIPE,
        stderr=(folder.parent / f"{folder.name}.log").open("a"),
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
                process.kill()
    if kill:
        print("   SIGKILL")
        check(process.returncode == -signal.SIGKILL, "the run must have been killed before its end")
        return None
    check(process.returncode == 0, f"the training failed, see {folder.parent}/{folder.name}.log")
    return steps[0], steps[-1]


def compare(reference, resumed):
    for key in ("state_dict", "optimizer_states", "lr_schedulers"):
        expected, found = (dict(leaves(each.get_state_dict_for_key(key), key)) for each in (reference, resumed))
        places = expected.keys() | found.keys()
        different = [place for place in sorted(places) if not same(expected.get(place), found.get(place))]
        check(not different, f"these differ: {different}")
        numbers = sum(value.numel() if isinstance(value, torch.Tensor) else 1 for value in expected.values())
        print(f"   {key:16}  {numbers:7,} numbers   equal, bit for bit")


def leaves(value, place):
    """Place → value of all that is no container."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else None
    if items is None:
        yield place, value
        return
    for key, item in items:
        yield from leaves(item, f"{place}/{key}")


def same(a, b):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (a.dtype, a.shape, a.numpy().tobytes()) == (b.dtype, b.shape, b.numpy().tobytes())
    return type(a) is type(b) and a == b


def list_snapshots(folder):
    for path in sorted([*(folder / "checkpoints").iterdir(), folder / "final.ckpt"]):
        snapshot = Snapshot(path)
        size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        step, entries = snapshot.read_object("0/global_step"), len(snapshot.get_manifest())
        print(f"   {path.relative_to(folder)!s:35} step {step:3}   {entries:3} entries   {size_bytes / 1e6:5.2f} MB")


def open_with_torchsnapshot(path):
    check(TORCHSNAPSHOT.is_dir(), f"there is no torchsnapshot in {TORCHSNAPSHOT}; run `make demo`, which puts it there")
    result = RUNS / "read-with-torchsnapshot.pt"
    done = subprocess.run(
        [sys.executable, "-c", READ_WITH_TORCHSNAPSHOT, path, result],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TORCHSNAPSHOT), str(HERE)])},
        capture_output=True,
        text=True,
        check=False,
    )
    check(done.returncode == 0, f"torchsnapshot failed:\n{done.stderr}")
    theirs, ours = torch.load(result, weights_only=True), Snapshot(path).get_state_dict_for_key("state_dict")
    check(list(theirs) == list(ours) and all(same(theirs[name], ours[name]) for name in ours), "the weights differ")
    numbers = sum(tensor.numel() for tensor in theirs.values())
    print(f"   {done.stdout.strip()}")
    print(f"   model restored from {path.name}: {numbers:,} numbers   equal, bit for bit")


def headline(text):
    print(f"\n{text}\n", flush=True)


def check(holds, problem):
    if not holds:
        sys.exit(f"\nThe demo failed: {problem}")


if __name__ == "__main__":
    main()
