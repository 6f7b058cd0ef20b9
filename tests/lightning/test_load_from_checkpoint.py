"""``load_from_checkpoint`` on snapshots: with our function, and with Lightning's own after `enable`."""

import io
from pathlib import Path

import pytest
import torch

import lightning_snapshot
from lightning_snapshot import disable, enable, load_from_checkpoint
from lightning_snapshot.errors import SnapshotNotFoundError
from tests.lightning.models import difference, models


@pytest.fixture(params=["function", "enable"])
def load(request):
    """Both ways to load; ``load(cls, path, ...)``."""
    if request.param == "function":
        yield load_from_checkpoint
        return
    enable()
    yield lambda cls, path, **arguments: cls.load_from_checkpoint(path, **arguments)
    disable()


@pytest.fixture
def saved(cls, make_trainer, tmp_path):
    """A trained model and a data module, and the path of their snapshot."""
    model, path = cls.Tiny(hidden=6), tmp_path / "a.ckpt"
    trainer = make_trainer(max_epochs=1, enable_checkpointing=False)
    trainer.fit(model, datamodule=cls.Data(batch_size=2))
    trainer.save_checkpoint(path)
    return model, path


def test_module_with_its_hyperparameters(cls, load, saved):
    model, path = saved
    for form in (path, str(path), f"file://{path}"):
        loaded = load(cls.Tiny, form)
        assert loaded.hparams == {"hidden": 6, "scores": (), "seed": 1}
        assert difference(dict(loaded.state_dict()), dict(model.state_dict())) is None


def test_arguments_replace_stored_hyperparameters(cls, load, saved):
    loaded = load(cls.Tiny, saved[1], scores=(1.0, 2.0))
    assert loaded.hparams == {"hidden": 6, "scores": (1.0, 2.0), "seed": 1}


def test_hyperparameters_from_a_file(cls, load, saved, tmp_path):
    (tmp_path / "hparams.yaml").write_text("hidden: 6\nseed: 9\n")
    assert load(cls.Tiny, saved[1], hparams_file=tmp_path / "hparams.yaml").hparams.seed == 9


@pytest.mark.filterwarnings("ignore:Found keys that are in the model state dict:UserWarning")
def test_strict_and_not(cls, load, saved):
    class Grown(cls.Tiny):
        def __init__(self, hidden=4, scores=(), seed=1):
            super().__init__(hidden, scores, seed)
            self.extra = torch.nn.Linear(1, 1)

    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "extra\.weight"'):
        load(Grown, saved[1])
    assert torch.equal(load(Grown, saved[1], strict=False).net[0].weight, saved[0].net[0].weight)


@pytest.mark.parametrize(
    "map_location",
    ["cpu", torch.device("cpu"), {"cuda:0": "cpu"}, lambda storage, location: storage, lambda storage, location: None],
    ids=["name", "device", "mapping", "function", "function that leaves it"],
)
def test_map_location(cls, load, saved, map_location):
    loaded = load(cls.Tiny, saved[1], map_location=map_location)
    assert difference(dict(loaded.state_dict()), dict(saved[0].state_dict())) is None


def test_data_module(cls, load, saved):
    loaded = load(cls.Data, saved[1])
    assert loaded.hparams == {"batch_size": 2}
    assert loaded.epochs_seen == 1
    assert load(cls.Data, saved[1], batch_size=3).hparams == {"batch_size": 3}


def test_stock_file(cls, load, make_trainer, tmp_path):
    trainer = make_trainer(plugin=None, max_epochs=1, enable_checkpointing=False)
    model = cls.Tiny()
    trainer.fit(model)
    trainer.save_checkpoint(tmp_path / "stock.ckpt")
    for form in (tmp_path / "stock.ckpt", str(tmp_path / "stock.ckpt")):
        assert difference(dict(load(cls.Tiny, form).state_dict()), dict(model.state_dict())) is None
    with io.BytesIO((tmp_path / "stock.ckpt").read_bytes()) as file:
        assert difference(dict(load(cls.Tiny, file).state_dict()), dict(model.state_dict())) is None


def test_missing_path(cls, load, tmp_path):
    with pytest.raises(SnapshotNotFoundError, match=r"nowhere\.ckpt: expected a snapshot, found nothing"):
        load(cls.Tiny, tmp_path / "nowhere.ckpt")


def test_other_urls_go_to_lightning(cls, load):
    with pytest.raises(FileNotFoundError, match=r"a\.ckpt"):
        load(cls.Tiny, "memory://nowhere/a.ckpt")


def test_without_enable_lightning_reads_files_only(cls, saved):
    with pytest.raises(IsADirectoryError):
        cls.Tiny.load_from_checkpoint(saved[1])


def test_disable_takes_enable_back_and_both_can_be_repeated(saved):
    disable()
    enable()
    enable(trusted=True)
    for name in ("lightning", "pytorch_lightning"):
        models(name).Tiny.load_from_checkpoint(saved[1])
    disable()
    disable()
    for name in ("lightning", "pytorch_lightning"):
        with pytest.raises(IsADirectoryError):
            models(name).Tiny.load_from_checkpoint(saved[1])


def test_the_function_leaves_enable_as_it_was(cls, saved):
    load_from_checkpoint(cls.Tiny, saved[1])
    with pytest.raises(IsADirectoryError):
        cls.Tiny.load_from_checkpoint(saved[1])
    enable()
    try:
        load_from_checkpoint(cls.Tiny, saved[1])
        cls.Tiny.load_from_checkpoint(saved[1])
    finally:
        disable()


def test_a_snapshot_of_one_distribution_loads_in_the_other(namespace, saved):
    other = models({"lightning": "pytorch_lightning", "pytorch_lightning": "lightning"}[namespace.name])
    loaded = lightning_snapshot.load_from_checkpoint(other.Tiny, Path(saved[1]))
    assert difference(dict(loaded.state_dict()), dict(saved[0].state_dict())) is None
