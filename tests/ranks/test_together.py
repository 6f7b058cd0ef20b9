"""Saves of several ranks, as threads over a storage in memory: what was said before, per rank, shared, and split."""

import itertools
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_snapshot.errors import UnsupportedValueError
from lightning_snapshot.group import Group, Meeting
from lightning_snapshot.options import Options
from lightning_snapshot.restore import load, read_manifest
from lightning_snapshot.save_as_one import save_as_one
from lightning_snapshot.save_each import save_each
from lightning_snapshot.session import Session
from lightning_snapshot.stats import Stats
from lightning_snapshot.storage.memory import MemoryStorage
from lightning_snapshot.tensors import is_tensor
from lightning_snapshot.together import Save
from lightning_snapshot.tree import ALIAS_ROOT, encode_key, flatten
from tests.engine.strategies import SMALL, new_storage, same, states
from tests.ranks.simulation import groups, run

# What these tests are about is not which objects may be read.
TRUSTED = replace(SMALL, trusted=True)
_numbers = itertools.count()


@dataclass(frozen=True)
class Roles:
    """Which top-level keys all ranks share, and of which of these they all hold the tensors alike."""

    shared: frozenset[str] = frozenset()
    split: frozenset[str] = frozenset()

    def is_shared(self, key_or_path: str) -> bool:
        """By key, as `save_as_one` asks, or by path, as `save_each` does."""
        return key_or_path in self.shared or key_or_path.partition("/")[0] in map(encode_key, self.shared)

    def is_split(self, path: str, tensor: torch.Tensor) -> bool:
        return path.partition("/")[0] in map(encode_key, self.split)


@dataclass
class Job:
    """Ranks that save again and again to one place."""

    world_size: int
    options: Options = TRUSTED
    storage: MemoryStorage = field(default_factory=new_storage)

    def __post_init__(self) -> None:
        self.groups = groups(self.world_size)
        self.sessions = [Session() for _ in range(self.world_size)]

    def save(self, each: Callable[[Save, int], Stats]) -> list[Any]:
        """What the ranks return or raise."""
        save_id = f"save{next(_numbers)}"

        def act(group: Group) -> Stats:
            where = Save("there", lambda _: self.storage, save_id, self.options, self.sessions[group.rank], group)
            return each(where, group.rank)

        return run(act, self.groups)

    def load(self, rank: int) -> dict[str, Any]:
        return load(self.storage, rank=rank, options=self.options)


def equal(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)


def succeeded(results: list[Any]) -> bool:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return True


def _save_as_one(ranks: list[dict[str, Any]], roles: Roles, save: Save, rank: int) -> Stats:
    return save_as_one(ranks[rank], save, roles)


def _save_each(ranks: list[dict[str, Any]], roles: Roles, save: Save, rank: int) -> Stats:
    return save_each(lambda: ranks[rank], save, roles)


@st.composite
def as_one(draw: Any, world_size: int) -> tuple[Roles, list[dict[str, Any]]]:
    """Roles, and the state of each rank."""
    first = draw(states())
    keys = st.frozensets(st.sampled_from(sorted(first))) if first else st.just(frozenset())
    shared = draw(keys)
    split = draw(keys) & shared
    ranks = [first]
    for _ in range(world_size - 1):
        other = deepcopy({key: value for key, value in first.items() if key in split or draw(st.booleans())})
        # What is not held alike may be anything; rank 0's counts if it is shared.
        ranks.append(other | {key: value for key, value in draw(states()).items() if key not in split})
    return Roles(shared, split), ranks


# What torch says of itself when such a tensor is copied.
OF_TORCH = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


@OF_TORCH
@given(st.integers(1, 4), st.data())
@settings(max_examples=60)
def test_all_ranks_get_back_what_is_shared_and_what_is_their_own(world_size: int, data: st.DataObject) -> None:
    job = Job(world_size)
    roles, ranks = data.draw(as_one(world_size))
    for _ in range(data.draw(st.integers(1, 3))):
        assert succeeded(job.save(partial(_save_as_one, ranks, roles)))
        for rank in range(world_size + 2):
            own = ranks[rank] if rank < world_size else {}
            mine = {key: value for key, value in own.items() if key not in roles.shared}
            assert equal(job.load(rank), {**ranks[0], **mine}), rank
        if data.draw(st.booleans()):
            job.sessions[data.draw(st.integers(0, world_size - 1))] = Session()  # what it has heard is forgotten
        if data.draw(st.booleans()):
            roles, ranks = data.draw(as_one(world_size))


@st.composite
def of_each(draw: Any, world_size: int) -> tuple[Roles, list[dict[str, Any]]]:
    common = draw(states())
    ranks = []
    for _ in range(world_size):
        own = {f"own {key}": value for key, value in draw(states()).items()}
        ranks.append(dict(draw(st.permutations([*deepcopy(common).items(), *own.items()]))))
    return Roles(frozenset(common), frozenset(common) if draw(st.booleans()) else frozenset()), ranks


@OF_TORCH
@given(st.integers(1, 4), st.data())
@settings(max_examples=60)
def test_each_rank_gets_back_what_it_had(world_size: int, data: st.DataObject) -> None:
    job = Job(world_size)
    roles, ranks = data.draw(of_each(world_size))
    for _ in range(data.draw(st.integers(1, 3))):
        assert succeeded(job.save(partial(_save_each, ranks, roles)))
        for rank in range(world_size):
            assert same(job.load(rank), ranks[rank]), rank
        new = job.load(world_size)
        for key in roles.shared:
            paths = flatten({key: ranks[0][key]}, is_tensor=is_tensor).items
            if not any(path.startswith(ALIAS_ROOT) for path in paths):  # those have no name that could be compared
                assert same(new[key], ranks[0][key])
        once = [path for path in read_manifest(job.storage).entries if not path.startswith("0/")]
        assert not [path for path in once if path.count("/") > 1 and _is_leaf_of(path, roles, ranks)]
        if data.draw(st.booleans()):
            job.sessions[data.draw(st.integers(0, world_size - 1))] = Session()
        if data.draw(st.booleans()):
            roles, ranks = data.draw(of_each(world_size))


def _is_leaf_of(path: str, roles: Roles, ranks: list[dict[str, Any]]) -> bool:
    """Whether another rank has an entry for a value that is stored once."""
    rank, _, logical_path = path.partition("/")
    item = flatten(ranks[int(rank)], is_tensor=is_tensor).items.get(logical_path)
    is_container = type(item).__name__ in {"ListEntry", "DictEntry", "OrderedDictEntry"}
    return not is_container and roles.is_shared(logical_path)


# What travels, and who writes


def training_state(step: int) -> dict[str, Any]:
    return {"step": step, "w": {str(n): torch.full((40, 40), float(n + step)) for n in range(50)}, "own": [step, None]}


def test_from_the_second_save_on_only_values_travel() -> None:
    job = Job(3)
    roles = Roles(frozenset({"step", "w"}), frozenset({"w"}))
    sent: list[dict[str, int]] = []
    for step in range(4):
        if step == 3:
            job.sessions[1] = Session()
        counts: dict[str, int] = {}
        job.groups = [_Counting(group, counts) for group in groups(3)]  # type: ignore[misc]  # all that is asked of it
        assert succeeded(job.save(lambda save, rank, step=step: save_as_one(training_state(step), save, roles)))
        sent.append(counts)
        for rank in range(3):
            assert same(job.load(rank), training_state(step))
    first, second, third, forgotten = sent
    assert second["specs"] < first["specs"] / 2
    assert second["plan"] < first["plan"] / 2
    assert third["plan"] == second["plan"]
    assert abs(third["specs"] - second["specs"]) < 20  # other numbers
    assert second["specs"] <= forgotten["specs"] < first["specs"]
    assert second["plan"] < forgotten["plan"] < first["plan"]


class _Counting:
    """A group that counts the bytes of what is said."""

    def __init__(self, group: Group, counts: dict[str, int]) -> None:
        self._group = group
        self._counts = counts
        self.rank = group.rank
        self.world_size = group.world_size

    def meet(self, subject: str) -> Any:
        return _CountingMeeting(self._group.meet(subject), self._counts)


class _CountingMeeting:
    def __init__(self, context: Any, counts: dict[str, int]) -> None:
        self._context = context
        self._counts = counts
        self._meeting: Meeting | None = None

    def __enter__(self) -> "_CountingMeeting":  # noqa: PYI034 - typing.Self needs Python 3.11
        self._meeting = self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> Any:
        return self._context.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._meeting, name)

        def call(*arguments: Any) -> Any:
            if name in {"gather", "scatter"}:
                payload = arguments[1] if len(arguments) > 1 else b""
                size = len(payload) if isinstance(payload, bytes) else sum(map(len, payload))
                self._counts[arguments[0]] = self._counts.get(arguments[0], 0) + size
            return method(*arguments)

        return call


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("kind", [save_as_one, save_each])
def test_ranks_write_about_the_same_of_what_they_all_have(world_size: int, kind: Any) -> None:
    job = Job(world_size, Options())
    state = {"w": [torch.full((500_000 + 40_000 * n,), float(n)) for n in range(7)] + [torch.ones(9_000_000)]}
    roles = Roles(frozenset({"w"}), frozenset({"w"}))
    states_of = {save_as_one: state, save_each: lambda: state}
    results = job.save(lambda save, rank: kind(states_of[kind], save, roles))
    assert succeeded(results)
    written = [stats.data_bytes for stats in results]
    total = sum(tensor.nbytes for tensor in state["w"])
    assert total <= sum(written) < 1.01 * total
    assert max(written) < 1.1 * total / world_size
    assert same(job.load(world_size + 1), state)


def test_replicas_that_differ_are_named() -> None:
    job = Job(5)
    good = {"w": {"a": torch.ones(5), "b": torch.ones(6)}}
    bad = {"w": {"a": torch.ones(5), "b": torch.tensor([1.0, 1, 1, 1, 1, 2])}}
    roles = Roles(frozenset({"w"}), frozenset({"w"}))

    def save(bad_ranks: set[int]) -> list[Any]:
        return job.save(
            lambda save, rank: save_as_one(bad if rank in bad_ranks else good, save, roles, check_replicas=True)
        )

    assert succeeded(save(set()))
    before = job.load(0)
    for rank, error in enumerate(save({2, 4})):
        assert type(error) is UnsupportedValueError
        text = "w/b: expected equal values on all ranks, found others than rank 0's on rank 2, 4; nothing was saved"
        assert str(error).startswith(text if rank == 0 else f"rank 0: {text}")
    assert same(job.load(0), before)
    assert succeeded(save(set(range(5))))  # all alike again
    assert same(job.load(0), bad)
