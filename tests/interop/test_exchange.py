"""What we write, torchsnapshot reads; what it writes, we read. Live, with both of its releases."""

import sys
from pathlib import Path

import pytest
import torch

from lightning_snapshot import RNGState, Snapshot, StateDict

sys.path.insert(0, str(Path(__file__).parent))
import states

sys.path.pop(0)

pytestmark = pytest.mark.interop


def same(left, right) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return repr(left) == repr(right)


def _restore_with_torchsnapshot(path: str, out: str, here: str) -> None:
    import sys

    import torch
    import torchsnapshot

    sys.path.insert(0, here)
    import states

    module, optimizer = states.training(seed=1)
    rng = torchsnapshot.RNGState()
    values = torchsnapshot.StateDict(**dict.fromkeys(states.values()))
    snapshot = torchsnapshot.Snapshot(path)
    snapshot.restore({"module": module, "optimizer": optimizer, "values": values, "rng": rng})
    found = {
        "module": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "values": values.data,
        "random": torch.rand(3),
        "read": {
            key: snapshot.read_object(key) for key in ("0/module/0.weight", "0/values/dtypes/int16", "0/values/scalar")
        },
        "paths": sorted(snapshot.get_manifest()),
    }
    torch.save(found, out)


def test_torchsnapshot_reads_what_we_write(torchsnapshot, tmp_path) -> None:
    module, optimizer = states.training(seed=0)
    values = states.values()
    torch.manual_seed(42)
    taken = Snapshot.take(
        tmp_path / "snapshot",
        {"module": module, "optimizer": optimizer, "values": StateDict(**values), "rng": RNGState()},
    )
    expected_random = torch.rand(3)

    torchsnapshot.run(_restore_with_torchsnapshot, tmp_path / "snapshot", tmp_path / "found.pt", Path(__file__).parent)

    found = torch.load(tmp_path / "found.pt", weights_only=False)
    assert same(dict(found["module"]), dict(module.state_dict()))
    assert same(found["optimizer"], optimizer.state_dict())
    for key, value in values.items():
        assert same(found["values"][key], value), key
    assert torch.equal(found["random"], expected_random)
    assert torch.equal(found["read"]["0/module/0.weight"], module[0].weight)
    assert torch.equal(found["read"]["0/values/dtypes/int16"], values["dtypes"]["int16"])
    assert torch.equal(found["read"]["0/values/scalar"], values["scalar"])
    assert found["paths"] == sorted(taken.get_manifest())


def _list_with_torchsnapshot(path: str) -> None:
    import torchsnapshot

    snapshot = torchsnapshot.Snapshot(path)
    stand_ins = torchsnapshot.StateDict(fp8=None, u16=None, tuple=None, many=None)
    snapshot.restore({"app": stand_ins})
    print({key: type(value).__name__ for key, value in stand_ins.items()}, stand_ins["u16"].tolist())


def test_what_torchsnapshot_cannot_name_does_not_hinder_it(torchsnapshot, tmp_path) -> None:
    state = StateDict(
        fp8=torch.ones(3).to(torch.float8_e4m3fn),
        u16=torch.tensor([1, 2, 3], dtype=torch.uint16),
        tuple=(torch.ones(1), 2),
        many={"x" * 3000: 1, 1.5: torch.ones(2)},
    )
    Snapshot.take(tmp_path, {"app": state})

    found = torchsnapshot.run(_list_with_torchsnapshot, tmp_path)

    # Stand-ins of the same width; containers that hold the same items.
    assert found == "{'fp8': 'Tensor', 'u16': 'Tensor', 'tuple': 'list', 'many': 'list'} [1, 2, 3]\n"


def _take_with_torchsnapshot(path: str, here: str) -> None:
    import sys

    import torch
    import torchsnapshot

    sys.path.insert(0, here)
    import states

    module, optimizer = states.training(seed=0)
    values = states.values()
    # torchsnapshot itself cannot store these (FORMAT 2.1, 15.3) or writes them wrongly.
    values["odd keys"].pop("😀")
    values["odd bfloat16"] = torch.ones(8, dtype=torch.bfloat16)
    values["primitives"][7] = "text\n\x00é"
    values["dtypes"].pop("bfloat16")
    torch.manual_seed(42)
    app_state = {
        "module": module,
        "optimizer": optimizer,
        "values": torchsnapshot.StateDict(**values),
        "rng": torchsnapshot.RNGState(),
    }
    torchsnapshot.Snapshot.take(path, app_state)


def test_we_read_what_torchsnapshot_writes(torchsnapshot, tmp_path) -> None:
    torchsnapshot.run(_take_with_torchsnapshot, tmp_path / "snapshot", Path(__file__).parent)
    module, optimizer = states.training(seed=1)
    values = StateDict()

    Snapshot(tmp_path / "snapshot").restore(
        {"module": module, "optimizer": optimizer, "values": values, "rng": RNGState()}
    )

    random = torch.rand(3)
    torch.manual_seed(42)
    assert torch.equal(random, torch.rand(3))
    expected_module, expected_optimizer = states.training(seed=0)
    assert same(dict(module.state_dict()), dict(expected_module.state_dict()))
    assert same(optimizer.state_dict(), expected_optimizer.state_dict())
    expected = states.values()
    expected["odd keys"].pop("😀")
    expected["odd bfloat16"] = torch.ones(8, dtype=torch.bfloat16)
    expected["primitives"][7] = "text\n\x00é"
    expected["dtypes"].pop("bfloat16")
    for key, value in expected.items():
        assert same(values[key], value), key
    assert torch.equal(Snapshot(tmp_path / "snapshot").read_object("0/module/0.weight"), expected_module[0].weight)
