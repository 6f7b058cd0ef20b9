"""`ModelCheckpoint` writes, replaces, links and removes snapshots as it does with files."""

import os
from datetime import timedelta
from inspect import signature
from pathlib import Path

import pytest

from lightning_snapshot import Snapshot
from tests.lightning.models import STEPS_PER_EPOCH, difference, state_of


@pytest.fixture(params=[{}, {"async_save": True}, {"overlap": True}], ids=["sync", "async", "overlap"])
def plugin_arguments(request):
    """Whatever goes on behind training, all of this must come out the same."""
    return request.param


SCORES = (3.0, 1.0, 2.0, 5.0, 4.0)


def names(folder: Path) -> list[str]:
    """What is in a folder, hidden leftovers of saves included."""
    return sorted(os.listdir(folder))


def step_of(path: Path) -> int:
    return Snapshot(path).read_object("0/global_step")


def assert_complete(path: Path) -> None:
    state = {key: Snapshot(path).get_state_dict_for_key(key) for key in ("state_dict", "optimizer_states", "loops")}
    assert state["state_dict"]["net.0.weight"].isfinite().all()
    assert len(state["optimizer_states"][0]["state"]) == 6


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"save_top_k": 1}, ["epoch=4-step=20.ckpt"]),
        ({"save_top_k": -1}, [f"epoch={epoch}-step={epoch * 4 + 4}.ckpt" for epoch in range(5)]),
        (
            {"save_top_k": 3, "monitor": "score"},
            ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt"],
        ),
    ],
    ids=["latest", "all", "best-3"],
)
def test_top_k_keeps_exactly_those_snapshots(namespace, cls, make_trainer, tmp_path, arguments, expected):
    checkpoint = namespace.pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "kept", **arguments)
    trainer = make_trainer(max_epochs=5, callbacks=[checkpoint])

    trainer.fit(cls.Tiny(scores=SCORES))

    assert names(tmp_path / "kept") == expected
    for name in expected:
        assert (tmp_path / "kept" / name).is_dir()
        assert_complete(tmp_path / "kept" / name)
        assert step_of(tmp_path / "kept" / name) == int(name.removesuffix(".ckpt").split("step=")[1])


@pytest.mark.parametrize("save_last", [True, "link"])
def test_last_alone_is_one_snapshot(namespace, cls, make_trainer, tmp_path, save_last):
    checkpoint = namespace.pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "kept", save_top_k=0, save_last=save_last)
    trainer = make_trainer(max_epochs=3, callbacks=[checkpoint])

    trainer.fit(cls.Tiny())

    assert names(tmp_path / "kept") == ["last.ckpt"]
    assert (tmp_path / "kept" / "last.ckpt").is_dir()
    assert not (tmp_path / "kept" / "last.ckpt").is_symlink()
    assert step_of(tmp_path / "kept" / "last.ckpt") == 3 * STEPS_PER_EPOCH


def test_last_is_replaced_at_each_save_and_always_loads(namespace, cls, make_trainer, tmp_path):
    last = tmp_path / "kept" / "last.ckpt"
    seen = []

    class ReadsLast(namespace.pl.Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step:
                trainer.strategy.checkpoint_io.wait()
                assert_complete(last)
                seen.append((step_of(last), trainer.global_step))

    checkpoint = namespace.pl.callbacks.ModelCheckpoint(
        dirpath=tmp_path / "kept", save_top_k=1, save_last=True, every_n_train_steps=1
    )
    trainer = make_trainer(max_epochs=2, callbacks=[ReadsLast(), checkpoint])

    trainer.fit(cls.Tiny())

    assert seen == [(step, step) for step in range(1, 2 * STEPS_PER_EPOCH)]
    assert step_of(last) == 2 * STEPS_PER_EPOCH
    assert len(list((last / ".data").iterdir())) == 1, "data of replaced saves must be gone"


def test_linked_last_is_relative_and_resumes(namespace, cls, make_trainer, tmp_path):
    checkpoint = namespace.pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "kept", save_top_k=-1, save_last="link")
    trainer = make_trainer(max_epochs=2, callbacks=[checkpoint])
    trainer.fit(cls.Tiny())
    last = tmp_path / "kept" / "last.ckpt"

    assert os.readlink(last) == "epoch=1-step=8.ckpt"

    model = cls.Tiny(seed=2)
    resumed = make_trainer(max_epochs=3)
    resumed.fit(model, ckpt_path=last)
    assert model.trained_steps == list(range(8, 12))


def test_old_links_are_removed_and_not_what_they_lead_to(namespace, cls, make_trainer, tmp_path):
    checkpoint = namespace.pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "kept", save_top_k=-1, save_last="link")
    checkpoint.CHECKPOINT_NAME_LAST = "{epoch}-last"
    trainer = make_trainer(max_epochs=3, callbacks=[checkpoint])

    trainer.fit(cls.Tiny())

    kept = [f"epoch={epoch}-step={4 * epoch + 4}.ckpt" for epoch in range(3)]
    assert names(tmp_path / "kept") == sorted([*kept, "epoch=2-last.ckpt"])
    assert os.readlink(tmp_path / "kept" / "epoch=2-last.ckpt") == kept[2]
    for name in kept:
        assert_complete(tmp_path / "kept" / name)


def test_saving_last_replaces_a_link_and_leaves_its_target_alone(namespace, cls, make_trainer, tmp_path):
    def fit(max_epochs, save_last, **arguments):
        checkpoint = namespace.pl.callbacks.ModelCheckpoint(
            dirpath=tmp_path / "kept", monitor="score", save_top_k=1, save_last=save_last
        )
        make_trainer(max_epochs=max_epochs, callbacks=[checkpoint]).fit(cls.Tiny(scores=SCORES), **arguments)

    fit(2, "link")
    best, last = tmp_path / "kept" / "epoch=1-step=8.ckpt", tmp_path / "kept" / "last.ckpt"
    assert last.is_symlink()
    before = {path: path.read_bytes() for path in best.rglob("*") if path.is_file()}

    fit(3, True, ckpt_path=best)

    assert not last.is_symlink()
    assert step_of(last) == 12
    assert names(tmp_path / "kept") == [best.name, last.name]
    assert {path: path.read_bytes() for path in best.rglob("*") if path.is_file()} == before


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended:UserWarning")
@pytest.mark.parametrize(
    "trigger", [{"every_n_train_steps": 3}, {"train_time_interval": timedelta(microseconds=1)}], ids=["steps", "time"]
)
def test_saves_within_an_epoch_are_resumed_there(namespace, cls, make_trainer, tmp_path, trigger):
    checkpoint = namespace.pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "kept", save_top_k=-1, **trigger)
    trainer = make_trainer(max_epochs=2, callbacks=[checkpoint])
    trainer.fit(cls.Tiny())

    steps = [3, 6] if "every_n_train_steps" in trigger else list(range(1, 9))
    assert sorted(map(step_of, (tmp_path / "kept").iterdir())) == steps

    model = cls.Tiny(seed=2)
    path = next(path for path in (tmp_path / "kept").iterdir() if step_of(path) == 6)
    checkpoint = namespace.pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "again", save_top_k=-1, **trigger)
    make_trainer(max_epochs=2, callbacks=[checkpoint]).fit(model, ckpt_path=path)
    # Lightning 2.4 runs one batch too many after a checkpoint within an epoch.
    assert model.trained_steps[:2] == [6, 7]


def test_weights_only_checkpoint_validates_but_does_not_resume(namespace, cls, make_trainer, tmp_path):
    checkpoint = namespace.pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "kept", save_weights_only=True)
    model = cls.Tiny()
    make_trainer(max_epochs=1, callbacks=[checkpoint]).fit(model)

    fresh = cls.Tiny(seed=2)
    make_trainer().validate(fresh, ckpt_path=checkpoint.best_model_path, verbose=False)
    assert difference(dict(fresh.state_dict()), dict(model.state_dict())) is None
    assert not [path for path in Snapshot(checkpoint.best_model_path).get_manifest() if "/optimizer_states" in path]
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        make_trainer(max_epochs=2).fit(cls.Tiny(), ckpt_path=checkpoint.best_model_path)


def test_a_constant_name_gets_a_version(namespace, cls, make_trainer, tmp_path):
    checkpoint = namespace.pl.callbacks.ModelCheckpoint(tmp_path / "kept", "m", monitor="score", save_top_k=-1)
    make_trainer(max_epochs=2, callbacks=[checkpoint]).fit(cls.Tiny(scores=SCORES))

    assert names(tmp_path / "kept") == ["m-v1.ckpt", "m.ckpt"]
    assert [step_of(tmp_path / "kept" / name) for name in names(tmp_path / "kept")] == [8, 4]


def test_metrics_and_slashes_in_names_make_nested_folders(namespace, cls, make_trainer, tmp_path):
    checkpoint = namespace.pl.callbacks.ModelCheckpoint(
        dirpath=tmp_path / "kept", filename="runs/a/{epoch:02d}-{score:.1f}", monitor="score", save_top_k=2
    )
    make_trainer(max_epochs=3, callbacks=[checkpoint]).fit(cls.Tiny(scores=SCORES))

    assert names(tmp_path / "kept") == ["runs"]
    assert names(tmp_path / "kept" / "runs" / "a") == ["epoch=01-score=1.0.ckpt", "epoch=02-score=2.0.ckpt"]
    assert step_of(Path(checkpoint.best_model_path)) == 8


def test_without_a_folder_snapshots_go_to_the_default_one(cls, make_trainer, tmp_path):
    make_trainer(max_epochs=1).fit(cls.Tiny())

    assert names(tmp_path / "checkpoints") == ["epoch=0-step=4.ckpt"]
    assert_complete(tmp_path / "checkpoints" / "epoch=0-step=4.ckpt")


def test_two_checkpoint_callbacks_keep_independent_sets(namespace, cls, make_trainer, tmp_path):
    def callbacks():
        make, folder = namespace.pl.callbacks.ModelCheckpoint, tmp_path / "kept"
        best = make(folder, filename="best-{epoch}", monitor="score", save_top_k=2)
        return [best, make(folder, filename="recent-{step}", every_n_train_steps=3, save_top_k=1)]

    trainer = make_trainer(max_epochs=4, callbacks=callbacks())
    trainer.fit(cls.Tiny(scores=SCORES))

    kept = ["best-epoch=1.ckpt", "best-epoch=2.ckpt", "recent-step=15.ckpt"]
    assert names(tmp_path / "kept") == kept

    resumed = make_trainer(max_epochs=4, callbacks=callbacks())
    resumed.fit(cls.Tiny(scores=SCORES), ckpt_path=tmp_path / "kept" / "best-epoch=2.ckpt")
    assert resumed.checkpoint_callbacks[0].best_model_path == str(tmp_path / "kept" / kept[0])
    assert difference(state_of(resumed), state_of(trainer)) is None


def test_save_on_exception_saves_and_raises_the_original_error(namespace, cls, make_trainer, tmp_path):
    if "save_on_exception" not in signature(namespace.pl.callbacks.ModelCheckpoint).parameters:
        pytest.skip("this Lightning has no save_on_exception")
    checkpoint = namespace.pl.callbacks.ModelCheckpoint(
        dirpath=tmp_path / "kept", save_on_exception=True, every_n_epochs=100
    )

    class Fails(namespace.pl.Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == 6:
                raise ArithmeticError("the loss exploded")

    with pytest.raises(ArithmeticError, match="the loss exploded"):
        make_trainer(max_epochs=3, callbacks=[Fails(), checkpoint]).fit(cls.Tiny())

    [path] = (tmp_path / "kept").iterdir()
    assert path.is_dir()
    assert step_of(path) == 6
    assert_complete(path)


@pytest.mark.filterwarnings("ignore:.*The last model of the previous `fit` call will be used:UserWarning")
def test_on_exception_checkpoint_is_picked_up_and_removed_at_the_end(namespace, cls, make_trainer, tmp_path):
    crashes = [True]

    class FailsOnce(namespace.pl.Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == 4 and crashes:
                crashes.clear()
                raise ArithmeticError

    def trainer():
        keeper = namespace.pl.callbacks.OnExceptionCheckpoint(tmp_path / "kept")
        return make_trainer(max_epochs=2, callbacks=[FailsOnce(), keeper])

    with pytest.raises(ArithmeticError), pytest.warns(UserWarning, match="no last checkpoint available"):
        trainer().fit(cls.Tiny())
    assert step_of(tmp_path / "kept" / "on_exception.ckpt") == 4

    model = cls.Tiny(seed=2)
    trainer().fit(model)

    assert model.trained_steps == [4, 5, 6, 7]
    assert names(tmp_path / "kept") == []


@pytest.mark.filterwarnings("ignore:.*The last model of the previous `fit` call will be used:UserWarning")
def test_on_exception_checkpoint_of_a_clean_run_removes_nothing(namespace, cls, make_trainer, tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "other").write_text("mine")
    keeper = namespace.pl.callbacks.OnExceptionCheckpoint(tmp_path / "kept")

    with pytest.warns(UserWarning, match="no last checkpoint available"):
        make_trainer(max_epochs=1, callbacks=[keeper]).fit(cls.Tiny())

    assert names(tmp_path / "kept") == ["other"]
