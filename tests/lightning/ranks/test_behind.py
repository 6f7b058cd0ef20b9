"""Saves behind training on several ranks: they need no collective, fail together and keep their order."""

import pytest
import torch

from tests.lightning.ranks import behind
from tests.ranks.processes import needs_fully_shard, run_ranks

pytestmark = pytest.mark.distributed
NAMESPACES = ["lightning", "pytorch_lightning"]


@pytest.mark.parametrize("arguments", [{"async_save": True}, {"overlap": True, "overlap_check": True}])
@pytest.mark.parametrize("name", NAMESPACES)
def test_training_keeps_what_it_should_and_goes_on_from_there(tmp_path, name, arguments):
    for rank in run_ranks(behind.training, 2, name, tmp_path, arguments):
        assert rank["names"] == ["last.ckpt", "step=6.ckpt"]
        assert rank["best"] == "step=6.ckpt"
        assert rank["steps"] == [6, 7]
        assert torch.equal(rank["weight"], rank["expected"])
        assert rank["stall"]


@needs_fully_shard
@pytest.mark.parametrize("arguments", [{"async_save": True}, {"overlap": True}])
@pytest.mark.parametrize("name", NAMESPACES)
def test_what_is_spread_over_ranks_is_that_of_the_call(tmp_path, name, arguments):
    assert run_ranks(behind.sharded, 2, name, tmp_path, arguments) == [None, None]


@pytest.mark.parametrize("name", NAMESPACES)
def test_a_failure_of_one_rank_is_that_of_all_and_the_next_save_succeeds(tmp_path, name):
    for rank, (error, loaded) in enumerate(run_ranks(behind.one_rank_fails, 2, name, tmp_path)):
        assert error.startswith("StorageError")
        assert "rank 1" in error
        assert "No space left" in error
        assert loaded["w"].sum() == 300_000 * rank


@pytest.mark.parametrize("name", NAMESPACES)
def test_a_removal_that_fails_on_rank_0_is_told_on_all_ranks_at_the_next_save(tmp_path, name):
    for error, names, loaded in run_ranks(behind.one_rank_cannot_remove, 2, name, tmp_path):
        assert error.startswith("NotASnapshotError")
        assert "foreign" in error
        assert "rank 0" in error
        assert names == ["a", "c", "foreign"]
        assert loaded == 3


@pytest.mark.parametrize("name", NAMESPACES)
def test_training_may_use_collectives_meanwhile(tmp_path, name):
    assert run_ranks(behind.collectives_meanwhile, 2, name, tmp_path) == [[3, 3]] * 2


@pytest.mark.parametrize("name", NAMESPACES)
def test_all_ranks_skip_a_save_or_none(tmp_path, name):
    assert run_ranks(behind.skipping, 2, name, tmp_path) == [["a", "c"]] * 2


def test_async_take(tmp_path):
    found = run_ranks(behind.taking, 2, tmp_path)
    assert found == [([(rank, rank, rank), (7, 7, 7)], True) for rank in (0, 1)]
