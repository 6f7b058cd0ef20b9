"""A Trainer with DDP: all ranks save, and each gets back what was its own."""

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_snapshot import Snapshot, SnapshotCheckpointIO
from tests.lightning.models import difference
from tests.lightning.ranks import replicated
from tests.lightning.ranks.worlds import heard_warnings
from tests.ranks.processes import run_ranks

pytestmark = pytest.mark.distributed
NAMESPACES = ["lightning", "pytorch_lightning"]


@pytest.fixture(scope="module", params=NAMESPACES)
def trained(request, tmp_path_factory) -> SimpleNamespace:
    """What both ranks have found in `replicated.battery`, and the folder that it has left."""
    folder = tmp_path_factory.mktemp("battery")
    return SimpleNamespace(ranks=run_ranks(replicated.battery, 2, request.param, folder), folder=folder)


def test_the_strategy_stays_what_it_was_and_nothing_is_warned_of(trained):
    assert [rank["strategy"] for rank in trained.ranks] == ["ReplicatedStrategyMixin"] * 2
    # Where rank 1's path differs from rank 0's, the log says so.
    assert trained.ranks[0]["warnings"] == []
    (text,) = trained.ranks[1]["warnings"]
    assert text.startswith(f"rank 0 saves to {trained.folder / '0' / 'after.ckpt'}")


def test_top_k_link_and_version_counter(trained):
    for rank in trained.ranks:
        assert rank["folders"]["best"] == ["last.ckpt", "step=2.ckpt", "step=3.ckpt"]
        assert rank["last"] == "step=3.ckpt"
        assert rank["folders"]["same"] == ["same.ckpt"]


def test_the_path_of_rank_0_counts(trained):
    assert trained.ranks[0]["folders"]["0"] == ["after.ckpt"]
    assert not (trained.folder / "1" / "after.ckpt").exists()


def test_bytes_are_shared_evenly(trained):
    written = [rank["bytes"] for rank in trained.ranks]
    total = sum(value.nbytes for value in _tensors(SnapshotCheckpointIO().load_checkpoint(_best(trained))))
    assert total == pytest.approx(sum(written), rel=0.05)
    assert written[1] == pytest.approx(total / 2, rel=0.1)


def test_values_of_single_ranks_come_back_to_them(trained):
    for number, rank in enumerate(trained.ranks):
        assert rank["loaded"]["mine"]["rank"] == number
        assert rank["loaded"]["mine"]["tensor"].tolist() == [number] * 3
        assert rank["loaded"]["ours"]["tensor"].tolist() == [0, 1, 2, 3]


def test_what_is_equal_is_stored_once(trained):
    entries = Snapshot(_best(trained)).get_manifest()
    assert [
        path for path in entries if path.startswith("1/") and path.split("/")[1] not in ("exact_resume", "mine")
    ] == []


def test_buffers_and_ignored_parameters_are_those_of_rank_0(trained):
    first, second = trained.ranks
    for name in ("net.1.running_mean", "own"):
        assert not torch.equal(first["saved"][name], second["saved"][name]), "the test needs something that differs"
    assert not torch.equal(first["own"]["own moments"], second["own"]["own moments"])
    for rank in trained.ranks:
        assert difference(dict(rank["loaded"]["state_dict"]), first["saved"]) is None
        assert torch.equal(rank["loaded"]["own moments"], first["own"]["own moments"])


def test_a_resume_in_the_middle_of_an_epoch_goes_on_there(trained):
    assert [(rank["resumed at"], rank["steps"]) for rank in trained.ranks] == [(3, 4)] * 2


def test_one_process_gets_the_part_of_rank_0_and_is_told_what_it_misses(trained):
    with heard_warnings() as texts:
        found = SnapshotCheckpointIO().load_checkpoint(_best(trained))

    assert found["mine"]["rank"] == 0
    assert len(texts) == 1
    assert "saved by 2 ranks and is loaded by 1" in texts[0]
    assert texts[0].endswith(": mine")


def test_more_ranks_get_the_part_of_rank_0_too_and_one_says_so(trained):
    ranks = run_ranks(replicated.load_elsewhere, 3, _best(trained))

    assert [(rank["mine"], rank["step"]) for rank in ranks] == [(0, 3)] * 3
    (text,) = ranks[0]["warnings"]
    assert "saved by 2 ranks and is loaded by 3" in text
    assert ranks[1]["warnings"] == ranks[2]["warnings"] == []


def _best(trained) -> Path:
    return trained.folder / "best" / "last.ckpt"


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


@pytest.mark.parametrize("name", NAMESPACES)
def test_a_resumed_run_equals_one_that_was_not_interrupted(name, tmp_path):
    for found in run_ranks(replicated.exactness, 2, name, tmp_path):
        assert found == {"adam": None, "zero": None}


@pytest.mark.parametrize("name", NAMESPACES)
def test_lr_find_leaves_nothing_behind(name, tmp_path):
    assert run_ranks(replicated.tuner, 2, name, tmp_path) == [[], []]


@pytest.mark.parametrize("name", NAMESPACES)
def test_without_the_callback_rank_0_saves_and_says_once_what_is_missed(name, tmp_path):
    first, second = run_ranks(replicated.without_callback, 2, name, tmp_path)

    assert second["warnings"] == []
    (text,) = first["warnings"]
    assert "rank 0 alone" in text
    assert "SnapshotCallback" in text
    found = SnapshotCheckpointIO().load_checkpoint(tmp_path / "b.ckpt")
    assert difference(dict(found["state_dict"]), first["weights"]) is None


def test_replicas_that_differ_are_found(tmp_path):
    first, second = run_ranks(replicated.replicas, 2, "lightning", tmp_path)

    assert first.startswith("UnsupportedValueError: state_dict/net.2.bias: expected equal values on all ranks")
    assert "on rank 1" in first
    assert second.startswith("UnsupportedValueError: rank 0: state_dict/net.2.bias")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["equal.ckpt"]


def test_a_full_disk_on_one_rank_is_an_error_on_all_and_the_next_save_succeeds(tmp_path):
    ranks = run_ranks(replicated.full_disk, 2, "lightning", tmp_path)

    for rank in ranks:
        assert rank["errno"]
        assert rank["left"] == []
        assert rank["loads"] == 1
    assert ranks[0]["text"].startswith("[Errno 27] rank 1: ")
    assert max(rank["seconds"] for rank in ranks) < 10, "the group's time-out is a minute"


def test_a_disk_slower_than_the_time_out_of_the_process_group_does_no_harm(tmp_path):
    assert run_ranks(replicated.slow_disk, 2, "lightning", tmp_path, group_timeout_seconds=2.0) == [2, 2]


@pytest.mark.parametrize(("name", "failing"), [(NAMESPACES[0], 1), (NAMESPACES[1], 0)])
def test_an_exception_on_one_rank_is_what_the_user_sees_and_a_checkpoint_is_saved(name, failing, tmp_path):
    run_ranks(replicated.one_fails, 2, name, tmp_path, failing, may_die=[0, 1], timeout_seconds=50)

    texts = [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)]
    assert texts[failing].startswith('ValueError("the user\'s own words")')
    assert [len(text.splitlines()) for text in texts] == [1, 1], "whoever waited for the other has warned"
    found = SnapshotCheckpointIO().load_checkpoint(tmp_path / "saved.ckpt")
    assert found["global_step"] == 2
    assert found["mine"] == 0


def test_an_exception_with_a_part_of_the_optimizer_on_each_rank_saves_nothing_and_waits_for_nobody(tmp_path):
    run_ranks(replicated.one_fails, 2, "lightning", tmp_path, 1, True, may_die=[0, 1], timeout_seconds=50)

    (told,) = (tmp_path / "0.txt").read_text().splitlines()[1:]
    assert told.startswith(f"{tmp_path / 'saved.ckpt'} is not saved")
    assert (tmp_path / "1.txt").read_text() == 'ValueError("the user\'s own words")'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.txt", "1.txt"]


def test_sigterm_saves_with_all_ranks(tmp_path):
    run_ranks(replicated.one_fails, 2, "lightning", tmp_path, None)

    assert [(tmp_path / f"{rank}.txt").read_text().partition("(")[0] for rank in (0, 1)] == ["SIGTERMException"] * 2
    assert Snapshot(tmp_path / "saved.ckpt").read_object("1/mine") == 1


@pytest.mark.parametrize("name", NAMESPACES)
def test_sigterm_during_a_save_lets_it_end_first(name, tmp_path):
    run_ranks(replicated.signalled, 2, name, tmp_path, signal.SIGTERM, may_die=[0, 1])

    assert [(tmp_path / f"{rank}.txt").read_text().partition("(")[0] for rank in (0, 1)] == ["SIGTERMException"] * 2
    for path in (tmp_path / "step=2.ckpt", tmp_path / "saved.ckpt"):
        assert (Snapshot(path).read_object("0/global_step"), Snapshot(path).read_object("1/mine")) == (2, 1)
    assert Snapshot(tmp_path / "step=2.ckpt").verify().ok


@pytest.mark.parametrize("name", NAMESPACES)
def test_ctrl_c_during_a_save_leaves_nothing_of_it(name, tmp_path):
    run_ranks(replicated.signalled, 2, name, tmp_path, signal.SIGINT, may_die=[0, 1])

    errors = [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)]
    # Of two ranks that are interrupted at the same time, one may hear of the other first.
    assert "SystemExit(1)" in errors
    assert all(error == "SystemExit(1)" or "raised KeyboardInterrupt" in error for error in errors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.txt", "1.txt", "saved.ckpt", "step=1.ckpt"]
    assert Snapshot(tmp_path / "step=1.ckpt").read_object("1/mine") == 1
    assert Snapshot(tmp_path / "saved.ckpt").read_object("0/global_step") == 2  # by rank 0 alone: it waits for nobody
