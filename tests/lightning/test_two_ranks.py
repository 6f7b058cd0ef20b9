"""The plugin alone, without sharing of work, in a world of two ranks."""

import json

import pytest
import torch

from lightning_snapshot import SnapshotCheckpointIO
from tests.lightning.models import difference

pytestmark = pytest.mark.distributed


def test_rank_0_saves_valid_snapshots_and_says_once_that_it_works_alone(run_program, tmp_path):
    run_program("two_ranks.py", tmp_path)

    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    # One snapshot and `last` per epoch; the resume loads on each rank.
    assert first["calls"] == ["save"] * 4 + ["load"] + ["save"] * 2
    assert second["calls"] == ["load"]
    assert len(first["warnings"]) == 1
    assert "rank 0 alone" in first["warnings"][0]
    assert second["warnings"] == []

    final = torch.load(tmp_path / "final.pt", weights_only=True)
    found = SnapshotCheckpointIO().load_checkpoint(tmp_path / "kept" / "last.ckpt")
    assert found["global_step"] == final["step"] == 6
    assert difference(dict(found["state_dict"]), {f"{name}": t for name, t in final["model"].items()}) is None
    assert difference(found["optimizer_states"], final["optimizers"]) is None
