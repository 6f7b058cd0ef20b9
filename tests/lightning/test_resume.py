"""Whatever a Trainer resumes or evaluates comes back exactly."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_snapshot import Snapshot, SnapshotCallback, SnapshotCheckpointIO
from lightning_snapshot.errors import UnsupportedFeatureError
from tests.lightning.models import difference, state_of

SCORES = (3.0, 1.0, 2.0)


def run(make_trainer, model, *, max_epochs, ckpt_path=None, **arguments):
    """Fit; returns the trainer."""
    trainer = make_trainer(max_epochs=max_epochs, **arguments)
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer


# --- exactness -------------------------------------------------------------------------------------------------------


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(namespace, cls, make_trainer, tmp_path):
    expected = state_of(run(make_trainer, cls.Tiny(), max_epochs=5, enable_checkpointing=False))

    checkpoint = namespace.pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "kept", save_last=True)
    run(make_trainer, cls.Tiny(), max_epochs=2, callbacks=[checkpoint])
    model = cls.Tiny(seed=2)
    resumed = run(make_trainer, model, max_epochs=5, ckpt_path=tmp_path / "kept" / "last.ckpt")

    assert model.trained_steps == list(range(8, 20))
    assert difference(state_of(resumed), expected) is None


def test_a_snapshot_holds_what_a_checkpoint_file_holds(namespace, cls, make_trainer, tmp_path):
    class Hooks(cls.Tiny):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["mine"] = {1: (None, 2**80), "1": [float("nan"), b"\0"], "a/b%": torch.tensor(3), "": {}}

    callbacks = namespace.pl.callbacks
    checkpoint = callbacks.ModelCheckpoint(dirpath=tmp_path / "kept", monitor="val_loss", save_top_k=2, save_last=True)
    stopping = callbacks.EarlyStopping("val_loss", patience=5)
    trainer = run(make_trainer, Hooks(scores=SCORES), max_epochs=3, callbacks=[checkpoint, stopping])

    trainer.save_checkpoint(tmp_path / "snapshot.ckpt")
    trainer.strategy.checkpoint_io.remove_checkpoint(tmp_path / "stock.ckpt")
    expected = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    found = SnapshotCheckpointIO().load_checkpoint(tmp_path / "snapshot.ckpt")

    assert {"state_dict", "optimizer_states", "lr_schedulers", "callbacks", "loops", "mine"} <= set(found)
    assert found.pop("exact_resume")
    assert difference(found, expected) is None
    assert found["state_dict"]._metadata == expected["state_dict"]._metadata


def test_the_same_callback_by_hand_and_by_entry_point_is_harmless(cls, make_trainer):
    trainer = make_trainer(max_epochs=1, callbacks=[SnapshotCallback()])
    assert sum(isinstance(callback, SnapshotCallback) for callback in trainer.callbacks) == 2

    model = cls.Tiny()
    trainer.fit(model)
    path = trainer.checkpoint_callback.best_model_path
    resumed = run(make_trainer, cls.Tiny(seed=2), max_epochs=1, ckpt_path=path, callbacks=[SnapshotCallback()])
    assert difference(state_of(resumed), state_of(trainer)) is None


def test_the_entry_point_adds_the_callback(make_trainer):
    assert any(isinstance(callback, SnapshotCallback) for callback in make_trainer().callbacks)


def test_a_program_that_does_not_use_the_plugin_gets_no_callback_and_imports_nothing_of_ours():
    program = """if True:
        import sys, lightning.pytorch, pytorch_lightning
        for pl in (lightning.pytorch, pytorch_lightning):
            callbacks = pl.Trainer(accelerator="cpu", logger=False).callbacks
            print(*(name for each in callbacks if "Snapshot" in (name := type(each).__name__)))
        print(*(name for name in sys.modules if name.startswith("lightning_snapshot.") and "entry_point" not in name))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["lightning_snapshot.integration"]


def test_with_stock_checkpoints_the_callback_does_nothing(cls, make_trainer, tmp_path):
    trainer = run(make_trainer, cls.Tiny(), max_epochs=1, plugin=None, callbacks=[SnapshotCallback()])
    path = Path(trainer.checkpoint_callback.best_model_path)
    assert path.is_file()
    resumed = run(make_trainer, cls.Tiny(seed=2), max_epochs=1, plugin=None, ckpt_path=path)
    assert difference(state_of(resumed), state_of(trainer)) is None


# --- which checkpoint ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "first_step"), [("best", 8), ("last", 12), ("path", 4), ("hpc", 12)])
def test_fit_resumes_from(namespace, cls, make_trainer, tmp_path, kind, first_step):
    def callbacks():
        make = namespace.pl.callbacks.ModelCheckpoint
        return [make(tmp_path / "kept", monitor="score", save_top_k=3, save_last=True)]

    trainer = run(make_trainer, cls.Tiny(scores=SCORES), max_epochs=3, callbacks=callbacks())
    trainer.save_checkpoint(trainer._checkpoint_connector.hpc_save_path(tmp_path))
    if kind == "hpc":
        assert (tmp_path / "hpc_ckpt_1.ckpt").is_dir()
    model = cls.Tiny(scores=SCORES, seed=2)
    again = make_trainer(max_epochs=4, callbacks=callbacks())
    if kind == "best":
        again.checkpoint_callback.best_model_path = trainer.checkpoint_callback.best_model_path
    again.fit(model, ckpt_path=str(tmp_path / "kept" / "epoch=0-step=4.ckpt") if kind == "path" else kind)

    assert model.trained_steps == list(range(first_step, 16))


def test_fit_resumes_from_the_path_set_on_the_trainer(cls, make_trainer, tmp_path):
    first = run(make_trainer, cls.Tiny(), max_epochs=2)
    model = cls.Tiny(seed=2)
    trainer = make_trainer(max_epochs=3)
    trainer.ckpt_path = first.checkpoint_callback.best_model_path

    trainer.fit(model)

    assert model.trained_steps == [8, 9, 10, 11]


@pytest.mark.filterwarnings("ignore:.*without a model. The best model of the previous:UserWarning")
@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_evaluation_takes_the_weights_of(namespace, cls, make_trainer, tmp_path, verb):
    weights: list[torch.Tensor] = []

    class Recorder(namespace.pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            weights.append(pl_module.net[0].weight.detach().clone())

    make = namespace.pl.callbacks.ModelCheckpoint
    checkpoint = make(tmp_path / "kept", monitor="score", save_top_k=3, save_last=True)
    model = cls.Tiny(scores=SCORES)
    trainer = run(make_trainer, model, max_epochs=3, callbacks=[Recorder(), checkpoint])
    fresh = cls.Tiny(seed=2)
    own = fresh.net[0].weight.detach().clone()
    quiet = {} if verb == "predict" else {"verbose": False}
    path = tmp_path / "kept" / "epoch=0-step=4.ckpt"

    best = checkpoint.best_model_path
    # The model that was fitted comes first: with another one passed, that is the Trainer's model from then on.
    cases = [(None, "best", weights[1]), (None, "last", weights[2]), (None, path, weights[0]), (None, None, weights[1])]
    cases += [(fresh, None, own), (fresh, "best", weights[1]), (fresh, "last", weights[2]), (fresh, path, weights[0])]
    for given, ckpt_path, expected in cases:
        checkpoint.best_model_path = best  # Lightning takes it from whatever it has loaded last
        getattr(trainer, verb)(given, ckpt_path=ckpt_path, **quiet)
        used = (given or model).weights_in_evaluation[-1]
        assert torch.equal(used, expected), (given is fresh, ckpt_path)


# --- stock checkpoints -----------------------------------------------------------------------------------------------


def test_a_stock_checkpoint_file_loads_through_the_plugin(cls, make_trainer):
    first = run(make_trainer, cls.Tiny(), max_epochs=2, plugin=None)
    path = Path(first.checkpoint_callback.best_model_path)
    assert path.is_file()
    expected = state_of(run(make_trainer, cls.Tiny(seed=2), max_epochs=3, plugin=None, ckpt_path=path))

    model = cls.Tiny(seed=3)
    resumed = run(make_trainer, model, max_epochs=3, ckpt_path=path)
    assert model.trained_steps == [8, 9, 10, 11]
    assert difference(state_of(resumed), expected) is None
    assert Path(resumed.checkpoint_callback.best_model_path).is_dir()

    validated = cls.Tiny(seed=4)
    make_trainer().validate(validated, ckpt_path=path, verbose=False)
    assert difference(dict(validated.state_dict()), dict(first.lightning_module.state_dict())) is None


def test_saving_over_a_stock_file_replaces_it(cls, make_trainer, tmp_path):
    run(make_trainer, cls.Tiny(), max_epochs=1, plugin=None).save_checkpoint(tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").is_file()

    trainer = run(make_trainer, cls.Tiny(), max_epochs=2)
    trainer.save_checkpoint(tmp_path / "a.ckpt")

    assert Snapshot(tmp_path / "a.ckpt").read_object("0/global_step") == 8
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("target", ["file", "snapshot", "nothing"])
def test_saving_over_a_link_replaces_the_link_only(cls, make_trainer, tmp_path, target):
    if target != "nothing":
        plugin = None if target == "file" else SnapshotCheckpointIO()
        run(make_trainer, cls.Tiny(), max_epochs=1, plugin=plugin).save_checkpoint(tmp_path / "target.ckpt")
    (tmp_path / "link.ckpt").symlink_to("target.ckpt")

    trainer = run(make_trainer, cls.Tiny(), max_epochs=2)
    trainer.save_checkpoint(tmp_path / "link.ckpt")

    assert not (tmp_path / "link.ckpt").is_symlink()
    assert SnapshotCheckpointIO().load_checkpoint(tmp_path / "link.ckpt")["global_step"] == 8
    assert (tmp_path / "target.ckpt").exists() == (target != "nothing")
    if target != "nothing":
        assert SnapshotCheckpointIO().load_checkpoint(tmp_path / "target.ckpt")["global_step"] == 4


# --- save_checkpoint -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("kind", ["str", "Path", "relative", "no suffix", "slash", "file URL", "nested"])
def test_save_checkpoint_after_fit_is_there_when_it_returns(cls, make_trainer, tmp_path, kind, weights_only):
    place = {
        "str": str(tmp_path / "a.ckpt"),
        "Path": tmp_path / "a.ckpt",
        "relative": "a.ckpt",
        "no suffix": tmp_path / "a",
        "slash": f"{tmp_path}/a.ckpt/",
        "file URL": f"file://{tmp_path}/a.ckpt",
        "nested": tmp_path / "b" / "c" / "a.ckpt",
    }[kind]
    on_disk = {"relative": Path.cwd() / "a.ckpt", "no suffix": tmp_path / "a", "nested": place}
    trainer = run(make_trainer, cls.Tiny(), max_epochs=1, enable_checkpointing=False)

    trainer.save_checkpoint(place, weights_only=weights_only)

    assert on_disk.get(kind, tmp_path / "a.ckpt").is_dir()
    model = cls.Tiny(seed=2)
    make_trainer().validate(model, ckpt_path=place, verbose=False)
    assert difference(dict(model.state_dict()), dict(trainer.lightning_module.state_dict())) is None
    assert ("optimizer_states" in SnapshotCheckpointIO().load_checkpoint(place)) == (not weights_only)


def test_save_checkpoint_passes_storage_options_to_the_storage(cls, make_trainer, tmp_path):
    trainer = run(make_trainer, cls.Tiny(), max_epochs=1, enable_checkpointing=False)
    trainer.save_checkpoint(tmp_path / "a.ckpt", storage_options={"auto_mkdir": True})
    assert Snapshot(tmp_path / "a.ckpt").read_object("0/global_step") == 4
    with pytest.raises(
        UnsupportedFeatureError, match=r"b\.ckpt: a local disk takes no storage options .*found \['token'\]"
    ):
        trainer.save_checkpoint(tmp_path / "b.ckpt", storage_options={"token": "x"})


# --- the same plugin and Trainer again -------------------------------------------------------------------------------


def test_a_second_fit_and_evaluations_around_it_start_clean(namespace, cls, make_trainer, tmp_path):
    def fit_twice(plugin, folder):
        checkpoint = namespace.pl.callbacks.ModelCheckpoint(folder, save_top_k=-1)
        trainer = make_trainer(plugin=plugin, max_epochs=1, callbacks=[checkpoint])
        model = cls.Tiny()
        trainer.fit(model)
        trainer.validate(model, ckpt_path=checkpoint.best_model_path, verbose=False)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model)
        trainer.validate(model, ckpt_path=checkpoint.best_model_path, verbose=False)
        assert model.trained_steps == list(range(8))
        return state_of(trainer), sorted(os.listdir(folder))

    plugin = SnapshotCheckpointIO()
    state, kept = fit_twice(plugin, tmp_path / "snapshots")
    assert kept == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt"]
    assert difference((state, kept), fit_twice(None, tmp_path / "files")) is None
    assert difference((state, kept), fit_twice(plugin, tmp_path / "again")) is None


def test_after_a_failed_run_the_same_plugin_works(namespace, cls, make_trainer, tmp_path):
    plugin = SnapshotCheckpointIO()

    class Fails(namespace.pl.Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == 6:
                raise ArithmeticError

    checkpoint = namespace.pl.callbacks.ModelCheckpoint(tmp_path / "kept")
    with pytest.raises(ArithmeticError):
        run(make_trainer, cls.Tiny(), plugin=plugin, max_epochs=3, callbacks=[Fails(), checkpoint])
    expected = state_of(run(make_trainer, cls.Tiny(), max_epochs=3, enable_checkpointing=False))

    resumed = run(make_trainer, cls.Tiny(seed=2), plugin=plugin, max_epochs=3, ckpt_path=checkpoint.best_model_path)

    assert difference(state_of(resumed), expected) is None


# --- hooks that edit what is loaded ----------------------------------------------------------------------------------


class RecordingIO(SnapshotCheckpointIO):
    """Remembers where the tensors lie that it has loaded."""

    def load_checkpoint(self, path, map_location=None, weights_only=None):
        checkpoint = super().load_checkpoint(path, map_location, weights_only)
        self.loaded = {name: tensor.data_ptr() for name, tensor in checkpoint["state_dict"].items()}
        return checkpoint


def _saved(make_trainer, model, path):
    trainer = run(make_trainer, model, max_epochs=1, enable_checkpointing=False)
    trainer.save_checkpoint(path)
    return trainer


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_the_checkpoint_is_read_into_the_model_itself(cls, make_trainer, tmp_path, verb):
    trainer = _saved(make_trainer, cls.Tiny(), tmp_path / "a.ckpt")
    plugin = RecordingIO()
    model = cls.Tiny(seed=2)
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}

    getattr(make_trainer(plugin=plugin, max_epochs=1), verb)(model, ckpt_path=tmp_path / "a.ckpt")

    assert plugin.loaded == before
    assert difference(dict(model.state_dict()), dict(trainer.lightning_module.state_dict())) is None


def test_a_load_after_the_restore_never_touches_the_model(namespace, cls, make_trainer, tmp_path):
    _saved(make_trainer, cls.Tiny(), tmp_path / "a.ckpt")

    class Peeks(namespace.pl.Callback):
        def on_train_start(self, trainer, pl_module):
            before = {name: tensor.clone() for name, tensor in pl_module.state_dict().items()}
            trainer.strategy.checkpoint_io.load_checkpoint(tmp_path / "a.ckpt")
            assert difference(dict(pl_module.state_dict()), before) is None
            trainer.should_stop = True

    run(make_trainer, cls.Tiny(seed=2), max_epochs=1, callbacks=[Peeks()], enable_checkpointing=False)


def test_a_module_may_swap_tensors_in_on_load_checkpoint(cls, make_trainer, tmp_path):
    first = _saved(make_trainer, cls.Tiny(hidden=8), tmp_path / "a.ckpt").lightning_module.state_dict()

    class Swaps(cls.Tiny):
        def on_load_checkpoint(self, checkpoint):
            state = checkpoint["state_dict"]
            state["net.0.bias"], state["net.1.weight"] = state["net.1.weight"], state["net.0.bias"]
            state["net.2.bias"].zero_()

    model = Swaps(hidden=8, seed=2)
    plugin = RecordingIO()
    make_trainer(plugin=plugin).validate(model, ckpt_path=tmp_path / "a.ckpt", verbose=False)

    expected = dict(first)
    expected["net.0.bias"], expected["net.1.weight"] = first["net.1.weight"], first["net.0.bias"]
    expected["net.2.bias"] = torch.zeros(2)
    assert difference(dict(model.state_dict()), expected) is None
    assert not set(plugin.loaded.values()) & {tensor.data_ptr() for tensor in model.state_dict().values()}


def test_what_a_callback_does_to_the_checkpoint_leaves_the_model_alone(namespace, cls, make_trainer, tmp_path):
    first = _saved(make_trainer, cls.Tiny(), tmp_path / "a.ckpt").lightning_module.state_dict()

    class Zeroes(namespace.pl.Callback):
        # Lightning calls this after it has loaded the model, so it must not change the model.
        def on_load_checkpoint(self, trainer, pl_module, checkpoint):
            for tensor in checkpoint["state_dict"].values():
                tensor.zero_()

    model = cls.Tiny(seed=2)
    make_trainer(callbacks=[Zeroes()]).validate(model, ckpt_path=tmp_path / "a.ckpt", verbose=False)

    assert difference(dict(model.state_dict()), dict(first)) is None


def test_a_module_may_keep_a_fresh_head(cls, make_trainer, tmp_path):
    first = _saved(make_trainer, cls.Tiny(), tmp_path / "a.ckpt").lightning_module.state_dict()

    class FreshHead(cls.Tiny):
        def on_load_checkpoint(self, checkpoint):
            checkpoint["state_dict"]["net.2.weight"] = self.state_dict()["net.2.weight"]

    model = FreshHead(seed=2)
    head = model.net[2].weight.detach().clone()
    make_trainer().validate(model, ckpt_path=tmp_path / "a.ckpt", verbose=False)

    assert torch.equal(model.net[2].weight, head)
    assert torch.equal(model.net[0].weight, first["net.0.weight"])


def test_a_module_may_replace_load_state_dict(cls, make_trainer, tmp_path):
    first = _saved(make_trainer, cls.Tiny(), tmp_path / "a.ckpt").lightning_module.state_dict()

    class Averages(cls.Tiny):
        def load_state_dict(self, state_dict, strict=True, assign=False):
            mean = {name: (tensor + self.state_dict()[name]) / 2 for name, tensor in state_dict.items()}
            return super().load_state_dict(mean, strict=strict)

    model = Averages(seed=2)
    own = model.net[0].weight.detach().clone()
    make_trainer().validate(model, ckpt_path=tmp_path / "a.ckpt", verbose=False)

    assert torch.equal(model.net[0].weight, (first["net.0.weight"] + own) / 2)


def test_a_different_shape_is_the_same_error_as_with_files(cls, make_trainer, tmp_path):
    _saved(make_trainer, cls.Tiny(), tmp_path / "a.ckpt")

    with pytest.raises(RuntimeError, match=r"size mismatch for net\.0\.weight: .*\[4, 8\].*\[5, 8\]"):
        make_trainer().validate(cls.Tiny(hidden=5), ckpt_path=tmp_path / "a.ckpt", verbose=False)


def test_not_strict_loading_takes_what_fits(cls, make_trainer, tmp_path):
    first = _saved(make_trainer, cls.Tiny(), tmp_path / "a.ckpt").lightning_module.state_dict()

    class Grown(cls.Tiny):
        def __init__(self, seed):
            super().__init__(seed=seed)
            self.extra = nn.Linear(1, 1)
            self.strict_loading = False

    model = Grown(seed=2)
    extra = model.extra.weight.detach().clone()
    make_trainer().validate(model, ckpt_path=tmp_path / "a.ckpt", verbose=False)

    assert torch.equal(model.net[0].weight, first["net.0.weight"])
    assert torch.equal(model.extra.weight, extra)


# --- data modules ----------------------------------------------------------------------------------------------------


def test_the_state_of_a_data_module_is_resumed(cls, make_trainer, tmp_path):
    data = cls.Data()
    trainer = make_trainer(max_epochs=1, enable_checkpointing=False)
    trainer.fit(cls.Tiny(), datamodule=data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")

    resumed = cls.Data()
    make_trainer(max_epochs=1, enable_checkpointing=False).fit(
        cls.Tiny(seed=2), datamodule=resumed, ckpt_path=tmp_path / "a.ckpt"
    )

    assert data.epochs_seen == 1
    assert difference(resumed.position, torch.tensor([3, 1])) is None


def test_a_checkpoint_that_user_code_loads_before_the_restore_does_not_touch_the_model(namespace, tmp_path) -> None:
    plugin = SnapshotCheckpointIO()
    plugin.save_checkpoint({"state_dict": {"weight": torch.full((3, 3), 7.0)}}, tmp_path / "teacher.ckpt")

    class Student(namespace.pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(3, 3))

        def configure_model(self) -> None:
            # Runs after the set-up of all callbacks, ours included.
            self.teacher = self.trainer.strategy.checkpoint_io.load_checkpoint(tmp_path / "teacher.ckpt")

        def training_step(self, batch, batch_idx):
            return self.weight.sum() * 0

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    student = Student()
    trainer = namespace.pl.Trainer(
        max_steps=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
        plugins=[plugin],
    )
    trainer.fit(student, torch.utils.data.DataLoader(torch.zeros(2, 1)))

    assert not student.weight.any()
    assert torch.equal(student.teacher["state_dict"]["weight"], torch.full((3, 3), 7.0))
