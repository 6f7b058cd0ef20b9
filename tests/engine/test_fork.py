"""A process that is forked, as loaders and loggers do, and its parent do not disturb each other."""

import subprocess
import sys

import pytest

# The child ends with 0 only if all went well there; an alarm kills it if it waits for ever.
FRAME = """
import os, signal, sys, threading, warnings
import torch
from lightning_snapshot.memory import Buffer
from lightning_snapshot.options import Options
from lightning_snapshot.restore import load
from lightning_snapshot.save import save
from lightning_snapshot.session import Session
from lightning_snapshot.storage import open_storage

warnings.filterwarnings("ignore", ".*use of fork.*", DeprecationWarning)

def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the child failed"
"""

SEPARATE_MEMORY = """
buffer = Buffer(10_000)
buffer.view[:] = bytes([1]) * 10_000

def work():
    assert bytes(buffer.view) == bytes([1]) * 10_000
    buffer.view[:] = bytes([2]) * 10_000

in_child(work)
assert bytes(buffer.view) == bytes([1]) * 10_000
"""

FORKED_DURING_A_SAVE = """
options = Options(memory_budget_bytes=1, block_bytes=64)
session, taken, ended = Session(), threading.Event(), threading.Event()
state = {"t": torch.arange(600.0).reshape(30, 20).t(), "o": {1}}

def hold():
    # As a save in its middle does; nobody gives this buffer back in the child.
    with session.pool(options, 64).buffer():
        taken.set()
        assert ended.wait(60)

def work():
    save(state, open_storage(sys.argv[1]), save_id=f"of-{os.getpid()}", options=options, session=session)
    found = load(open_storage(sys.argv[1]), rank=0, options=options, session=session)
    assert torch.equal(found["t"], state["t"]) and found["o"] == {1}

holder = threading.Thread(target=hold)
holder.start()
assert taken.wait(60)
pool = session.pool(options, 64)
in_child(work)
assert session.pool(options, 64) is pool and pool.used_bytes == 64
ended.set()
holder.join()
assert pool.used_bytes == 0
work()
assert session.pool(options, 64) is pool
"""


@pytest.mark.parametrize("program", [SEPARATE_MEMORY, FORKED_DURING_A_SAVE], ids=["memory", "session"])
def test_parent_and_child_do_not_share_staging_memory(program, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FRAME + program, str(tmp_path / "s")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
