"""What a save or load may take of the machine, whatever the size of the state."""

import subprocess
import sys

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
