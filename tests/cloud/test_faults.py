"""What a store or the network does wrong: passes unnoticed, or ends in an error that says what happened."""

import errno
import threading
from collections.abc import Callable

import pytest
import torch

from lightning_snapshot import SnapshotCheckpointIO
from lightning_snapshot.errors import SnapshotNotFoundError, StorageError, StoragePermissionError
from lightning_snapshot.storage import METADATA_NAME, open_storage
from tests.cloud.proxy import LOSE, REFUSE, RESET, Answer, Fault, Request
from tests.cloud.servers import SECRET

_MIB = 2**20
# Many small parts make many requests, and little time between tries makes tests short.
_OPTIONS = {
    "part_bytes": 5 * _MIB,
    "retry_config": {
        "max_retries": 4,
        "backoff": {"init_backoff": 0.005, "max_backoff": 0.05, "base": 2},
        "retry_timeout": 20,
    },
}
_MAX_TRIES = 5


@pytest.fixture
def plugin(cloud, proxy):
    """The plugin behind the proxy, with an empty folder."""
    plugin = SnapshotCheckpointIO(storage_options={**cloud.server.options(proxy.endpoint), **_OPTIONS})
    plugin.url = f"{cloud.folder}/x.ckpt"
    return plugin


@pytest.fixture
def state():
    """About 11 MiB, of which most goes in three parts."""
    return {"state_dict": {"a": torch.arange(11 * _MIB // 8), "b": torch.arange(300.0)}, "epoch": 1}


@pytest.fixture
def clean(cloud):
    """The place without a proxy in front of it."""
    return open_storage(f"{cloud.folder}/x.ckpt", cloud.options)


def each(count: int, *faults: Answer | str) -> Fault:
    """One of some faults for each so many requests."""
    return lambda request: None if request.number % count else faults[request.number // count % len(faults)]


def once_for_each(wanted: Callable[[Request], bool], fault: Answer | str, times: int = 1) -> Fault:
    """The first requests of a kind to each path go wrong."""
    seen: dict[str, int] = {}
    lock = threading.Lock()

    def judge(request: Request) -> Answer | str | None:
        if not wanted(request):
            return None
        with lock:
            seen[request.path] = seen.get(request.path, 0) + 1
            return fault if seen[request.path] <= times else None

    return judge


def check(plugin, state) -> None:
    loaded = plugin.load_checkpoint(plugin.url)
    assert torch.equal(loaded["state_dict"]["a"], state["state_dict"]["a"])
    assert torch.equal(loaded["state_dict"]["b"], state["state_dict"]["b"])


def is_part(request: Request) -> bool:
    return request.method == "PUT" and any(word in request.path for word in ("partNumber", "comp=block&", "blockid"))


@pytest.mark.parametrize(
    "fault",
    [
        each(20, Answer(500), Answer(503), Answer(429)),
        each(7, Answer(500), Answer(503), Answer(429)),
        each(9, REFUSE),
        once_for_each(is_part, Answer(500), times=3),
        once_for_each(is_part, LOSE),
        once_for_each(lambda request: request.method == "GET" and "/.data/" in request.path.replace("%2F", "/"), RESET),
    ],
    ids=["5 % errors", "14 % errors", "11 % refused", "each part thrice", "each part lost", "each read cut"],
)
def test_what_passes_is_not_noticed(plugin, proxy, state, clean, fault):
    proxy.fault = fault
    plugin.save_checkpoint({**state, "epoch": 0}, plugin.url)
    plugin.save_checkpoint(state, plugin.url)
    check(plugin, state)
    proxy.fault = None
    assert proxy.faults
    check(plugin, state)
    assert {name for name in clean.place.files() if not name.startswith(".data/")} == {METADATA_NAME}
    assert len({name.split("/")[1] for name in clean.place.files() if name.startswith(".data/")}) == 1


@pytest.mark.parametrize("what", ["everything", "parts", "metadata"])
def test_what_lasts_is_an_error_and_the_old_snapshot_stays(plugin, proxy, state, clean, what):
    plugin.save_checkpoint({**state, "epoch": 0}, plugin.url)
    before = clean.place.files().keys()
    matches = {
        "everything": lambda request: True,
        "parts": is_part,
        "metadata": lambda request: request.method == "PUT" and ".snapshot" in request.path.replace("%2E", "."),
    }[what]
    proxy.fault = lambda request: Answer(503) if matches(request) else None
    with pytest.raises(StorageError, match=r"could not .*x\.ckpt") as caught:
        plugin.save_checkpoint(state, plugin.url)
    assert SECRET not in str(caught.value)
    proxy.fault = None
    assert plugin.load_checkpoint(plugin.url)["epoch"] == 0
    if what != "everything":  # then nothing could be removed either
        assert clean.place.files().keys() == before
    plugin.save_checkpoint(state, plugin.url)
    check(plugin, state)


def test_tries_are_bounded(plugin, proxy, state):
    proxy.fault = lambda request: Answer(503)
    with pytest.raises(StorageError):
        plugin.load_checkpoint(plugin.url)
    assert proxy.requests.total() <= 2 * _MAX_TRIES


def test_metadata_whose_answer_is_lost_is_published(plugin, proxy, state, clean):
    proxy.fault = lambda request: LOSE if request.method == "PUT" and "metadata" in request.path else None
    plugin.save_checkpoint(state, plugin.url)
    proxy.fault = None
    check(plugin, state)
    assert not [name for name in clean.place.files() if name.endswith(".saving")]


@pytest.mark.parametrize("stage", ["parts", "commit"])
def test_a_save_that_is_killed_leaves_no_snapshot_and_the_next_one_cleans_up(cloud, clean, stage):
    transaction = clean.begin("dead")
    writer = transaction.create(".data/dead/0", 3)
    writer.write(0, memoryview(b"abc"))
    writer.finish()
    clean.place.let_die("dead")  # as when its process has ended
    assert not clean.is_snapshot()
    if stage == "commit":
        transaction = clean.begin("next")
        assert clean.place.files().keys() == {".data/next.saving"}
        transaction.abort()
        assert clean.place.files() == {}


def test_somebody_else_removes_data_of_a_save(clean):
    transaction = clean.begin("a")
    writer = transaction.create(".data/a/0", 3)
    writer.finish()
    clean.place.delete([".data/a/0"])
    with pytest.raises(StorageError, match="another save to this place"):
        transaction.commit(b"names .data/a/0")
    transaction.abort()
    assert clean.place.files() == {}


def test_missing_bucket(cloud):
    url = f"{cloud.server.scheme}://nowhere/x.ckpt"
    plugin = SnapshotCheckpointIO(storage_options={**cloud.options, **_OPTIONS})
    with pytest.raises(StorageError, match="no bucket or container of that name") as caught:
        plugin.save_checkpoint({"epoch": 1}, url)
    assert caught.value.errno == errno.ENOENT
    assert not isinstance(caught.value, SnapshotNotFoundError)
    with pytest.raises(StorageError, match="no bucket or container of that name"):
        plugin.load_checkpoint(url)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (403, b"<Error><Code>AccessDenied</Code><AWSAccessKeyId>tester</AWSAccessKeyId></Error>"),
        (400, b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"),
        (401, b"<Error><Code>Unauthenticated</Code></Error>"),
    ],
    ids=["forbidden", "expired", "unauthenticated"],
)
def test_refused_credentials(plugin, proxy, state, status, text):
    proxy.fault = lambda request: Answer(status, text)
    for action in (lambda: plugin.save_checkpoint(state, plugin.url), lambda: plugin.load_checkpoint(plugin.url)):
        with pytest.raises(StoragePermissionError, match="credentials") as caught:
            action()
        assert caught.value.errno == errno.EACCES
        assert "tester" not in str(caught.value)


def test_many_requests_are_under_way_at_once(plugin, proxy, state):
    proxy.latency_seconds = 0.02
    state = {"state_dict": {"a": torch.arange(16 * _MIB // 2)}}
    plugin.save_checkpoint(state, plugin.url)
    assert proxy.most_at_once > 3
    proxy.most_at_once = 0
    plugin.load_checkpoint(plugin.url)
    assert proxy.most_at_once > 3
