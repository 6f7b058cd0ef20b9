"""Fabric on one device: save, filter, overwrite, load, strict, load_raw."""

from pathlib import Path

import pytest
import torch

from lightning_snapshot import Snapshot, SnapshotCheckpointIO
from lightning_snapshot.errors import UnsafeObjectError
from tests.lightning.models import difference


def training(fabric, seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
    return {"model": model, "optimizer": optimizer, "step": 0}


def train(fabric, state, steps):
    generator = torch.Generator().manual_seed(state["step"])
    for _ in range(steps):
        state["optimizer"].zero_grad()
        fabric.backward(state["model"](torch.randn(4, 3, generator=generator)).square().mean())
        state["optimizer"].step()
        state["step"] += 1


def content(state):
    return {
        "model": {name: tensor.clone() for name, tensor in state["model"].state_dict().items()},
        "optimizer": state["optimizer"].state_dict(),
        "step": state["step"],
    }


@pytest.fixture
def fabric(make_fabric):
    return make_fabric()


def test_a_resumed_run_equals_an_uninterrupted_one(fabric, tmp_path):
    state = training(fabric, 1)
    train(fabric, state, 3)
    fabric.save(tmp_path / "a.ckpt", state)
    train(fabric, state, 3)

    resumed = training(fabric, 2)
    remainder = fabric.load(tmp_path / "a.ckpt", resumed)
    assert remainder == {}
    assert resumed["step"] == 3
    train(fabric, resumed, 3)

    assert (tmp_path / "a.ckpt").is_dir()
    assert difference(content(resumed), content(state)) is None


def test_load_without_a_state_returns_everything(fabric, tmp_path):
    state = training(fabric, 1)
    train(fabric, state, 1)
    fabric.save(str(tmp_path / "a.ckpt"), {**state, "extra": [1, {"a": None}]})

    found = fabric.load(tmp_path / "a.ckpt")

    assert list(found) == ["model", "optimizer", "step", "extra"]
    assert "0.weight" in found["model"], "keys must not say that Fabric has wrapped the module"
    assert difference(dict(found["model"]), dict(state["model"].state_dict())) is None
    assert found["extra"] == [1, {"a": None}]


def test_filter(fabric, tmp_path):
    state = training(fabric, 1)
    fabric.save(tmp_path / "a.ckpt", state, filter={"model": lambda name, value: name.startswith("2.")})

    assert list(fabric.load(tmp_path / "a.ckpt")["model"]) == ["2.weight", "2.bias"]
    assert not [path for path in Snapshot(tmp_path / "a.ckpt").get_manifest() if "0.weight" in path]


def test_overwrite(fabric, tmp_path):
    state = training(fabric, 1)
    for _ in range(3):
        train(fabric, state, 1)
        fabric.save(tmp_path / "a.ckpt", state)

    assert fabric.load(tmp_path / "a.ckpt")["step"] == 3
    assert len(list((tmp_path / "a.ckpt" / ".data").iterdir())) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_remainder_and_strict(fabric, tmp_path):
    state = training(fabric, 1)
    fabric.save(tmp_path / "a.ckpt", {**state, "epoch": 4})

    part = {"model": training(fabric, 2)["model"]}
    remainder = fabric.load(tmp_path / "a.ckpt", part)
    assert list(remainder) == ["optimizer", "step", "epoch"]
    assert difference(dict(part["model"].state_dict()), dict(state["model"].state_dict())) is None

    with pytest.raises(KeyError, match="missing"):
        fabric.load(tmp_path / "a.ckpt", {"missing": 1})
    lenient = {"missing": 1, "epoch": 0}
    fabric.load(tmp_path / "a.ckpt", lenient, strict=False)
    assert lenient == {"missing": 1, "epoch": 4}


def test_load_raw(fabric, tmp_path):
    state = training(fabric, 1)
    train(fabric, state, 2)
    plugin = SnapshotCheckpointIO()
    plugin.save_checkpoint(state["model"].state_dict(), tmp_path / "model.ckpt")
    plugin.save_checkpoint(state["optimizer"].state_dict(), tmp_path / "optimizer.ckpt")

    raw = training(fabric, 2)
    fabric.load_raw(tmp_path / "model.ckpt", raw["model"])
    fabric.load_raw(tmp_path / "optimizer.ckpt", raw["optimizer"])
    assert difference(content({**raw, "step": 2}), content(state)) is None

    bigger = fabric.setup(torch.nn.Sequential(*raw["model"].module, torch.nn.Linear(1, 1)))
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "3\.weight"'):
        fabric.load_raw(tmp_path / "model.ckpt", bigger)
    fabric.load_raw(tmp_path / "model.ckpt", bigger, strict=False)


def test_stock_files(namespace, fabric, tmp_path):
    stock = namespace.fabric.Fabric(accelerator="cpu", devices=1)
    state = training(stock, 1)
    train(stock, state, 2)
    stock.save(tmp_path / "a.ckpt", state)
    assert (tmp_path / "a.ckpt").is_file()

    loaded = training(fabric, 2)
    fabric.load(tmp_path / "a.ckpt", loaded)
    assert difference(content(loaded), content(state)) is None

    fabric.save(tmp_path / "a.ckpt", loaded)
    assert (tmp_path / "a.ckpt").is_dir()
    assert fabric.load(tmp_path / "a.ckpt")["step"] == 2


def test_trust(make_fabric, fabric, tmp_path):
    fabric.save(tmp_path / "a.ckpt", {"losses": [torch.nn.MSELoss()], "step": 1})

    with pytest.raises(UnsafeObjectError, match=r"0/losses/0: .*torch\.nn\.modules\.loss\.MSELoss"):
        fabric.load(tmp_path / "a.ckpt")
    assert isinstance(make_fabric(trusted=True).load(tmp_path / "a.ckpt")["losses"][0], torch.nn.MSELoss)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_compiled_module_loads_into_a_plain_one(fabric, tmp_path):
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    fabric.save(tmp_path / "a.ckpt", {"model": fabric.setup(torch.compile(model))})
    plain = fabric.setup(torch.nn.Linear(3, 2))
    fabric.load(tmp_path / "a.ckpt", {"model": plain})
    assert difference(dict(plain.state_dict()), dict(model.state_dict())) is None


def test_relative_path_and_launch(fabric):
    fabric.launch(lambda fabric: fabric.save("a.ckpt", {"step": 1}))
    assert Path("a.ckpt").is_dir()
    assert fabric.load("a.ckpt") == {"step": 1}
