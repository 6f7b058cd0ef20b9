"""Objects among the hyperparameters: which load by themselves, and what is said about those that do not."""

import collections
import datetime
import enum
import pathlib
import pickle
from inspect import signature

import numpy as np
import pytest
from torch import nn

from lightning_snapshot import SnapshotCheckpointIO, load_from_checkpoint
from lightning_snapshot.errors import UnsafeObjectError, UnsupportedValueError
from tests.lightning.models import difference

pytestmark = pytest.mark.filterwarnings("ignore:Attribute 'value' is an instance of `nn.Module`:UserWarning")


class Colour(enum.Enum):
    RED = 1


class Hostile:
    """Runs code when it is unpickled."""

    ran = False

    def __reduce__(self):
        return setattr, (Hostile, "ran", True)

    def __deepcopy__(self, memo):  # Lightning copies hyperparameters
        return self


UNSAFE = {
    "module": (nn.MSELoss(), r"torch\.nn\.modules\.loss\.MSELoss"),
    "enum": (Colour.RED, r"tests\.lightning\.test_trust\.Colour"),
    "hostile": (Hostile(), r"builtins\.setattr"),
}
PLAIN = {
    "path": pathlib.Path("data/set"),
    "numpy float": np.float64(0.1),
    "numpy array": np.arange(3),
    "defaultdict": collections.defaultdict(list, a=[1]),
    "timedelta": datetime.timedelta(seconds=3),
    "nested": {"a": [(1, None), {2: "b"}], 3: {"c"}},
}


def weights_only_arguments(namespace):
    """The values of ``weights_only`` that this Lightning can pass; before 2.6 there is no such argument."""
    known = "weights_only" in signature(namespace.pl.Trainer.fit).parameters
    return [{}, *({"weights_only": value} for value in (None, True) if known)], known


@pytest.fixture
def save(cls, make_trainer, tmp_path):
    def save(value):
        trainer = make_trainer(max_epochs=1, enable_checkpointing=False)
        trainer.fit(cls.WithHyperparameter(value))
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        return tmp_path / "a.ckpt"

    return save


@pytest.mark.parametrize("kind", UNSAFE)
def test_what_needs_code_fails_clearly_unless_trusted(namespace, cls, make_trainer, save, kind):
    value, name = UNSAFE[kind]
    path = save(value)
    strict, known = weights_only_arguments(namespace)
    message = rf"0/hyper_parameters/value: .*{name}, .*weights_only=False .*trusted=True"

    for arguments in strict:
        with pytest.raises(UnsafeObjectError, match=message):
            make_trainer(max_epochs=1).fit(cls.WithHyperparameter(value), ckpt_path=path, **arguments)
        with pytest.raises(pickle.UnpicklingError, match=message):
            load_from_checkpoint(cls.WithHyperparameter, path, **arguments)
    assert not Hostile.ran

    trusting = make_trainer(plugin=SnapshotCheckpointIO(trusted=True), max_epochs=2, enable_checkpointing=False)
    model = cls.WithHyperparameter(value)
    trusting.fit(model, ckpt_path=path)
    assert model.trained_steps == [4, 5, 6, 7]
    loaded = [load_from_checkpoint(cls.WithHyperparameter, path, trusted=True)]
    if known:
        make_trainer(max_epochs=1, enable_checkpointing=False).fit(
            cls.WithHyperparameter(value), ckpt_path=path, weights_only=False
        )
        loaded.append(load_from_checkpoint(cls.WithHyperparameter, path, weights_only=False))
    if kind != "hostile":
        assert [type(each.hparams.value) for each in loaded] == [type(value)] * len(loaded)


@pytest.fixture(autouse=True)
def _hostile_has_not_run():
    yield
    Hostile.ran = False


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_data_loads_under_any_setting(namespace, cls, make_trainer, save, kind):
    path = save(PLAIN[kind])

    for arguments in weights_only_arguments(namespace)[0]:
        model = cls.WithHyperparameter(PLAIN[kind])
        make_trainer(max_epochs=2, enable_checkpointing=False).fit(model, ckpt_path=path, **arguments)
        assert model.trained_steps == [4, 5, 6, 7]
        loaded = load_from_checkpoint(cls.WithHyperparameter, path, **arguments)
        assert difference(loaded.hparams.value, PLAIN[kind]) is None


def test_omegaconf_hyperparameters_need_trust(cls, make_trainer, save):
    omegaconf = pytest.importorskip("omegaconf")
    path = save(omegaconf.OmegaConf.create({"a": [1, 2]}))

    with pytest.raises(UnsafeObjectError, match=r"0/hyper_parameters.*omegaconf"):
        make_trainer().validate(cls.Tiny(), ckpt_path=path)
    loaded = load_from_checkpoint(cls.WithHyperparameter, path, trusted=True)
    assert omegaconf.OmegaConf.to_container(loaded.hparams.value) == {"a": [1, 2]}


@pytest.mark.parametrize("kind", ["lambda", "open file"])
def test_what_cannot_be_stored_is_named_and_nothing_is_written(cls, make_trainer, tmp_path, kind):
    with (tmp_path / "file").open("w") as file:
        model = cls.Tiny()
        model.on_save_checkpoint = lambda checkpoint: checkpoint.update(
            mine={"deep": [0, {"lambda": lambda: 1, "open file": file}[kind]]}
        )
        trainer = make_trainer(max_epochs=1, enable_checkpointing=False)
        trainer.fit(model)
        with pytest.raises(UnsupportedValueError, match="mine/deep/1"):
            trainer.save_checkpoint(tmp_path / "folder" / "a.ckpt")
    assert not (tmp_path / "folder").exists()


def test_the_weights_of_a_checkpoint_with_an_unsafe_value_are_readable_one_by_one(save):
    from lightning_snapshot import Snapshot

    snapshot = Snapshot(save(nn.MSELoss()))
    assert snapshot.get_state_dict_for_key("state_dict")["net.0.weight"].shape == (4, 8)
    assert snapshot.get_state_dict_for_key("optimizer_states")[0]["state"][0]["step"] == 4
    assert snapshot.read_object("0/global_step") == 4


def test_a_stock_file_with_an_unsafe_value_fails_clearly_unless_trusted(cls, make_trainer, tmp_path):
    trainer = make_trainer(plugin=None, max_epochs=1, enable_checkpointing=False)
    trainer.fit(cls.WithHyperparameter(nn.MSELoss()))
    trainer.save_checkpoint(tmp_path / "stock.ckpt")

    with pytest.raises(UnsafeObjectError, match=r"stock\.ckpt: .*MSELoss.*weights_only=False.*trusted=True"):
        SnapshotCheckpointIO().load_checkpoint(tmp_path / "stock.ckpt", weights_only=True)
    checkpoint = SnapshotCheckpointIO(trusted=True).load_checkpoint(tmp_path / "stock.ckpt")
    assert isinstance(checkpoint["hyper_parameters"]["value"], nn.MSELoss)
