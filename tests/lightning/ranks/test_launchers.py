"""Processes that Lightning itself starts: ``ddp`` scripts, ``ddp_fork`` (the one of notebooks), ``ddp_spawn``."""

import json

import pytest
import torch

from lightning_snapshot import Snapshot, SnapshotCheckpointIO, attach
from tests.lightning.models import difference
from tests.lightning.ranks import fabrics

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("namespace", "strategy"),
    [("lightning", "ddp_fork"), ("pytorch_lightning", "ddp_fork"), ("lightning", "ddp_spawn")],  # to spawn takes long
    indirect=["namespace"],
)
def test_fork_and_spawn_give_the_weights_back(make_trainer, cls, namespace, strategy, tmp_path):
    plugin = SnapshotCheckpointIO()
    # A pool of threads and buffers that only the parent has.
    make_trainer(plugin=plugin, fast_dev_run=True).fit(cls.Tiny())
    plugin.save_checkpoint({"warm": torch.ones(10)}, tmp_path / "before.ckpt")

    checkpoint = namespace.pl.callbacks.ModelCheckpoint(tmp_path / "kept", save_last=True, save_top_k=0)
    trainer = make_trainer(
        plugin=plugin, callbacks=[checkpoint], devices=2, max_epochs=1, strategy=strategy, limit_val_batches=0
    )
    model = cls.Tiny()
    trainer.fit(model)

    snapshot = Snapshot(tmp_path / "kept" / "last.ckpt")
    assert snapshot.metadata.world_size == 2
    assert snapshot.read_object("0/global_step") == 2
    assert difference(dict(snapshot.get_state_dict_for_key("state_dict")), dict(model.state_dict())) is None


@pytest.mark.parametrize(
    ("namespace", "strategy"),
    [("lightning", "ddp_fork"), ("pytorch_lightning", "ddp_fork"), ("pytorch_lightning", "ddp_spawn")],
    indirect=["namespace"],
)
def test_ranks_that_fabric_starts_save_together(namespace, strategy, tmp_path):
    fabric = namespace.fabric.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    plugin = attach(fabric)
    plugin.save_checkpoint({"warm": torch.ones(10)}, tmp_path / "before.ckpt")

    fabric.launch(fabrics.save_and_load, tmp_path / "a.ckpt")

    manifest = Snapshot(tmp_path / "a.ckpt").get_manifest()
    assert [path for path in manifest if path.startswith("1/")] == ["1/mine"]
    assert {manifest[f"0/model/{name}"].replicated for name in ("weight", "bias")} == {True}


@pytest.mark.parametrize("namespace", ["pytorch_lightning"], indirect=True)  # starts take long
def test_a_script_with_ddp(run_program, tmp_path):
    run_program("two_ranks.py", tmp_path)

    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first["warnings"] == second["warnings"] == []
    assert first["resumed at"] == second["resumed at"] == 4
    assert first["bytes"] > second["bytes"] > 0
    final = torch.load(tmp_path / "final.pt", weights_only=True)
    found = SnapshotCheckpointIO().load_checkpoint(tmp_path / "kept" / "last.ckpt")
    assert found["global_step"] == final["step"] == 6
    assert difference(dict(found["state_dict"]), final["model"]) is None
    assert difference(found["optimizer_states"], final["optimizers"]) is None
