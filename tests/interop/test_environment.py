"""The real torchsnapshot works here; without it the other tests of this folder would prove nothing."""

import pytest

pytestmark = pytest.mark.interop


def _take_and_restore(path: str) -> None:
    import torch
    import torchsnapshot

    def state() -> dict:
        tensors = {"float": torch.arange(12.0).reshape(3, 4), "half": torch.ones(5, dtype=torch.bfloat16)[:4]}
        return {"app": torchsnapshot.StateDict(**tensors, number=7, text="é", nested={"list": [1, {"deep": (2,)}]})}

    taken, restored = state(), state()
    for tensor in (restored["app"]["float"], restored["app"]["half"]):
        tensor.zero_()
    restored["app"].update(number=0, text="", nested={"list": [0, {"deep": (0,)}]})

    torchsnapshot.Snapshot.take(path, taken)
    snapshot = torchsnapshot.Snapshot(path)
    snapshot.restore(restored)

    assert torch.equal(restored["app"]["float"], taken["app"]["float"])
    assert torch.equal(restored["app"]["half"], taken["app"]["half"])
    for key in ("number", "text", "nested"):
        assert restored["app"][key] == taken["app"][key]
    assert torch.equal(snapshot.read_object("0/app/float"), taken["app"]["float"])
    print(torch.__version__, torchsnapshot.__file__)


def test_take_and_restore(torchsnapshot, tmp_path) -> None:
    import torch

    version, file = torchsnapshot.run(_take_and_restore, tmp_path / "snapshot").split()

    assert (tmp_path / "snapshot" / ".snapshot_metadata").is_file()
    assert version == torch.__version__
    assert file.startswith(str(torchsnapshot.target))


def test_programs_get_their_arguments_and_report_failure(torchsnapshot) -> None:
    assert torchsnapshot.run("import sys\nprint(sys.argv[1:])", 1, "a b") == "['1', 'a b']\n"
    with pytest.raises(pytest.fail.Exception, match="exit code 3:\nsaid so\n"):
        torchsnapshot.run("print('said so'); raise SystemExit(3)")
