"""The contract of a storage, on each kind of bucket: in memory, and the emulators of real ones."""

import uuid

import fsspec
import obstore
import pytest
from obstore.store import MemoryStore

from lightning_snapshot.errors import MissingDataError
from lightning_snapshot.storage import METADATA_NAME, open_storage
from lightning_snapshot.storage.censor import Censor
from lightning_snapshot.storage.cloud import CloudBucket
from lightning_snapshot.storage.remote import RemoteStorage
from tests.cloud.servers import BUCKET
from tests.edges.storage_contract import StorageContract, located, metadata_for, read, save, write

_PART_BYTES = 5 * 2**20


class _Buckets(StorageContract):
    """Back doors through obstore itself."""

    def plant(self, storage, location, content):
        obstore.put(self.store(storage), storage.place.key(location), content)

    def stored(self, storage):
        store, folder = self.store(storage), storage.place.key("")
        paths = [each["path"] for each in obstore.list(store, folder).collect()]
        return {path.removeprefix(f"{folder}/"): bytes(obstore.get(store, path).bytes()) for path in paths}

    def store(self, storage):
        return storage.place.bucket._store


class TestMemory(_Buckets):
    @pytest.fixture
    def storage(self):
        bucket = CloudBucket(MemoryStore(), "memory://bucket", Censor({}))
        return RemoteStorage(bucket, "run/x.ckpt", "memory://bucket/run/x.ckpt")

    def again(self, storage):
        return RemoteStorage(storage.place.bucket, "run/x.ckpt", storage.url)

    def test_saves_of_this_process_are_not_taken_for_dead_ones(self, storage):
        first = storage.begin("a")
        write(first, {".data/a/0": b"x"})
        save(self.again(storage), "b", {"0": b"y"})
        first.commit(metadata_for([".data/a/0"]))
        assert read(storage, ".data/a/0") == b"x"

    def test_metadata_that_is_read_again_brings_new_files_with_it(self, storage):
        save(storage, "a", {"0": b"x"})
        assert read(storage, ".data/a/0") == b"x"
        save(self.again(storage), "b", {"0": b"y"})
        storage.read_metadata()
        with pytest.raises(MissingDataError):
            storage.open(".data/a/0")

    def test_a_bucket_itself_can_be_the_place(self):
        storage = RemoteStorage(CloudBucket(MemoryStore(), "memory://b", Censor({})), "", "memory://b")
        save(storage, "a", {"0": b"x"})
        save(storage, "b", {"0": b"y"})
        assert self.stored(storage).keys() == {METADATA_NAME, ".data/b/0"}
        storage.remove()
        assert self.stored(storage) == {}


class TestFsspec(StorageContract):
    @pytest.fixture
    def storage(self):
        return open_storage(f"memory://{uuid.uuid4()}/run/x.ckpt")

    def again(self, storage):
        return open_storage(storage.url)

    def plant(self, storage, location, content):
        fsspec.filesystem("memory").pipe_file(storage.place.key(location), content)

    def stored(self, storage):
        files, root = fsspec.filesystem("memory"), storage.place.key("")
        return {path.removeprefix(f"{root}/"): files.cat_file(path) for path in files.find(root)}

    def test_no_empty_folders_are_left(self, storage):
        save(storage, "a", {"sub/0": b"x"})
        storage.remove()
        files = fsspec.filesystem("memory")
        assert not files.exists(storage.place.key(""))
        assert files.isdir(storage.place.key("").rpartition("/")[0])


class TestEmulators(_Buckets):
    @pytest.fixture
    def storage(self, cloud):
        return open_storage(f"{cloud.folder}/x.ckpt", {**cloud.options, "part_bytes": _PART_BYTES})

    def again(self, storage):
        folder = storage.place.key("")
        return RemoteStorage(storage.place.bucket, folder, storage.url)

    def test_large_files_are_uploaded_in_parts_from_several_threads(self, storage):
        content = bytes(range(256)) * (13 * 2**20 // 256) + b"end"
        save(storage, "a", {"0": content})
        assert read(storage, ".data/a/0") == content

    def test_odd_names(self, cloud):
        for name in ("epoch=1-loss=0.25.ckpt", "a b.ckpt", "ä~[1]{x}%20#?.ckpt", "x..y.ckpt"):
            storage = open_storage(f"{cloud.folder}/{name}", cloud.options)
            save(storage, "a", {"0": b"x"})
            save(storage, "b", {"0": b"y"})
            assert read(storage, ".data/b/0") == b"y"
            assert self.stored(storage).keys() == {METADATA_NAME, ".data/b/0"}
            storage.remove()
            assert self.stored(storage) == {}

    def test_a_stock_checkpoint_is_replaced_and_removed(self, storage):
        store, key = self.store(storage), storage.place.key("")
        obstore.put(store, key, b"stock")
        save(storage, "a", {"0": b"x"})
        with pytest.raises(FileNotFoundError):
            storage.place.bucket.head(key)
        storage.remove()
        obstore.put(store, key, b"stock")
        storage.remove()
        with pytest.raises(FileNotFoundError):
            storage.place.bucket.head(key)

    def test_a_copy_is_a_snapshot_of_its_own(self, storage, cloud):
        metadata = save(storage, "a", {"0": b"x", "sub/1": b"y"})
        target = open_storage(f"{cloud.folder}/last.ckpt", cloud.options)
        save(target, "old", {"0": b"old"})
        target.copy_from(storage)
        storage.remove()
        assert self.stored(target) == {METADATA_NAME: metadata, **located("a", {"0": b"x", "sub/1": b"y"})}

    def test_other_ranks_join(self, storage):
        host = storage.begin("a")
        guest = self.again(storage).join("a", host.invitation)
        write(host, {".data/a/0": b"x"})
        write(guest, {".data/a/1": b"yy"})
        host.adopt(".data/a/1", 2)
        host.commit(metadata_for([".data/a/0", ".data/a/1"]))
        guest.abort()
        assert read(storage, ".data/a/1") == b"yy"


def test_the_bucket_of_the_emulators_is_named_in_urls(s3):
    assert open_storage(f"s3://{BUCKET}/x", s3.options).url == f"s3://{BUCKET}/x"
