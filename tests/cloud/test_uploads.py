"""Files on their way to a bucket: order, memory, and what is left of an upload that ends early."""

import re
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_snapshot.errors import StorageError
from lightning_snapshot.storage import open_storage
from lightning_snapshot.storage.uploads import PartsWriter
from tests.cloud.proxy import Answer, Proxy
from tests.cloud.servers import BUCKET

_PART = 100


class Pausing:
    """A bucket that takes a block whenever it is allowed to."""

    name, part_bytes = "test://", _PART

    def __init__(self):
        self.permits = threading.Semaphore(0)
        self.taken: list[bytes] = []
        self.fails_after = 10**9

    def upload(self, key, size_bytes, blocks):
        for block in blocks:
            self.permits.acquire()
            self.taken.append(block)
            if len(self.taken) > self.fails_after:
                raise StorageError(5, "the store is on fire")


@pytest.fixture
def bucket():
    return Pausing()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def content(size):
    return bytes(number % 251 for number in range(size))


def test_blocks_are_put_in_order(bucket, pool):
    data = content(1030)
    writer = PartsWriter(bucket, "key", len(data))
    bucket.permits.release(1000)
    starts = [start for first in range(0, 1030, 50) for start in reversed(range(first, min(first + 50, 1030), 10))]
    list(pool.map(lambda start: writer.write(start, memoryview(data)[start : start + 10]), starts))
    writer.finish()
    assert b"".join(bucket.taken) == data


def test_who_brings_too_much_waits_but_never_for_a_block_that_is_not_there(bucket, pool):
    data = content(1000)
    writer = PartsWriter(bucket, "key", len(data))
    block = lambda number: writer.write(number * 50, memoryview(data)[number * 50 : number * 50 + 50])  # noqa: E731  # one line is enough here
    # The first block is missing: all others get in, however many, because its writer may wait for one of theirs.
    list(pool.map(block, range(1, 12)))
    # The first one is there: the upload takes it, and waits for a permit. Who comes now waits for that.
    block(0)
    late = pool.submit(block, 12)
    with pytest.raises(TimeoutError):
        late.result(0.2)
    bucket.permits.release(1000)
    late.result(20)
    list(pool.map(block, range(13, 20)))
    writer.finish()
    assert b"".join(bucket.taken) == data


def test_what_nobody_writes_is_zero(bucket):
    bucket.permits.release(1000)
    writer = PartsWriter(bucket, "key", 1000)
    writer.write(500, memoryview(b"x" * 10))
    writer.finish()
    assert b"".join(bucket.taken) == bytes(500) + b"x" * 10 + bytes(490)


def test_an_error_of_the_store_reaches_all_who_write(bucket, pool):
    bucket.fails_after = 1
    writer = PartsWriter(bucket, "key", 10_000)
    calls = [pool.submit(writer.write, number * 50, memoryview(bytes(50))) for number in range(12)]
    bucket.permits.release(1000)
    for call in calls:
        call.exception(20)
    for action in (lambda: writer.write(9000, memoryview(bytes(50))), writer.finish):
        with pytest.raises(StorageError, match="on fire"):
            action()
    writer.close()


def test_closing_ends_the_upload_and_who_waits(bucket, pool):
    writer = PartsWriter(bucket, "key", 10_000)
    calls = [pool.submit(writer.write, number * 100, memoryview(bytes(100))) for number in range(6)]
    bucket.permits.release(1)
    closing = pool.submit(writer.close)
    bucket.permits.release(1000)
    closing.result(20)
    for call in calls:
        call.exception(20)
    with pytest.raises(StorageError, match="closed"):
        writer.write(0, memoryview(b"x"))
    assert len(b"".join(bucket.taken)) < 10_000


def write_all(writer, mebibytes):
    for start in range(0, mebibytes, 2):
        writer.write(start * 2**20, memoryview(bytes(2**21)))
    if mebibytes * 2**20 == writer.size_bytes:
        writer.finish()


def uploads_under_way(server):
    with urllib.request.urlopen(f"{server.endpoint}/{BUCKET}?uploads") as answer:  # noqa: S310  # this machine
        return re.findall(rb"<UploadId>", answer.read())


@pytest.mark.parametrize("end", ["abort", "failure"])
def test_parts_of_an_upload_that_ends_early_are_given_up(s3, end):
    proxy = Proxy(s3.server.port)
    retry = {"max_retries": 1, "backoff": {"init_backoff": 0.01, "max_backoff": 0.01, "base": 2}}
    options = {**s3.server.options(proxy.endpoint), "part_bytes": 5 * 2**20, "retry_config": retry}
    try:
        transaction = open_storage(f"{s3.folder}/x", options).begin("a")
        writer = transaction.create(".data/a/0", 40 * 2**20)
        if end == "failure":
            proxy.fault = lambda request: Answer(500) if "partNumber=2" in request.path else None
            with pytest.raises(StorageError, match="upload"):
                write_all(writer, 40)
        else:
            write_all(writer, 20)
        transaction.abort()
    finally:
        proxy.close()
    assert uploads_under_way(s3.server) == []
    assert open_storage(f"{s3.folder}/x", s3.options).place.files() == {}
