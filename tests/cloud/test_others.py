"""Others who reach the same bucket their own way: torchsnapshot, and Lightning through s3fs."""

import json
import os
import subprocess
import sys

import pytest
import torch

from lightning_snapshot import Snapshot, StateDict
from lightning_snapshot.storage import list_names
from tests.cloud.others import app_state, contents
from tests.interop.conftest import ROOT, VERSIONS
from tests.lightning.models import difference

CLIENTS = ROOT / ".interop" / "s3-clients"

pytestmark = pytest.mark.interop


@pytest.fixture
def run(s3, in_environment, tmp_path):
    """Runs a program of `tests.cloud.others`, with the packages that it needs, whatever else is installed."""
    folders = [CLIENTS, VERSIONS["0.1.0"]]
    missing = [str(folder) for folder in folders if not (folder / ".stamp").exists()]
    assert not missing, f"run `make interop`, which makes {missing}"
    in_environment(s3)

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "tests.cloud.others", *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*folders, ROOT]))},
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_torchsnapshot_reads_what_we_put_there(run, s3, tmp_path):
    expected = app_state(0, StateDict)
    urls = [f"{s3.folder}/sync", f"{s3.folder}/async"]
    Snapshot.take(urls[0], expected)
    Snapshot.async_take(urls[1], expected).wait()
    run("restore", tmp_path / "found.pt", *urls)
    for found in torch.load(tmp_path / "found.pt"):
        assert difference(found, [contents(expected), expected["values"]["int16"]]) is None


def test_we_read_what_torchsnapshot_puts_there(run, s3):
    run("take", f"{s3.folder}/theirs")
    found, expected = (app_state(seed, StateDict) for seed in (1, 0))
    snapshot = Snapshot(f"{s3.folder}/theirs")
    snapshot.restore(found)
    assert difference(contents(found), contents(expected)) is None
    assert difference(snapshot.read_object("0/values/int16"), expected["values"]["int16"]) is None


def test_lightning_with_s3fs(run, s3):
    assert run("train", s3.folder) == {
        "file system": "s3fs.core",
        "resumed at": 12,
        "best": f"{s3.folder}/epoch=3.ckpt",
        "last": f"{s3.folder}/last.ckpt",
        "is loaded": True,
    }
    assert list_names(s3.folder) == ["epoch=1.ckpt", "epoch=3.ckpt", "last.ckpt"]
    assert list_names(f"{s3.folder}-same") == ["same-v1.ckpt", "same-v2.ckpt", "same-v3.ckpt", "same.ckpt"]
