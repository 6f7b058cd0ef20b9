"""`Snapshot.restore` into objects that do more than take what they are given."""

import pytest
import torch

from lightning_snapshot import Snapshot, SnapshotCheckpointIO, StateDict
from lightning_snapshot.errors import EntryNotFoundError, UnsupportedValueError


class Pair(torch.nn.Module):
    def __init__(self, a: float, b: float) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.full((4,), a))
        self.b = torch.nn.Parameter(torch.full((4,), b))

    def values(self) -> tuple[float, float]:
        return self.a[0].item(), self.b[0].item()


class SwapsWhatItLoads(Pair):
    def load_state_dict(self, state_dict, *args, **kwargs):
        return super().load_state_dict({"a": state_dict["b"], "b": state_dict["a"]}, *args, **kwargs)


class SwapsDeepDown(Pair):
    def _load_from_state_dict(self, state_dict, prefix, *args):
        a, b = f"{prefix}a", f"{prefix}b"
        state_dict[a], state_dict[b] = state_dict[b], state_dict[a]
        super()._load_from_state_dict(state_dict, prefix, *args)


class CustomStateful:
    def __init__(self) -> None:
        self.a, self.b = torch.zeros(4), torch.zeros(4)

    def state_dict(self):
        return {"a": self.a, "b": self.b}

    def load_state_dict(self, state_dict) -> None:
        self.a.copy_(state_dict["b"])
        self.b.copy_(state_dict["a"])


def test_an_ordinary_module_is_filled_in_place(tmp_path) -> None:
    Snapshot.take(tmp_path / "s", {"m": Pair(1.0, 2.0)})
    target = Pair(0.0, 0.0)
    Snapshot(tmp_path / "s").restore({"m": target})
    assert target.values() == (1.0, 2.0)


def test_code_that_swaps_what_it_loads_gets_tensors_of_its_own(tmp_path) -> None:
    Snapshot.take(tmp_path / "s", {"m": Pair(1.0, 2.0)})
    for target in (SwapsWhatItLoads(0.0, 0.0), torch.nn.Sequential(SwapsDeepDown(0.0, 0.0))[0]):
        Snapshot(tmp_path / "s").restore({"m": target})
        assert target.values() == (2.0, 1.0)
    custom = CustomStateful()
    Snapshot(tmp_path / "s").restore({"m": custom})
    assert (custom.a[0].item(), custom.b[0].item()) == (2.0, 1.0)


def test_an_untied_snapshot_goes_into_a_tied_model_as_torch_would_do_it(tmp_path) -> None:
    size = 1_000_000
    Snapshot.take(tmp_path / "s", {"m": StateDict(a=torch.ones(size), b=torch.full((size,), 2.0))})
    for _ in range(5):
        tied = torch.nn.Module()
        tied.a = tied.b = torch.nn.Parameter(torch.zeros(size))
        Snapshot(tmp_path / "s").restore({"m": tied})
        assert torch.equal(tied.a, torch.full((size,), 2.0))


def test_two_stored_tensors_never_go_into_one_memory(tmp_path) -> None:
    Snapshot.take(tmp_path / "s", {"m": StateDict(a=torch.ones(4), b=torch.full((4,), 2.0), c=torch.full((4,), 3.0))})
    memory, own = torch.zeros(8), torch.zeros(4)
    state = StateDict(a=memory[:4], b=memory[2:6], c=own)
    Snapshot(tmp_path / "s").restore({"m": state})
    assert [state[key].tolist() for key in "abc"] == [[1.0] * 4, [2.0] * 4, [3.0] * 4]
    assert state["c"] is own
    assert not memory.any()


def test_targets_whose_elements_overlap_are_not_filled(tmp_path) -> None:
    stored = torch.arange(12.0).view(3, 4)
    Snapshot.take(tmp_path / "s", {"m": StateDict(a=stored)})
    overlapping = torch.zeros(6).as_strided((3, 4), (1, 1))
    state = StateDict(a=overlapping)
    Snapshot(tmp_path / "s").restore({"m": state})
    assert torch.equal(state["a"], stored)
    assert not overlapping.any()


def test_what_has_no_state_dict_is_refused_by_name(tmp_path) -> None:
    with pytest.raises(UnsupportedValueError, match=r"weight: expected an object with state_dict\(\).*StateDict"):
        Snapshot.take(tmp_path / "s", {"weight": torch.ones(2)})
    assert not (tmp_path / "s").exists()


def test_a_path_without_a_rank_is_no_damage(tmp_path) -> None:
    Snapshot.take(tmp_path / "s", {"m": Pair(1.0, 2.0)})
    with pytest.raises(EntryNotFoundError, match="like '0/m/a'"):
        Snapshot(tmp_path / "s").read_object("m/a")


@pytest.mark.parametrize("budget", [0, -1, 1.5, "64M", True])
def test_a_budget_that_is_none_is_refused_at_once(budget) -> None:
    with pytest.raises(ValueError, match="memory_budget_bytes must be a positive whole number"):
        SnapshotCheckpointIO(memory_budget_bytes=budget)
