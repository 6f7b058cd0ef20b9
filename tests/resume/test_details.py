"""What is told, left out and left alone, when a run is resumed."""

import pytest

from tests.ranks.processes import needs_fully_shard, run_ranks
from tests.resume import details
from tests.resume.cases import Case

pytestmark = pytest.mark.distributed


def test_a_rank_can_be_asked_for_its_stacks_after_a_training(tmp_path):
    assert run_ranks(details.asked_for_stacks, 1, tmp_path) == [True]


def test_saving_advances_no_random_numbers(tmp_path):
    assert run_ranks(details.saving_often, 1, tmp_path) == [None]


def test_the_hook_of_the_module_at_the_end_of_a_batch_is_called_once_and_before_callbacks_save(tmp_path):
    ((called, left),) = run_ranks(details.ends_of_batches, 1, tmp_path)
    first, second = called[:4], called[4:]
    in_order, saved = ["callback", "callback", "module"], ["callback", "module", "callback"]
    assert first == [in_order, saved, in_order, saved]
    assert second == [in_order, saved, in_order]
    assert left == []


@pytest.mark.parametrize("has_hook", [True, False])
def test_a_hook_that_comes_after_a_save_in_a_validation_is_named(tmp_path, has_hook):
    (texts,) = run_ranks(details.after_a_validation, 1, tmp_path, has_hook)
    assert [text.partition(" ")[0] for text in texts] == ["Late.on_validation_end"] * has_hook


@pytest.mark.parametrize(("moment", "epochs"), [("epoch end", 3), ("last batch", 2)])
def test_metrics_and_what_monitors_them_are_equal_if_nobody_had_asked_for_them(tmp_path, moment, epochs):
    assert run_ranks(details.asked_by_nobody, 1, tmp_path, moment, epochs) == [None]


def test_a_scheduler_whose_metric_was_not_logged_before_the_save_is_named_and_leaves_out_one_step(tmp_path):
    ((texts, steps),) = run_ranks(details.missing_metric, 1, tmp_path)
    assert len(texts) == 1
    assert "ReduceLROnPlateau leaves out a step, because late was not logged" in texts[0]
    assert steps == 2


@pytest.mark.parametrize("case", [Case(), Case("stateful", "stream"), Case(ranks=2)], ids=str)
def test_a_run_that_was_stopped_by_sigterm_goes_on_exactly(tmp_path, case):
    assert run_ranks(details.stopped_by_sigterm, case.ranks, tmp_path, case) == [None] * case.ranks


def test_a_run_of_three_ranks_that_was_resumed_twice_adds_up_gradients_in_the_same_order(tmp_path):
    assert run_ranks(details.stopped_twice, 3, tmp_path) == [None] * 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_of_an_open_window_are_kept_if_asked_for(tmp_path, ranks):
    assert run_ranks(details.open_window, ranks, tmp_path, True) == [(None, [])] * ranks


@pytest.mark.parametrize("strategy", ["fsdp1", pytest.param("fsdp2 late", marks=needs_fully_shard)])
def test_gradients_that_ranks_have_not_added_up_yet_are_not_kept_and_that_is_said(tmp_path, strategy):
    found = run_ranks(details.open_window, 2, tmp_path, True, strategy)
    assert all(differs for differs, _ in found)
    (text,) = found[0][1]
    assert "without the gradients that are being accumulated because they are not spread over ranks" in text


@needs_fully_shard
def test_gradients_do_not_go_to_parameters_that_are_spread_in_another_way(tmp_path):
    texts, _ = run_ranks(details.other_layout, 2, tmp_path)
    assert sum("gradients that were being accumulated are not restored" in text for text in texts) == 1


def test_a_copy_of_a_loader_is_the_loader_that_nobody_has_followed(tmp_path):
    assert run_ranks(details.copied_loader, 1, tmp_path) == [[True, True]]


def test_a_loader_that_has_a_state_now_is_named(tmp_path):
    (text,) = run_ranks(details.other_kind, 1, tmp_path)
    assert "expected states for 1 training data loaders, found 0" in text
    assert "loader_state=False" in text


@pytest.mark.parametrize(
    ("sampler", "count"),
    [("persistent long stream", 0), ("persistent rare states", 0), ("persistent rare states long stream", 1)],
)
def test_states_that_workers_have_not_told_are_named(tmp_path, sampler, count):
    (texts,) = run_ranks(details.old_states, 1, tmp_path, sampler)
    assert len(texts) == count


def test_waiting_for_workers_changes_nothing_of_what_is_read():
    assert run_ranks(details.settled, 1, timeout_seconds=300) == [[]]


def test_bytes_in_the_state_of_a_loader_stay_bytes():
    ((found, expected),) = run_ranks(details.bytes_in_a_state, 1)
    assert found == expected


def test_without_the_gradients_of_an_open_window_both_runs_say_so(tmp_path):
    ((found, texts),) = run_ranks(details.open_window, 1, tmp_path, False)
    assert found is not None
    assert len(texts) == 1
    assert "without the gradients that are being accumulated" in texts[0]
    assert "save_gradients=True" in texts[0]


@pytest.mark.parametrize(("before", "batches", "after"), [(2, 3, 1), (1, 4, 2), (2, 2, 3), (3, 1, 2)])
def test_another_number_of_ranks_reads_what_is_left_of_the_epoch(tmp_path, before, batches, after):
    first = run_ranks(details.samples, before, tmp_path, "distributed", "a.ckpt", None, batches)
    second = run_ranks(details.samples, after, tmp_path, "distributed", "b.ckpt", "a.ckpt", 1000)

    epoch = [sample for rank in first for sample in rank["seen"][24 // before :]]
    rest = [sample for rank in second for sample in rank["seen"]]
    assert sorted(set(epoch + rest)) == list(range(24))
    # As DistributedSampler does, to give all ranks as many.
    assert len(epoch + rest) - 24 == -(24 - len(epoch)) % after
    assert {rank["validations"] for rank in second} == {1}, "the epoch has to end as any other"
    (text,) = [text for text in second[0]["warnings"] if "is loaded by" in text and "random" in text]
    assert f"saved by {before} ranks and is loaded by {after}" in text
    assert "dealt out anew" in text


def test_a_random_order_of_one_process_is_dealt_out_too(tmp_path):
    (first,) = run_ranks(details.samples, 1, tmp_path, "random", "a.ckpt", None, 5)
    second = run_ranks(details.samples, 2, tmp_path, "random", "b.ckpt", "a.ckpt", 1000)
    rest = [sample for rank in second for sample in rank["seen"]]
    assert len(rest) == 14
    assert sorted(first["seen"][24:] + rest) == list(range(24))


def test_what_is_left_can_be_dealt_out_again(tmp_path):
    seen = []
    for ranks, name, before, stop in ((2, "a", None, 2), (1, "b", "a", 6), (2, "c", "b", 1000)):
        found = run_ranks(
            details.samples, ranks, tmp_path, "distributed", f"{name}.ckpt", before and f"{before}.ckpt", stop
        )
        skip = 0 if before else 12
        seen += [sample for rank in found for sample in rank["seen"][skip:]]
    assert sorted(seen) == list(range(24))


def test_a_loader_whose_order_is_not_known_begins_the_epoch_again(tmp_path):
    run_ranks(details.samples, 2, tmp_path, "stateful", "a.ckpt", None, 3)
    (second,) = run_ranks(details.samples, 1, tmp_path, "stateful", "b.ckpt", "a.ckpt", 1000)
    assert sorted(second["seen"]) == list(range(24))
    assert any("the epoch begins again with its first batch" in text for text in second["warnings"])


def test_an_iterable_that_has_no_position_is_named_with_what_helps(tmp_path):
    (found,) = run_ranks(details.fit_twice, 1, tmp_path, "iterable")
    (text,) = [text for text in found["first"]["warnings"] if "cannot be brought back" in text]
    assert "DataLoader over _Plain" in text
    assert "StatefulDataLoader" in text
    assert found["second"]["seen"][:2] == [0, 1]


def test_a_sampler_with_an_order_of_its_own_is_noticed(tmp_path):
    (found,) = run_ranks(details.fit_twice, 1, tmp_path, "forgetful")
    assert any("does not give the order again" in text for text in found["second"]["warnings"])


def test_other_iterables_are_read_up_to_where_they_were(tmp_path):
    (found,) = run_ranks(details.fit_twice, 1, tmp_path, "other")
    assert found["second"]["seen"] == list(range(4, 24))
    assert any("_Ones is read up to batch 4" in text for text in found["second"]["warnings"])
    assert "Reading" not in found["second"]["shown"]


def test_reading_up_to_a_place_shows_a_bar_on_rank_0(tmp_path):
    first, other = run_ranks(details.fit_twice, 2, tmp_path, "other", True)
    assert "Reading _Ones up to where it was" in first["second"]["shown"]
    assert "/4 [" in first["second"]["shown"]
    assert "Reading" not in first["first"]["shown"] + other["second"]["shown"]
    assert not any("is read up to" in text for text in other["second"]["warnings"])


def test_loader_state_can_be_switched_off(tmp_path):
    (found,) = run_ranks(details.fit_twice, 1, tmp_path, "opt-out")
    assert found["second"]["seen"][:2] == [0, 1]


def test_checkpoints_without_it_load_and_it_is_plain_data(tmp_path):
    (found,) = run_ranks(details.without_state, 1, tmp_path)
    assert any("holds no random numbers" in text for text in found["warnings"])
    assert found["epoch"] == 3
    assert found["plain"].count("torch.Tensor") > 10
    assert {part for part in found["plain"].split('"') if "." in part and " " not in part and "torch" in part} == {
        "torch.Tensor"
    }
    assert found["trial"] == {
        ".lr_find_1.ckpt": False,
        ".scale_batch_size_1.ckpt": False,
        "other.ckpt": True,
        "weights": False,
    }


@pytest.mark.parametrize(
    ("kind", "ranks", "stops_at"),
    [
        ("plain", 1, (1, 15)),
        ("plain", 1, (1, -1)),
        ("plain", 2, (1, 8)),
        ("plain", 2, (0, -1)),
        ("batches", 1, (0, 8)),
        ("persistent", 1, (1, -1)),
        ("stateful", 1, (1, 15)),
        ("stateful", 1, (1, -1)),
        ("stateful", 2, (1, 8)),
        ("stream", 1, (1, -1)),
        ("litdata", 1, (1, -1)),
    ],
)
def test_a_loop_of_ones_own(tmp_path, kind, ranks, stops_at):
    assert run_ranks(details.fabric_loop, ranks, tmp_path, kind, stops_at) == [None] * ranks
