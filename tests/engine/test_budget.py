"""Staging memory: never more than the budget, all of it given back, and kept from one save to the next."""

import copy
import dataclasses
import gc
import itertools
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lightning_snapshot import SnapshotCheckpointIO
from lightning_snapshot.errors import StorageError
from lightning_snapshot.memory import BufferPool
from lightning_snapshot.restore import load
from lightning_snapshot.save import save
from lightning_snapshot.session import Session
from tests.engine.strategies import SMALL, new_storage, same
from tests.engine.watched import Operation, WatchedStorage

PATIENCE_SECONDS = 60

# Column by column, so that the elements of each file must be gathered.
TURNED = {
    "chunked": torch.arange(600.0).reshape(3, 200).t(),
    "whole": torch.arange(20.0).reshape(4, 5).t(),
    "small": [torch.full((2, size), size, dtype=torch.int8).t() for size in range(2, 30)],
}
TIED = torch.arange(100.0)
STATE = {
    "turned": TURNED,
    "rows": torch.arange(500, dtype=torch.float64),
    "conjugated": (torch.arange(60.0) * 1j).conj(),
    "tied": [TIED, TIED],
    "empty": torch.empty(0, 3),
    "objects": [{1, 2}, {"x" * 300}],
}
# Smaller than a block; one block; not a multiple of a block; smaller than any tensor, with blocks larger than any file.
BUDGETS = [(1, 64), (64, 64), (300, 64), (5, 4096)]


def limited(budget_bytes: int, block_bytes: int):
    return dataclasses.replace(SMALL, memory_budget_bytes=budget_bytes, block_bytes=block_bytes, threads=8)


@pytest.mark.parametrize(("budget_bytes", "block_bytes"), BUDGETS)
def test_there_is_never_more_staging_memory_than_the_budget_or_one_block(budget_bytes, block_bytes):
    options, session, limit_bytes = limited(budget_bytes, block_bytes), Session(), max(budget_bytes, block_bytes)
    pool = session.pool(options, block_bytes)

    def look(_: Operation) -> None:
        assert pool.used_bytes <= pool.reserved_bytes <= limit_bytes

    storage = WatchedStorage(new_storage(), look)
    stats = save(STATE, storage, save_id="first", options=options, session=session)
    assert 0 < stats.staging_bytes <= limit_bytes
    assert same(load(storage, rank=0, options=options, session=session), STATE)
    assert 0 < session.last_load.staging_bytes <= limit_bytes
    assert session.pool(options, block_bytes) is pool
    assert pool.used_bytes == 0
    assert storage.open_files == 0


@pytest.mark.parametrize(("budget_bytes", "block_bytes"), BUDGETS)
def test_all_bytes_go_through_a_few_places_in_memory(budget_bytes, block_bytes):
    # What the pool says of itself is not enough: these are the addresses that the storage sees.
    options, session = limited(budget_bytes, block_bytes), Session()
    addresses: set[int] = set()

    def note(operation: Operation) -> None:
        if operation.name in ("read", "write"):
            addresses.add(operation.address)

    storage = WatchedStorage(new_storage(), note)
    save(TURNED, storage, save_id="first", options=options, session=session)
    assert same(load(storage, rank=0, options=options, session=session), TURNED)
    assert len(storage.operations) > 20
    assert len(addresses) <= max(1, budget_bytes // block_bytes)


def test_the_record_tells_the_worst_moment():
    # Four threads hold a buffer each before one of them may go on.
    options, together = dataclasses.replace(SMALL, threads=4), threading.Barrier(4, timeout=PATIENCE_SECONDS)
    numbers = itertools.count()

    def wait(operation: Operation) -> None:
        if operation.name == "write" and next(numbers) < 4:
            together.wait()

    stats = save(TURNED, WatchedStorage(new_storage(), wait), save_id="first", options=options)
    assert stats.staging_bytes == SMALL.memory_budget_bytes == 4 * SMALL.block_bytes


# --- errors -----------------------------------------------------------------------------------------------------------


def fail_at(number: int, error: type[BaseException]):
    numbers = itertools.count(1)

    def hook(operation: Operation) -> None:
        if next(numbers) == number:
            raise error(5, operation.name)

    return hook


@pytest.mark.parametrize("error", [StorageError, KeyboardInterrupt])
@pytest.mark.parametrize("budget_bytes", [1, 256])
def test_an_error_at_any_operation_gives_all_buffers_back(budget_bytes, error):
    options, session = dataclasses.replace(SMALL, memory_budget_bytes=budget_bytes), Session()
    pool = session.pool(options, SMALL.block_bytes)
    state = {"t": TURNED["chunked"][:50], "rows": torch.arange(60.0), "o": {1}}
    inner = new_storage()
    actions = (
        (lambda storage: save(state, storage, save_id="s", options=options, session=session), 20),
        (lambda storage: load(storage, rank=0, options=options, session=session), 15),
    )
    for action, fewest in actions:
        for number in itertools.count(1):
            storage = WatchedStorage(inner, fail_at(number, error))
            try:
                result = action(storage)
            except error:
                assert pool.used_bytes == 0
                assert storage.open_files == 0
            else:
                break
        assert number > fewest
    # The session that has seen all these errors still works.
    assert same(result, state)
    assert session.pool(options, SMALL.block_bytes) is pool


@pytest.fixture
def _no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
def test_tensors_go_when_nobody_needs_them():
    # Nothing leads in a circle, or large states would stay until the garbage collector happens to come.
    storage, tensor = new_storage(), torch.ones(500)
    alive = weakref.ref(tensor)
    save({"t": tensor}, storage, save_id="s", options=SMALL)
    del tensor
    assert alive() is None
    loaded = load(storage, rank=0, options=SMALL)
    alive = weakref.ref(loaded["t"])
    del loaded
    assert alive() is None


def save_again(storage, tensor) -> None:
    save({"t": tensor}, storage, save_id="again", options=SMALL)


def load_into(storage, tensor) -> None:
    load(storage, rank=0, options=SMALL, targets={"t": tensor})


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize(
    ("action", "operation"),
    [
        *((save_again, name) for name in ("begin", "write", "finish", "commit")),
        *((load_into, name) for name in ("open", "read")),
    ],
)
def test_an_error_that_is_handled_keeps_no_tensor(action, operation):
    inner = new_storage()
    save({"t": torch.ones(500)}, inner, save_id="s", options=SMALL)

    def fail(found: Operation) -> None:
        if found.name == operation:
            raise StorageError(5, operation)

    storage, tensor = WatchedStorage(inner, fail), torch.zeros(500)
    alive = weakref.ref(tensor)
    with pytest.raises(StorageError) as caught:
        action(storage, tensor)
    del caught, tensor
    assert alive() is None


# --- from one save to the next ----------------------------------------------------------------------------------------


def test_buffers_are_kept_until_they_are_released():
    options, session, storage = dataclasses.replace(SMALL, threads=1), Session(), new_storage()
    pool = session.pool(options, SMALL.block_bytes)
    assert pool.reserved_bytes == 0

    def buffers_of_a_save(save_id: str) -> list[int]:
        save(TURNED, storage, save_id=save_id, options=options, session=session)
        assert session.pool(options, SMALL.block_bytes) is pool
        assert pool.reserved_bytes == SMALL.block_bytes
        with pool.buffer() as buffer:
            return [id(buffer), buffer.address]

    first = buffers_of_a_save("a")
    assert buffers_of_a_save("b") == first
    assert same(load(storage, rank=0, options=options, session=session), TURNED)
    assert buffers_of_a_save("c") == first
    session.release()
    assert pool.reserved_bytes == pool.used_bytes == 0
    buffers_of_a_save("d")
    assert same(load(storage, rank=0, options=options, session=session), TURNED)


def test_a_buffer_in_use_survives_a_release():
    pool = BufferPool(128, 64)
    with pool.buffer() as buffer:
        pool.release()
        assert (pool.reserved_bytes, pool.used_bytes) == (64, 64)
        buffer.tensor.fill_(7)
        with pool.buffer() as other:
            assert other is not buffer
            assert (pool.reserved_bytes, pool.used_bytes) == (128, 128)
    pool.release()
    assert pool.reserved_bytes == 0


def test_another_budget_or_block_size_counts_at_once():
    session = Session()
    for budget_bytes, block_bytes in BUDGETS:
        options = limited(budget_bytes, block_bytes)
        save(TURNED, new_storage(), save_id="s", options=options, session=session)
        assert 0 < session.pool(options, block_bytes).reserved_bytes <= max(budget_bytes, block_bytes)
        assert session.pool(options, block_bytes).block_bytes == block_bytes


def test_two_threads_save_with_one_session():
    # One buffer for both, and both have begun before the first one takes it.
    options, session = dataclasses.replace(SMALL, memory_budget_bytes=1), Session()
    pool, both = session.pool(options, SMALL.block_bytes), threading.Barrier(2, timeout=PATIENCE_SECONDS)

    def save_and_load(number: int) -> bool:
        def meet(operation: Operation) -> None:
            assert pool.reserved_bytes <= SMALL.block_bytes
            if operation.name == "begin":
                both.wait()

        storage = WatchedStorage(new_storage(), meet)
        state = {"number": number, "tensors": TURNED, "own": torch.full((100 * number,), number)}
        for save_id in ("a", "b"):
            stats = save(state, storage, save_id=save_id, options=options, session=session)
            assert stats.staging_bytes == SMALL.block_bytes
        return same(load(storage, rank=0, options=options, session=session), state)

    with ThreadPoolExecutor(2) as executor:
        assert list(executor.map(save_and_load, (1, 2))) == [True, True]
    assert pool.used_bytes == 0


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_starts_with_nothing(make_copy, tmp_path):
    plugin = SnapshotCheckpointIO(memory_budget_bytes=1)
    plugin.save_checkpoint(TURNED, tmp_path / "a")
    session, options = plugin._session, plugin._options
    for copied in (make_copy(session), make_copy(plugin)._session):
        assert copied.last_save is copied.last_load is None
        assert copied.pool(options, options.block_bytes).reserved_bytes == 0
        assert copied.planner is not session.planner
        save(TURNED, new_storage(), save_id="s", options=options, session=copied)
    assert session.last_save.path == str(tmp_path / "a")
    other = make_copy(plugin)
    other.save_checkpoint(TURNED, tmp_path / "b")
    assert same(other.load_checkpoint(tmp_path / "b"), TURNED)
