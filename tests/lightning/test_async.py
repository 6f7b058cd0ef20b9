"""Saves behind training: nobody can tell them from others, whatever fails."""

import collections
import logging
import os
import re
import signal
import sys
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_snapshot import Snapshot, SnapshotCallback, SnapshotCheckpointIO
from lightning_snapshot.background import Background, _Job
from lightning_snapshot.errors import StorageError
from lightning_snapshot.integration.behind import Behind, SavesBehindTraining
from lightning_snapshot.integration.rankings import Rankings
from lightning_snapshot.stats import Meter
from tests.lightning.gates import PATIENCE_SECONDS, Gate, GatedCheckpointIO
from tests.lightning.models import STEPS_PER_EPOCH


def names(folder):
    return sorted(os.listdir(folder))


def is_sync(plugin):
    return plugin.last_save.stall_seconds == plugin.last_save.seconds


# --- the plugin alone ------------------------------------------------------------------------------------------------


def test_what_is_saved_is_the_state_at_the_call(tmp_path):
    gate = Gate(is_open=False)
    plugin = GatedCheckpointIO(gate)
    big = torch.zeros(40_000_000, dtype=torch.uint8)
    tensors = [big, torch.zeros(3), torch.zeros(6, 8)[::2, 1::3], torch.zeros(()), torch.zeros(5, dtype=torch.bfloat16)]
    array, items, table, queue, raw = np.zeros(3), [0, [0]], {"a": 0}, collections.deque([0]), bytearray(b"0")
    state = {"tensors": tensors, "array": array, "items": items, "table": table, "queue": queue, "raw": raw}

    plugin.save_checkpoint(state, tmp_path / "s")
    for tensor in tensors:
        tensor.fill_(7)
    array[:] = 7
    items[1].append(7)
    table["b"] = 7
    queue.append(7)
    raw += b"7"
    gate.open()
    loaded = plugin.load_checkpoint(tmp_path / "s", weights_only=False)

    assert all(not tensor.any() for tensor in loaded["tensors"])
    assert [tensor.shape for tensor in loaded["tensors"]] == [tensor.shape for tensor in tensors]
    assert not loaded["array"].any()
    assert (loaded["items"], loaded["table"], list(loaded["queue"]), loaded["raw"]) == ([0, [0]], {"a": 0}, [0], b"0")


@pytest.mark.parametrize("max_pending_bytes", [1, 9_000_000])
def test_a_copy_that_does_not_fit_is_written_meanwhile(tmp_path, max_pending_bytes):
    plugin = SnapshotCheckpointIO(async_save=True, max_pending_bytes=max_pending_bytes)
    state = {"w": torch.arange(10_000_000)}
    plugin.save_checkpoint(state, tmp_path / "s")
    expected = state["w"].clone()
    state["w"].zero_()

    assert torch.equal(plugin.load_checkpoint(tmp_path / "s")["w"], expected)
    pool = plugin.behind._copies()
    assert pool.reserved_bytes <= max(max_pending_bytes, pool.block_bytes)
    assert pool.used_bytes == 0
    plugin.teardown()


def test_memory_does_not_grow_from_save_to_save(tmp_path):
    plugin = SnapshotCheckpointIO(async_save=True)
    state = {"w": torch.zeros(3_000_000), "v": [torch.zeros(7) for _ in range(50)], "o": [{1, 2}, {3}]}
    sizes = set()
    for number in range(10):
        plugin.save_checkpoint(state, tmp_path / str(number % 2))
        sizes.add(plugin.behind._copies().reserved_bytes)
    plugin.wait()
    assert len(sizes) == 1
    assert sizes.pop() < 12_000_000 + 2 * 4 * 2**20
    plugin.teardown()
    assert plugin.behind._copies().reserved_bytes == 0


def test_nothing_of_the_state_is_kept(tmp_path):
    plugin = SnapshotCheckpointIO(async_save=True, overlap=True)
    tensor = torch.zeros(1000)
    optimizers = [torch.optim.SGD([tensor])]
    plugin.behind.optimizers = lambda: optimizers
    kept = weakref.ref(tensor)
    plugin.save_checkpoint({"w": tensor}, tmp_path / "s")
    plugin.wait()
    del tensor
    optimizers.clear()
    assert kept() is None
    plugin_kept = weakref.ref(plugin)
    del plugin
    assert plugin_kept() is None


def test_a_load_waits_and_the_place_is_taken_meanwhile(tmp_path):
    gate = Gate(is_open=False)
    plugin = GatedCheckpointIO(gate)
    plugin.save_checkpoint({"n": 1}, tmp_path / "s")
    assert names(tmp_path / "s") == []
    with ThreadPoolExecutor() as pool:
        load = pool.submit(plugin.load_checkpoint, tmp_path / "s")
        assert gate.reached.wait(PATIENCE_SECONDS)
        assert not load.done()
        gate.open()
        assert load.result() == {"n": 1}
    assert names(tmp_path) == ["s"]


def test_a_removal_waits_for_the_save_before_it(tmp_path):
    gate = Gate()
    plugin = GatedCheckpointIO(gate)
    plugin.save_checkpoint({"n": 1}, tmp_path / "a")
    plugin.wait()
    gate.close()
    plugin.save_checkpoint({"n": 2}, tmp_path / "b")
    plugin.remove_checkpoint(tmp_path / "a")
    assert plugin.behind.pending
    assert Snapshot(tmp_path / "a").read_object("0/n") == 1
    gate.open()
    plugin.wait()
    assert names(tmp_path) == ["b"]


def test_what_is_saved_and_removed_at_once_is_gone(tmp_path):
    plugin = GatedCheckpointIO(Gate())
    plugin.save_checkpoint({"n": 1}, tmp_path / "a")
    plugin.remove_checkpoint(tmp_path / "a")
    plugin.wait()
    assert names(tmp_path) == []


@pytest.mark.parametrize("ends_first", [True, False])
def test_a_save_that_fails_costs_nothing_and_what_it_replaces_goes_later(tmp_path, ends_first):
    gate = Gate(is_open=ends_first, failing={2, 3})
    plugin = GatedCheckpointIO(gate, on_error="warn")
    gate.open()
    plugin.save_checkpoint({"n": 1}, tmp_path / "a")
    for before, after in ("ab", "bc"):
        plugin.save_checkpoint({"n": 2}, tmp_path / after)
        if ends_first:
            plugin.wait()
        plugin.remove_checkpoint(tmp_path / before)
    plugin.wait()
    assert names(tmp_path) == ["a"]
    plugin.save_checkpoint({"n": 4}, tmp_path / "d")
    plugin.remove_checkpoint(tmp_path / "c")
    plugin.wait()
    assert names(tmp_path) == ["d"]


def test_a_failure_is_raised_once_with_path_and_cause(tmp_path):
    plugin = GatedCheckpointIO(Gate(failing={1}))
    plugin.save_checkpoint({"n": 1}, tmp_path / "a")
    with pytest.raises(StorageError, match=rf"rank 0.*{re.escape(str(tmp_path / 'a'))}.*No space left") as caught:
        plugin.save_checkpoint({"n": 2}, tmp_path / "b")
    assert isinstance(caught.value.__cause__, StorageError)
    plugin.save_checkpoint({"n": 3}, tmp_path / "c")
    plugin.wait()
    assert names(tmp_path) == ["c"]


def test_a_failure_does_not_replace_the_exception_that_is_handled(tmp_path, caplog):
    plugin = GatedCheckpointIO(Gate(failing={1}))
    plugin.save_checkpoint({"n": 1}, tmp_path / "a")

    def fails():
        with plugin:
            raise KeyError("user")

    with pytest.raises(KeyError, match="user") as caught:
        fails()
    assert "No space left" in caplog.text
    if sys.version_info >= (3, 11):
        assert "No space left" in caught.value.__notes__[0]
    plugin.wait()


def test_lists_are_corrected_later_if_the_storage_cannot_be_asked(tmp_path, caplog):
    """As in `Rankings`, a list of checkpoints is an object with the attributes of ``ModelCheckpoint``."""
    answers = [StorageError("no connection"), False]

    def is_snapshot(path):
        answer = answers.pop(0)
        if isinstance(answer, StorageError):
            raise answer
        return answer

    plugin = GatedCheckpointIO(Gate(failing={1}), on_error="warn")
    how = Behind(True, False, False, "warn", "wait", None)
    plugin.behind = SavesBehindTraining(how, plugin._session, plugin._options.block_bytes, is_snapshot)
    path = os.fspath(tmp_path / "s")
    checkpoint = SimpleNamespace(last_model_path=path)
    plugin.behind.rankings = Rankings(SimpleNamespace(checkpoint_callbacks=[checkpoint]))
    plugin.save_checkpoint({"w": torch.zeros(3)}, path)

    plugin.wait()
    assert "no connection" in caplog.text
    assert "No space left" in caplog.text
    assert checkpoint.last_model_path == path
    plugin.wait()
    assert checkpoint.last_model_path == ""
    assert not answers


def test_a_busy_plugin_can_skip(tmp_path):
    gate = Gate()
    plugin = GatedCheckpointIO(gate, on_busy="skip")
    plugin.save_checkpoint({"n": 1}, tmp_path / "a")
    plugin.wait()
    gate.close()
    plugin.save_checkpoint({"n": 2}, tmp_path / "b")
    plugin.save_checkpoint({"n": 3}, tmp_path / "c")
    plugin.remove_checkpoint(tmp_path / "a")
    gate.open()
    plugin.wait()
    assert names(tmp_path) == ["a", "b"]
    plugin.save_checkpoint({"n": 4}, tmp_path / "d")
    plugin.remove_checkpoint(tmp_path / "c")
    plugin.wait()
    assert names(tmp_path) == ["b", "d"]


def test_a_busy_plugin_can_give_up_for_a_newer_save(tmp_path, caplog):
    gate = Gate(is_open=False)
    plugin = GatedCheckpointIO(gate, on_busy="supersede")

    class OpensGate(logging.Handler):
        def emit(self, record):
            if "giving up" in record.getMessage():
                gate.open()

    logger, handler = logging.getLogger("lightning_snapshot"), OpensGate()
    logger.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, "lightning_snapshot"):
            plugin.save_checkpoint({"objects": [{str(number)} for number in range(20)]}, tmp_path / "a")
            assert gate.reached.wait(PATIENCE_SECONDS)
            plugin.save_checkpoint({"n": 2}, tmp_path / "b")
            plugin.wait()
    finally:
        logger.removeHandler(handler)
    assert names(tmp_path) == ["b"]


def test_arguments_are_checked():
    for arguments in (
        {"on_error": "ignore"},
        {"on_busy": "no"},
        {"max_pending_bytes": 0},
        {"max_pending_bytes": 1.5},
        {"overlap_check": True},
    ):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            SnapshotCheckpointIO(**arguments)


# --- under a Trainer -------------------------------------------------------------------------------------------------


def checkpoint_of(namespace, folder, **arguments):
    return namespace.pl.callbacks.ModelCheckpoint(dirpath=folder / "kept", **arguments)


@pytest.mark.parametrize(
    ("failing", "arguments", "expected"),
    [
        ({2}, {"save_top_k": 1}, [3]),
        ({4}, {"save_top_k": 1}, [2]),
        ({3, 4}, {"save_top_k": 1}, [1]),
        ({2}, {"save_top_k": 2, "monitor": "score", "mode": "max"}, [2, 3]),
        ({4}, {"save_top_k": 2, "monitor": "score", "mode": "max"}, [1, 2]),
        ({3, 4}, {"save_top_k": 1, "monitor": "score", "mode": "max"}, [1]),
    ],
)
def test_with_warn_training_goes_on_and_only_what_is_there_is_listed(
    namespace, cls, make_trainer, tmp_path, failing, arguments, expected
):
    checkpoint = checkpoint_of(namespace, tmp_path, **arguments)
    plugin = GatedCheckpointIO(Gate(failing=failing), on_error="warn")
    make_trainer(max_epochs=4, callbacks=[checkpoint], plugin=plugin).fit(cls.Tiny(scores=(1.0, 2.0, 3.0, 4.0)))

    paths = [f"epoch={epoch}-step={STEPS_PER_EPOCH * (epoch + 1)}.ckpt" for epoch in expected]
    assert names(tmp_path / "kept") == paths
    assert checkpoint.best_model_path == str(tmp_path / "kept" / paths[-1])
    if "monitor" in arguments:
        assert sorted(map(os.path.basename, checkpoint.best_k_models)) == paths
        assert checkpoint.best_model_score == expected[-1] + 1


def test_a_name_is_free_when_its_checkpoint_is_about_to_go(namespace, cls, make_trainer, tmp_path):
    gate = Gate(is_open=False)
    seen = []

    class Checkpoint(namespace.pl.callbacks.ModelCheckpoint):
        def format_checkpoint_name(self, *args, **kwargs):
            gate.open()  # not before the next name is looked for
            return super().format_checkpoint_name(*args, **kwargs)

        def _save_checkpoint(self, trainer, filepath):
            plugin.wait()
            gate.close()
            seen.append(os.path.basename(filepath))
            super()._save_checkpoint(trainer, filepath)

    class Opens(namespace.pl.Callback):
        def on_train_end(self, *_):
            gate.open()

    plugin = GatedCheckpointIO(gate)
    checkpoint = Checkpoint(tmp_path / "kept", filename="{score:.0f}")
    trainer = make_trainer(plugin=plugin, max_epochs=4, callbacks=[Opens(), checkpoint])
    trainer.fit(cls.Tiny(scores=(1.0, 2.0, 1.0, 2.0)))
    assert seen == ["score=1.ckpt", "score=2.ckpt"] * 2


def test_a_removal_that_is_being_done_is_waited_for():
    begun, goes_on, done = threading.Event(), threading.Event(), []

    class Pending(Future):
        def exception(self, timeout=None):
            goes_on.set()
            return super().exception(timeout)

    def remove():
        begun.set()
        goes_on.wait()
        done.append("old")

    background = Background()
    job = background._last = _Job("new", Pending(), after=[("old", remove)])
    end = threading.Thread(
        target=lambda: job.pending.set_result(background._end(job, Meter("save", "new").finish())), daemon=True
    )
    end.start()
    begun.wait()
    background.wait_for("old")
    assert done == ["old"]
    end.join()
    assert background.pending is None


def test_a_failed_last_is_not_listed(namespace, cls, make_trainer, tmp_path):
    checkpoint = checkpoint_of(namespace, tmp_path, save_top_k=0, save_last=True)
    plugin = GatedCheckpointIO(Gate(failing={1}), on_error="warn")
    make_trainer(max_epochs=1, callbacks=[checkpoint], plugin=plugin).fit(cls.Tiny())
    assert checkpoint.last_model_path == ""


@pytest.mark.parametrize("failing", [2, 4])
def test_a_failure_ends_training_once(namespace, cls, make_trainer, tmp_path, failing):
    checkpoint = checkpoint_of(namespace, tmp_path, save_top_k=-1)
    plugin = GatedCheckpointIO(Gate(failing={failing}))
    model = cls.Tiny()
    trainer = make_trainer(max_epochs=4, callbacks=[checkpoint], plugin=plugin)
    with pytest.raises(StorageError, match=f"epoch={failing - 1}.*No space left"):
        trainer.fit(model)
    assert len(names(tmp_path / "kept")) == failing - 1

    make_trainer(max_epochs=1, plugin=plugin, enable_checkpointing=False).fit(cls.Tiny())
    trainer = make_trainer(plugin=plugin)
    trainer.validate(model, ckpt_path=tmp_path / "kept" / "epoch=0-step=4.ckpt", verbose=False)


def test_the_error_of_the_program_is_what_the_user_sees(namespace, cls, make_trainer, tmp_path, caplog):
    class Raises(cls.Tiny):
        def on_train_epoch_end(self):
            if self.current_epoch == 1:
                raise KeyError("mine")

    checkpoint = checkpoint_of(namespace, tmp_path, save_top_k=-1, every_n_train_steps=STEPS_PER_EPOCH)
    plugin = GatedCheckpointIO(Gate(failing={2}))
    with pytest.raises(KeyError, match="mine") as caught:
        make_trainer(max_epochs=3, callbacks=[checkpoint], plugin=plugin).fit(Raises())
    assert "No space left" in caplog.text
    if sys.version_info >= (3, 11):
        assert any("No space left" in note for note in caught.value.__notes__)
    plugin.wait()


def test_saves_outside_of_training_and_those_that_are_read_at_once_are_synchronous(
    cls, make_trainer, tmp_path, namespace
):
    plugin = SnapshotCheckpointIO(async_save=True)
    seen = {}

    class Saves(namespace.pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            for name in ("a.ckpt", "hpc_ckpt_1.ckpt", ".lr_find_x.ckpt", ".scale_batch_size_x.ckpt", ".temp.ckpt"):
                trainer.save_checkpoint(tmp_path / name)
                plugin.wait()
                seen[name] = is_sync(plugin)

    trainer = make_trainer(max_steps=1, callbacks=[Saves()], plugin=plugin, enable_checkpointing=False)
    trainer.fit(cls.Tiny())
    assert not seen.pop("a.ckpt")
    assert all(seen.values())
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert is_sync(plugin)
    assert Snapshot(tmp_path / "after.ckpt").read_object("0/global_step") == 1


class Curious:
    """A logger that looks at each checkpoint."""

    def __init__(self, *args):
        super().__init__(*args)
        self.steps = []

    def after_save_checkpoint(self, checkpoint_callback):
        self.steps.append(Snapshot(checkpoint_callback.best_model_path).read_object("0/global_step"))


def test_who_looks_at_checkpoints_finds_them(namespace, cls, make_trainer, tmp_path, caplog):
    class CuriousLogger(Curious, namespace.pl.loggers.CSVLogger): ...

    plugin = SnapshotCheckpointIO(async_save=True)
    checkpoint = checkpoint_of(namespace, tmp_path, save_top_k=-1)
    logger = CuriousLogger(tmp_path / "logs")
    make_trainer(max_epochs=2, callbacks=[checkpoint], plugin=plugin, logger=logger).fit(cls.Tiny())
    assert logger.steps == [4, 8]
    assert "CuriousLogger looks at them" in caplog.text


def test_linked_last_is_synchronous(namespace, cls, make_trainer, tmp_path, caplog):
    plugin = SnapshotCheckpointIO(async_save=True)
    checkpoint = checkpoint_of(namespace, tmp_path, save_top_k=-1, save_last="link")
    make_trainer(max_epochs=2, callbacks=[checkpoint], plugin=plugin).fit(cls.Tiny())
    assert is_sync(plugin)
    assert "save_last='link'" in caplog.text


def test_callbacks_and_loggers_hear_of_published_snapshots(namespace, cls, make_trainer, tmp_path):
    heard, shown, rows = [], set(), []

    class Logger(namespace.pl.loggers.CSVLogger):
        def log_metrics(self, metrics, step=None):
            if "snapshot/bytes" in metrics:
                rows.append(metrics)

    class Listens(namespace.pl.Callback):
        def on_snapshot_committed(self, path, stats):
            assert threading.current_thread() is threading.main_thread()
            heard.append((os.path.basename(path), stats.data_bytes > 0, Snapshot(path).read_object("0/global_step")))

        def on_train_batch_start(self, trainer, *_):
            shown.add(trainer.progress_bar_metrics.get("saving"))

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 1:
                gate.open()

    gate = Gate(is_open=False)
    checkpoint = checkpoint_of(namespace, tmp_path, save_top_k=-1, every_n_train_steps=1, filename="{step}")
    trainer = make_trainer(
        max_steps=3,
        callbacks=[Listens(), checkpoint, SnapshotCallback(log_stats=True)],
        plugin=GatedCheckpointIO(gate),
        logger=Logger(tmp_path / "logs"),
    )
    trainer.fit(cls.Tiny())

    assert heard == [(f"step={step}.ckpt", True, step) for step in (1, 2, 3)]
    assert "step=1.ckpt" in shown
    assert "saving" not in trainer.progress_bar_metrics
    assert len(rows) == 3
    assert all(0 < row["snapshot/stall_seconds"] <= row["snapshot/seconds"] for row in rows)
    assert all(row["snapshot/gigabytes_per_second"] > 0 for row in rows)


def test_lightnings_wrapper_is_taken_off(namespace, cls, make_trainer, tmp_path):
    wrapper = namespace.pl.plugins.io.AsyncCheckpointIO(SnapshotCheckpointIO())
    checkpoint = checkpoint_of(namespace, tmp_path, save_top_k=1)
    trainer = make_trainer(max_epochs=2, callbacks=[checkpoint], plugin=wrapper)
    with pytest.warns(UserWarning, match="AsyncCheckpointIO is not used"):
        trainer.fit(cls.Tiny())
    assert trainer.strategy.checkpoint_io is wrapper.checkpoint_io
    assert not is_sync(trainer.strategy.checkpoint_io)
    assert names(tmp_path / "kept") == ["epoch=1-step=8.ckpt"]


def test_best_is_there_for_the_test_after_training(namespace, cls, make_trainer, tmp_path):
    model = cls.Tiny(scores=(1.0, 3.0, 2.0))
    checkpoint = checkpoint_of(namespace, tmp_path, monitor="score", mode="max")
    trainer = make_trainer(max_epochs=3, callbacks=[checkpoint], plugin=SnapshotCheckpointIO(async_save=True))
    trainer.fit(model)
    trainer.test(model, ckpt_path="best", verbose=False)
    expected = Snapshot(checkpoint.best_model_path).read_object("0/state_dict/net.0.weight")
    assert torch.equal(model.weights_in_evaluation[-1], expected)


# --- programs that end -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["waits", "fails"])
def test_a_program_that_just_ends_saves_or_fails(start_program, tmp_path, how):
    process = start_program("fabric_async.py", tmp_path / "s", how)
    output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert "end of program" in output
    if how == "waits":
        assert process.returncode == 0, errors
        assert Snapshot(tmp_path / "s").read_object("0/n") == 1
    else:
        assert process.returncode == 1
        assert str(tmp_path / "s") in errors
        assert "No space left" in errors
        assert names(tmp_path) == []


def test_ctrl_c_waits_for_the_save_that_goes_on(start_program, tmp_path):
    process = start_program("async_train.py", tmp_path)
    assert process.stdout.readline() == "saving\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1, errors
    assert Snapshot(tmp_path / "kept" / "step=1.ckpt").read_object("0/global_step") == 1
