"""What a save or load may take of the machine, whatever the size of the state."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from lightning_snapshot import Snapshot, StateDict

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
# Every tied pair and every object has a file of its own.
pairs = {f"t{i}": [tensor, tensor.view(4)] for i in range(200) if (tensor := torch.full((4,), float(i))) is not None}
state = StateDict(pairs=pairs, objects={f"o{i}": {i} for i in range(200)})
Snapshot.take(sys.argv[1], {"app": state})
found = Snapshot(sys.argv[1]).get_state_dict_for_key("app")
assert found["objects"] == state["objects"]
assert all(torch.equal(found["pairs"][key][1], pair[1]) for key, pair in pairs.items())
"""


def test_hundreds_of_files_need_few_descriptors(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "s")], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr


AGAIN_AND_AGAIN = """
import os, sys, threading
from pathlib import Path
import torch
from lightning_snapshot import Snapshot, SnapshotCheckpointIO, StateDict
from lightning_snapshot.errors import DataError, SnapshotError, UnsupportedValueError
from lightning_snapshot.options import Options
from lightning_snapshot.save import save
from lightning_snapshot.storage.local import LocalStorage
from lightning_snapshot.storage.posix import Posix

folder = sys.argv[1]
tied = torch.ones(1000)
# Files large enough to be written past the page cache, small ones, and objects.
state = {"large": torch.ones(400_000), "turned": torch.ones(300, 700).t(), "tied": [tied, tied], "object": {1}}


class FullDisk(Posix):
    def write(self, descriptor, buffer, offset_bytes):
        if offset_bytes:
            raise OSError(28, "full")
        return super().write(descriptor, buffer, offset_bytes)


def expect(error, action, *arguments, **keywords):
    try:
        action(*arguments, **keywords)
    except error:
        return
    raise AssertionError(error)


def one_round():
    plugin = SnapshotCheckpointIO()
    plugin.save_checkpoint(state, f"{folder}/a")
    plugin.load_checkpoint(f"{folder}/a")
    snapshot = Snapshot.take(f"{folder}/b", {"m": StateDict(**state)})
    snapshot.restore({"m": StateDict(**state)})
    snapshot.read_object("0/m/large", index=slice(5))
    mapped = snapshot.get_state_dict_for_key("m", mmap=True)
    assert mapped["large"][7] == 1
    expect(UnsupportedValueError, plugin.save_checkpoint, {"a": tied, "b": lambda: 0}, f"{folder}/c")
    expect(SnapshotError, plugin.load_checkpoint, f"{folder}/none")
    full = LocalStorage(Path(folder, "d"), "d", FullDisk())
    expect(OSError, save, state, full, save_id="d", options=Options())
    location = snapshot.get_manifest()["0/m/large"].location
    os.truncate(f"{folder}/b/{location}", 700_000)
    expect(DataError, snapshot.restore, {"m": StateDict(**state)})
    expect(DataError, snapshot.get_state_dict_for_key, "m", mmap=True)


def held():
    maps = [line for line in open("/proc/self/maps") if folder in line]
    memory = next(line for line in open("/proc/self/status") if line.startswith("VmSize"))
    return len(os.listdir("/proc/self/fd")), threading.active_count(), maps, int(memory.split()[1]) // 1024


one_round()
one_round()
*before, memory_before_mib = held()
for _ in range(20):
    one_round()
*after, memory_after_mib = held()
assert after == before, (before, after)
assert before[1:] == [1, []], before
# One buffer for each round would be 80 MiB.
assert memory_after_mib - memory_before_mib < 60, (memory_before_mib, memory_after_mib)
assert sorted(os.listdir(folder)) == ["a", "b"]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_nothing_is_left_open_after_many_saves_and_loads(tmp_path) -> None:
    # How many arenas of 64 MiB of addresses the C library reserves for threads depends on who meets whom.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", AGAIN_AND_AGAIN, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )

    assert done.returncode == 0, done.stderr
