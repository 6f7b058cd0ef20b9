"""The pool of staging buffers: never more than the budget, nothing lost on errors. Copies of memory."""

import gc
import mmap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_snapshot.memory import (
    Buffer,
    BufferPool,
    advise_huge_pages,
    copy_memory,
    memory_at,
    no_garbage_collection,
)

PATIENCE_SECONDS = 30


@settings(max_examples=40)
@given(budget_bytes=st.integers(1, 400), block_bytes=st.integers(1, 100), threads=st.integers(1, 12))
def test_no_more_buffers_are_out_than_the_budget_allows(budget_bytes, block_bytes, threads):
    pool = BufferPool(budget_bytes, block_bytes)
    allowed = max(1, budget_bytes // block_bytes)
    lock = threading.Lock()
    out: list[int] = []
    most = 0
    # As many threads as can hold buffers at once meet inside; with one buffer less, they would wait for ever.
    meeting = threading.Barrier(min(allowed, threads))

    def work(_: int) -> None:
        nonlocal most
        with pool.buffer() as buffer:
            with lock:
                assert id(buffer.tensor) not in out
                out.append(id(buffer.tensor))
                most = max(most, len(out))
            meeting.wait(PATIENCE_SECONDS)
            with lock:
                out.remove(id(buffer.tensor))

    rounds = 3 * min(allowed, threads)
    with ThreadPoolExecutor(threads) as executor:
        list(executor.map(work, range(rounds)))
    assert most == min(allowed, threads)


def test_view_and_tensor_show_the_same_page_aligned_memory():
    with BufferPool(1, 5000).buffer() as buffer:
        assert (len(buffer.view), buffer.tensor.numel()) == (5000, 5000)
        assert buffer.tensor.data_ptr() % 4096 == 0
        buffer.tensor.fill_(7)
        assert bytes(buffer.view) == b"\7" * 5000


def test_buffers_are_used_again():
    pool = BufferPool(10 * 64, 64)
    seen: list[Buffer] = []
    for _ in range(5):
        with pool.buffer() as buffer:
            seen.append(buffer)
    assert all(buffer is seen[0] for buffer in seen)


def test_a_buffer_comes_back_when_its_user_fails():
    pool = BufferPool(64, 64)
    for _ in range(3):
        with pytest.raises(ValueError, match=r"^the user's error$"), pool.buffer():
            raise ValueError("the user's error")
    with pool.buffer() as buffer:
        assert len(buffer.view) == 64


def test_who_waits_gets_the_buffer_of_a_user_that_fails():
    pool = BufferPool(64, 64)
    taken, fail = threading.Event(), threading.Event()

    def first() -> None:
        with pool.buffer():
            taken.set()
            assert fail.wait(PATIENCE_SECONDS)
            raise ValueError("the user's error")

    def second() -> int:
        with pool.buffer() as buffer:
            return len(buffer.view)

    with ThreadPoolExecutor(2) as executor:
        failing = executor.submit(first)
        assert taken.wait(PATIENCE_SECONDS)
        waiting = executor.submit(second)
        assert not waiting.done()
        fail.set()
        assert waiting.result(PATIENCE_SECONDS) == 64
        assert isinstance(failing.exception(), ValueError)


def test_a_buffer_that_cannot_be_made_does_not_count():
    # More than the address space: the system refuses at once, every time, and nobody waits for it.
    pool = BufferPool(1, 2**62)
    for _ in range(3):
        with pytest.raises((OSError, OverflowError, MemoryError)), pool.buffer():
            pass


def test_a_pool_tells_what_it_holds():
    pool = BufferPool(200, 64)
    assert (pool.reserved_bytes, pool.used_bytes) == (0, 0)
    with pool.buffer(), pool.buffer():
        assert (pool.reserved_bytes, pool.used_bytes) == (128, 128)
    assert (pool.reserved_bytes, pool.used_bytes) == (128, 0)
    with pool.buffer():
        assert (pool.reserved_bytes, pool.used_bytes) == (128, 64)
        pool.release()
        assert (pool.reserved_bytes, pool.used_bytes) == (64, 64)
    pool.release()
    assert (pool.reserved_bytes, pool.used_bytes) == (0, 0)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 4095, 64 * 1024, 64 * 1024 + 1, 5 * 1024 * 1024 + 3])
def test_memory_is_copied_and_nothing_beside_it(size):
    source = torch.randint(256, (size + 20,), dtype=torch.uint8)
    target = torch.zeros(size + 20, dtype=torch.uint8)
    copy_memory(target.data_ptr() + 7, source.data_ptr() + 3, size)
    assert torch.equal(target[7 : 7 + size], source[3 : 3 + size])
    assert not target[:7].any()
    assert not target[7 + size :].any()


def test_an_address_shows_the_memory_itself():
    tensor = torch.arange(100, dtype=torch.uint8)
    view = memory_at(tensor.data_ptr() + 10, 20)
    assert bytes(view) == bytes(range(10, 30))
    view[0] = 99
    assert tensor[10] == 99


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages")
@pytest.mark.parametrize("size", [0, 1, 4 * 1024 * 1024 - 1, 4 * 1024 * 1024, 9 * 1024 * 1024 + 5])
def test_advice_changes_no_byte(size):
    tensor = torch.ones(size + 1, dtype=torch.uint8)[1:]
    advise_huge_pages(tensor)
    assert tensor.sum() == size


# --- garbage collection -----------------------------------------------------------------------------------------------


@pytest.fixture
def _collector():
    yield
    gc.enable()


@pytest.mark.usefixtures("_collector")
@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_garbage_collector_is_put_back(is_enabled):
    if not is_enabled:
        gc.disable()
    with no_garbage_collection():
        assert not gc.isenabled()
        with no_garbage_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() == is_enabled
    with pytest.raises(KeyboardInterrupt), no_garbage_collection(), no_garbage_collection():
        raise KeyboardInterrupt
    assert gc.isenabled() == is_enabled


@pytest.mark.usefixtures("_collector")
def test_threads_that_overlap_leave_the_garbage_collector_on():
    first, second = no_garbage_collection(), no_garbage_collection()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.isenabled()
