"""``LightningCLI``: plugin and callback from flags and files, hyperparameters from a snapshot."""

from importlib import import_module

import pytest
import yaml

import lightning_snapshot
from lightning_snapshot import Snapshot, SnapshotCallback, SnapshotCheckpointIO, disable, enable
from lightning_snapshot.integration.loading import SnapshotCLIMixin

pytest.importorskip("jsonargparse")


@pytest.fixture
def cli_class(namespace):
    return import_module(f"{namespace.pl.__name__}.cli").LightningCLI


@pytest.fixture
def run(cli_class, cls, tmp_path):
    """Run a command line; returns the CLI."""

    def run(*arguments, mixin=None, model=cls.Tiny, subclasses=False):
        kind = type("CLI", (mixin, cli_class), {}) if mixin else cli_class
        common = {
            "accelerator": "cpu",
            "devices": 1,
            "default_root_dir": str(tmp_path),
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "logger": False,
            "max_epochs": 1,
        }
        return kind(
            model,
            args=list(arguments),
            save_config_callback=None,
            seed_everything_default=False,
            subclass_mode_model=subclasses,
            trainer_defaults=common,
        )

    return run


def assert_in_use(cli, tmp_path):
    assert type(cli.trainer.strategy.checkpoint_io) is SnapshotCheckpointIO
    assert any(isinstance(callback, SnapshotCallback) for callback in cli.trainer.callbacks)
    assert Snapshot(tmp_path / "checkpoints" / "epoch=0-step=4.ckpt").read_object("0/global_step") == 4


def test_flags(run, tmp_path):
    cli = run(
        "fit",
        "--trainer.plugins=lightning_snapshot.SnapshotCheckpointIO",
        "--trainer.plugins.init_args.verify=false",
        "--trainer.callbacks=lightning_snapshot.SnapshotCallback",
    )
    assert_in_use(cli, tmp_path)


def test_yaml(run, tmp_path):
    config = {
        "trainer": {
            "plugins": [{"class_path": "lightning_snapshot.SnapshotCheckpointIO", "init_args": {"trusted": True}}],
            "callbacks": [{"class_path": "lightning_snapshot.SnapshotCallback"}],
        }
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert_in_use(run("fit", f"--config={tmp_path / 'config.yaml'}"), tmp_path)


@pytest.fixture(params=["enable", "mixin"])
def way(request, cli_class):
    """The two ways to let ``--ckpt_path`` restore hyperparameters."""
    if not hasattr(cli_class, "_parse_ckpt_path"):
        pytest.skip("this Lightning takes no hyperparameters from checkpoints")
    if request.param == "mixin":
        yield {"mixin": SnapshotCLIMixin}
        return
    enable()
    yield {}
    disable()


PLUGIN = "--trainer.plugins=lightning_snapshot.SnapshotCheckpointIO"


def test_hyperparameters_come_from_the_snapshot(run, tmp_path, way):
    run("fit", PLUGIN, "--model.hidden=7", "--model.scores=[1.0]")
    path = tmp_path / "checkpoints" / "epoch=0-step=4.ckpt"

    cli = run("validate", PLUGIN, f"--ckpt_path={path}", **way)

    assert cli.model.hparams.hidden == 7
    assert list(cli.model.hparams.scores) == [1.0]


def test_hyperparameters_with_a_class_path(run, cls, tmp_path, way):
    name = f"{cls.Tiny.__module__}.{cls.Tiny.__name__}"
    run("fit", PLUGIN, f"--model={name}", "--model.hidden=7", subclasses=True)
    path = tmp_path / "checkpoints" / "epoch=0-step=4.ckpt"

    cli = run("validate", PLUGIN, f"--model={name}", f"--ckpt_path={path}", subclasses=True, **way)

    assert type(cli.model) is cls.Tiny
    assert cli.model.hparams.hidden == 7


def test_hyperparameters_still_come_from_a_stock_file(run, tmp_path, way):
    run("fit", "--model.hidden=7")
    path = tmp_path / "checkpoints" / "epoch=0-step=4.ckpt"
    assert path.is_file()

    assert run("validate", PLUGIN, f"--ckpt_path={path}", **way).model.hparams.hidden == 7


def test_a_snapshot_without_hyperparameters_validates(namespace, run, tmp_path, way):
    class Bare(namespace.pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = import_module("torch").nn.Linear(8, 2)

        def validation_step(self, batch, batch_idx):
            self.layer(batch[0])

        def val_dataloader(self):
            return import_module("tests.lightning.models").loader()

    trainer = run("validate", PLUGIN, model=Bare).trainer
    trainer.save_checkpoint(tmp_path / "bare.ckpt")
    run("validate", PLUGIN, f"--ckpt_path={tmp_path / 'bare.ckpt'}", model=Bare, **way)


def test_a_missing_path_is_the_plugins_error(run, tmp_path, way):
    with pytest.raises(lightning_snapshot.SnapshotError, match=r"nowhere\.ckpt"):
        run("validate", PLUGIN, f"--ckpt_path={tmp_path / 'nowhere.ckpt'}", **way)
