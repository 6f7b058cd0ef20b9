"""`Snapshot.async_take`: the state of the call, written in the background."""

import subprocess
import sys
import threading

import pytest
import torch

from lightning_snapshot import Snapshot, StateDict
from lightning_snapshot.errors import StorageError
from lightning_snapshot.options import Options
from lightning_snapshot.save import begin_save
from lightning_snapshot.saving import PendingSave
from lightning_snapshot.storage.local import LocalStorage
from lightning_snapshot.storage.posix import Posix


def state(size: int = 50) -> StateDict:
    return StateDict(big=torch.zeros(40_000_000, dtype=torch.uint8), small=[torch.zeros(size)], n=0, items=[0])


def test_it_saves_the_state_of_the_call(tmp_path):
    app_state = {"a": state()}
    pending = Snapshot.async_take(tmp_path / "s", app_state)
    app_state["a"]["big"].fill_(7)
    app_state["a"]["small"][0].fill_(7)
    app_state["a"]["items"].append(7)
    app_state["a"]["n"] = 7

    snapshot = pending.wait()
    assert snapshot.path == pending.path == str(tmp_path / "s")
    loaded = snapshot.get_state_dict_for_key("a")
    assert not loaded["big"].any()
    assert not loaded["small"][0].any()
    assert (loaded["items"], loaded["n"]) == ([0], 0)
    assert pending.done()
    assert pending.exception() is None
    assert snapshot.last_save.stall_seconds < snapshot.last_save.seconds


def test_callbacks_hear_of_the_end(tmp_path):
    heard = []
    pending = Snapshot.async_take(tmp_path / "s", {"a": state()})
    called = threading.Event()
    pending.add_done_callback(lambda each: (heard.append(each), called.set()))
    pending.wait(60)
    assert called.wait(60)
    pending.add_done_callback(heard.append)
    assert heard == [pending, pending]


def test_a_second_one_waits_for_the_first_and_the_order_stays(tmp_path):
    for number in range(5):
        first = Snapshot.async_take(tmp_path / "s", {"a": StateDict(n=number, w=torch.full((1000,), number))})
        second = Snapshot.async_take(tmp_path / "s", {"a": StateDict(n=-number)})
        assert first.done()
        assert Snapshot.take(tmp_path / "t", {"a": StateDict(n=1)}).path
        assert second.done()
        assert Snapshot(tmp_path / "s").get_state_dict_for_key("a") == {"n": -number}


def test_a_failure_is_told_to_whoever_waits(tmp_path):
    (tmp_path / "s").mkdir()
    pending = Snapshot.async_take(tmp_path / "s" / "t", {"a": state()})
    (tmp_path / "s").rename(tmp_path / "away")  # so that it cannot be published
    with pytest.raises(StorageError):
        pending.wait()
    assert isinstance(pending.exception(), StorageError)


def test_whoever_waits_hears_of_what_went_wrong_at_the_end(tmp_path):
    storage = LocalStorage(tmp_path / "s", "s", Posix())
    saving = begin_save({"n": 1}, storage, save_id="a", options=Options())

    def fails(_):
        raise KeyError("end")

    pending = PendingSave(saving, fails)
    pending.start()
    assert repr(pending.exception(60)) == "KeyError('end')"


PROGRAM = """
import sys, torch
from pathlib import Path
from lightning_snapshot import Snapshot, StateDict
folder = Path(sys.argv[1])
Snapshot.async_take(folder / "a", {"s": StateDict(w=torch.ones(30_000_000))})
if sys.argv[2] == "fails":
    folder.rename(folder.parent / "away")
print("end")
"""


@pytest.mark.parametrize("how", ["waits", "fails"])
def test_a_program_that_ends_without_waiting(tmp_path, how):
    (tmp_path / "f").mkdir()
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "f"), how], capture_output=True, text=True, check=False
    )
    assert result.stdout == "end\n"
    if how == "waits":
        assert result.returncode == 0, result.stderr
        assert Snapshot(tmp_path / "f" / "a").read_object("0/s/w").sum() == 30_000_000
    else:
        assert result.returncode == 1
        assert str(tmp_path / "f" / "a") in result.stderr
