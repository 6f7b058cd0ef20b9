"""Other parts of Lightning that write, read or average checkpoints behave as with files."""

import os

import pytest
import torch

from lightning_snapshot import Snapshot, SnapshotCheckpointIO
from tests.lightning.models import difference, state_of


@pytest.fixture(params=["snapshots", "files"])
def plugin(request):
    """Runs a test with our plugin, and with Lightning's own to show that the test itself is right."""
    return SnapshotCheckpointIO() if request.param == "snapshots" else None


# --- tuners ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["learning rate", "batch size"])
@pytest.mark.parametrize("as_callback", [False, True], ids=["tuner", "callback"])
@pytest.mark.parametrize("plugin_arguments", [{}, {"async_save": True}], ids=["sync", "async"])
def test_finders_leave_nothing_behind(namespace, cls, make_trainer, tmp_path, kind, as_callback, plugin_arguments):
    at_start = []

    class Observes(namespace.pl.Callback):
        def on_train_start(self, trainer, pl_module):
            at_start.append((trainer.global_step, {n: t.clone() for n, t in pl_module.state_dict().items()}))
            trainer.should_stop = True

    model, data = cls.Tiny(), cls.Data(batch_size=2)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    callbacks, tuner = namespace.pl.callbacks, namespace.pl.tuner.Tuner
    rates = {"min_lr": 1e-4, "max_lr": 0.1, "early_stop_threshold": None}
    trials = {"max_trials": 2, "steps_per_trial": 1}
    finder = {
        "learning rate": lambda: callbacks.LearningRateFinder(**rates, num_training_steps=30, update_attr=True),
        "batch size": lambda: callbacks.BatchSizeFinder(**trials),
    }[kind]
    tune = {
        "learning rate": lambda trainer: tuner(trainer).lr_find(model, datamodule=data, num_training=30, **rates),
        "batch size": lambda trainer: tuner(trainer).scale_batch_size(model, datamodule=data, **trials),
    }[kind]

    trainer = make_trainer(
        max_epochs=10, callbacks=[*([finder()] if as_callback else []), Observes()], enable_checkpointing=False
    )
    if not as_callback:
        tune(trainer)
    trainer.fit(model, datamodule=data)

    assert (model.lr, data.hparams.batch_size) != (0.01, 2), "the finder must have run"
    assert difference(at_start[-1:], [(0, weights)]) is None
    assert os.listdir(tmp_path) == []


# --- averaging -------------------------------------------------------------------------------------------------------


def resumed_and_whole(namespace, cls, make_trainer, folder, plugin, make_callback):
    """A run of 4 epochs, and one that stops after 2 and goes on: their states, and the path of the checkpoint."""

    def fit(model, max_epochs, name="resumed", **arguments):
        checkpoint = namespace.pl.callbacks.ModelCheckpoint(folder / name, monitor="val_loss", save_top_k=-1)
        trainer = make_trainer(plugin=plugin, max_epochs=max_epochs, callbacks=[make_callback(), checkpoint])
        trainer.fit(model, **arguments)
        return state_of(trainer)

    whole = fit(cls.Tiny(), 4, "whole")
    fit(cls.Tiny(), 2)
    path = folder / "resumed" / "epoch=1-step=8.ckpt"
    checkpoint = SnapshotCheckpointIO(trusted=True).load_checkpoint(path)
    return fit(cls.Tiny(seed=2), 4, ckpt_path=path), whole, checkpoint


def test_stochastic_weight_averaging_resumes_as_with_files(namespace, cls, make_trainer, tmp_path):
    # Lightning does not keep the average in checkpoints, so the comparison is with its own.
    results = []
    # Trusted, because torch 2.6 keeps a function in the state of SWALR.
    for name, plugin in (("snapshots", SnapshotCheckpointIO(trusted=True)), ("files", None)):
        resumed, whole, _ = resumed_and_whole(
            namespace,
            cls,
            make_trainer,
            tmp_path / name,
            plugin,
            lambda: namespace.pl.callbacks.StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2),
        )
        results.append((resumed, whole))
    assert difference(results[0], results[1]) is None


@pytest.mark.parametrize("kind", ["WeightAveraging", "EMAWeightAveraging"])
def test_weight_averaging_resumes_exactly(namespace, cls, make_trainer, tmp_path, kind, plugin):
    averaging = getattr(namespace.pl.callbacks, kind, None)
    if averaging is None:
        pytest.skip(f"this Lightning has no {kind}")

    resumed, whole, checkpoint = resumed_and_whole(namespace, cls, make_trainer, tmp_path, plugin, averaging)

    assert difference(resumed, whole) is None
    assert set(checkpoint["current_model_state"]) == set(checkpoint["state_dict"])
    assert checkpoint["averaging_state"]["n_averaged"] > 0
    average, current = (checkpoint[key]["net.0.weight"] for key in ("state_dict", "current_model_state"))
    assert not torch.equal(average, current)


# --- Trainers that do not checkpoint ---------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{"fast_dev_run": True}, {"enable_checkpointing": False}, {"barebones": True}])
@pytest.mark.filterwarnings("ignore:.*barebones:UserWarning")
def test_without_checkpointing_nothing_is_written(cls, namespace, make_trainer, tmp_path, arguments):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    if "barebones" in arguments:
        trainer = namespace.pl.Trainer(
            accelerator="cpu", default_root_dir=tmp_path, max_epochs=1, plugins=[SnapshotCheckpointIO()], **arguments
        )
    else:
        trainer = make_trainer(max_epochs=1, **quiet, **arguments)
    model = cls.Tiny()
    model.log = lambda *_, **__: None  # a barebones Trainer warns about it

    trainer.fit(model)

    assert model.trained_steps
    assert os.listdir(tmp_path) == []
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert Snapshot(tmp_path / "a.ckpt").read_object("0/global_step") == len(model.trained_steps)


def test_a_sanity_check_before_the_resume_changes_nothing(cls, make_trainer):
    first = make_trainer(max_epochs=1)
    first.fit(cls.Tiny())
    model = cls.Tiny(seed=2)
    trainer = make_trainer(max_epochs=1, num_sanity_val_steps=2)
    trainer.fit(model, ckpt_path=first.checkpoint_callback.best_model_path)
    assert difference(state_of(trainer), state_of(first)) is None
