"""What every storage must do. A storage is tested by a subclass that has only the fixture and the back doors."""

import errno
import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_snapshot.errors import (
    DataError,
    MetadataError,
    MissingDataError,
    NotASnapshotError,
    SnapshotNotFoundError,
    StorageError,
)
from lightning_snapshot.manifest import Manifest, ObjectEntry, encode
from lightning_snapshot.storage import METADATA_NAME, Storage, Transaction

HOSTILE = [
    "",
    ".",
    "/",
    "a/..",
    "..",
    "../a",
    "a/../../b",
    "/etc/passwd",
    "//a",
    "a\0b",
    "a\\b",
    "..\\a",
    "\ud800",
]


def metadata_for(locations: Iterable[str]) -> bytes:
    entries = {f"0/{number}": ObjectEntry(name, "torch_save", "x", False) for number, name in enumerate(locations)}
    return encode(Manifest("0.1.0", 1, entries))


def located(save_id: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {f".data/{save_id}/{name}": content for name, content in files.items()}


def write(transaction: Transaction, files: dict[str, bytes]) -> None:
    for location, content in files.items():
        writer = transaction.create(location, len(content))
        writer.write(0, memoryview(content))
        writer.finish()


def save(storage: Storage, save_id: str, files: dict[str, bytes]) -> bytes:
    """Make a whole save, the way the engine does it; gives its metadata."""
    transaction = storage.begin(save_id)
    try:
        write(transaction, located(save_id, files))
        metadata = metadata_for(located(save_id, files))
        transaction.commit(metadata)
    except BaseException:
        transaction.abort()
        raise
    return metadata


def read(storage: Storage, location: str) -> bytes:
    reader = storage.open(location)
    try:
        buffer = bytearray(reader.size_bytes)
        reader.read_into(0, memoryview(buffer))
    finally:
        reader.close()
    return bytes(buffer)


class StorageContract:
    @pytest.fixture
    def storage(self) -> Storage:
        """An empty place."""
        raise NotImplementedError

    def again(self, storage: Storage) -> Storage:
        """Another object for the same place."""
        raise NotImplementedError

    def plant(self, storage: Storage, location: str, content: bytes) -> None:
        """Put a file into the place, not through the storage."""
        raise NotImplementedError

    def stored(self, storage: Storage) -> dict[str, bytes]:
        """All files in the place, seen not through the storage."""
        raise NotImplementedError

    # --- saving and reading ------------------------------------------------------------------------------------------

    def test_what_was_saved_is_read_back(self, storage):
        files = {"0": b"abc", "1": b"", "sub/folder/2": bytes(range(256)) * 5000}
        metadata = save(storage, "a", files)
        for reading in (storage, self.again(storage)):
            assert reading.is_snapshot()
            assert reading.read_metadata() == metadata
            for name, content in files.items():
                assert read(reading, f".data/a/{name}") == content

    def test_blocks_may_be_written_and_read_by_several_threads_in_any_order(self, storage):
        block_bytes, content = 1000, bytes(range(251)) * 100
        offsets = range(0, len(content), block_bytes)
        transaction = storage.begin("a")
        writer = transaction.create(".data/a/0", len(content))
        with ThreadPoolExecutor(4) as pool:
            write_block = lambda at: writer.write(at, memoryview(content)[at : at + block_bytes])  # noqa: E731 - one use
            list(pool.map(write_block, reversed(offsets)))
        writer.finish()
        transaction.commit(metadata_for([".data/a/0"]))
        reader, buffer = storage.open(".data/a/0"), bytearray(len(content))
        assert reader.size_bytes == len(content)
        with ThreadPoolExecutor(4) as pool:
            read_block = lambda at: reader.read_into(at, memoryview(buffer)[at : at + block_bytes])  # noqa: E731 - one use
            list(pool.map(read_block, reversed(offsets)))
        reader.close()
        assert buffer == content

    def test_buffers_of_any_item_size_are_bytes(self, storage):
        transaction = storage.begin("a")
        writer = transaction.create(".data/a/0", 16)
        writer.write(0, memoryview(bytearray(16)).cast("q"))
        writer.write(8, memoryview(b"\1" * 8).cast("q"))
        writer.finish()
        transaction.commit(metadata_for([".data/a/0"]))
        buffer = memoryview(bytearray(16)).cast("q")
        reader = storage.open(".data/a/0")
        reader.read_into(0, buffer)
        reader.close()
        assert buffer.tobytes() == bytes(8) + b"\1" * 8

    def test_until_commit_readers_see_the_old_snapshot(self, storage):
        old = save(storage, "a", {"0": b"old"})
        transaction = storage.begin("b")
        write(transaction, {".data/b/0": b"new"})
        assert self.again(storage).read_metadata() == old
        assert read(self.again(storage), ".data/a/0") == b"old"
        transaction.abort()

    def test_until_commit_a_new_place_has_no_snapshot(self, storage):
        transaction = storage.begin("a")
        write(transaction, {".data/a/0": b"new"})
        assert not self.again(storage).is_snapshot()
        # Where nothing can be renamed, a save cannot be hidden.
        with pytest.raises((SnapshotNotFoundError, NotASnapshotError)):
            self.again(storage).read_metadata()
        transaction.abort()

    def test_a_save_replaces_the_snapshot_and_removes_its_data(self, storage):
        save(storage, "a", {"0": b"old", "1": b"old"})
        metadata = save(storage, "b", {"0": b"new"})
        assert self.stored(storage) == {METADATA_NAME: metadata, ".data/b/0": b"new"}
        with pytest.raises(MissingDataError, match=r"\.data/a/0"):
            storage.open(".data/a/0")

    def test_data_that_the_new_metadata_still_names_is_kept(self, storage):
        save(storage, "a", {"0": b"frozen"})
        transaction = storage.begin("b")
        write(transaction, {".data/b/0": b"new"})
        metadata = metadata_for([".data/a/0", ".data/b/0"])
        transaction.commit(metadata)
        storage.begin("c").abort()
        assert self.stored(storage) == {METADATA_NAME: metadata, ".data/a/0": b"frozen", ".data/b/0": b"new"}

    def test_files_of_another_writer_stay_until_they_are_discarded(self, storage):
        self.plant(storage, METADATA_NAME, metadata_for(["0/model/weight", "batched/x"]))
        self.plant(storage, "0/model/weight", b"old")
        self.plant(storage, "batched/x", b"old")
        metadata = save(storage, "a", {"0": b"new"})
        assert self.stored(storage)["0/model/weight"] == b"old"
        storage.discard(["0/model/weight", "batched/x"])
        assert self.stored(storage) == {METADATA_NAME: metadata, ".data/a/0": b"new"}

    def test_abort_leaves_what_was_there(self, storage):
        metadata = save(storage, "a", {"0": b"old"})
        transaction = storage.begin("b")
        write(transaction, {".data/b/0": b"new"})
        transaction.create(".data/b/open", 10)
        transaction.abort()
        transaction.abort()
        assert self.stored(storage) == {METADATA_NAME: metadata, ".data/a/0": b"old"}

    def test_abort_of_the_first_save_leaves_nothing(self, storage):
        transaction = storage.begin("a")
        write(transaction, {".data/a/0": b"new"})
        transaction.abort()
        assert self.stored(storage) == {}
        with pytest.raises(SnapshotNotFoundError):
            storage.read_metadata()

    def test_abort_after_commit_is_harmless(self, storage):
        save(storage, "a", {"0": b"old"})
        transaction = storage.begin("b")
        write(transaction, {".data/b/0": b"new"})
        metadata = metadata_for([".data/b/0"])
        transaction.commit(metadata)
        transaction.abort()
        assert self.stored(storage) == {METADATA_NAME: metadata, ".data/b/0": b"new"}

    def test_a_file_that_is_not_finished_prevents_the_commit(self, storage):
        metadata = save(storage, "a", {"0": b"old"})
        transaction = storage.begin("b")
        writer = transaction.create(".data/b/0", 3)
        writer.write(0, memoryview(b"new"))
        with pytest.raises(StorageError, match="finished") as caught:
            transaction.commit(metadata_for([".data/b/0"]))
        assert caught.value.errno == errno.EBUSY
        transaction.abort()
        assert self.stored(storage) == {METADATA_NAME: metadata, ".data/a/0": b"old"}

    @pytest.mark.parametrize("save_id", ["", ".", "..", "a/b", "a.tmp", "-a", "ä", "a\0", "x" * 101, "hpc_ckpt_1"])
    def test_unsafe_save_ids_are_refused(self, storage, save_id):
        with pytest.raises(StorageError, match="save id"):
            storage.begin(save_id)

    # --- data files --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("location", HOSTILE)
    def test_locations_that_lead_out_are_refused(self, storage, location):
        save(storage, "a", {"0": b"x"})
        with pytest.raises(MetadataError) as caught:
            storage.open(location)
        assert storage.url in str(caught.value)
        assert repr(location) in str(caught.value)
        transaction = storage.begin("b")
        with pytest.raises(MetadataError):
            transaction.create(location, 1)
        transaction.abort()

    @pytest.mark.parametrize("location", ["0/model", ".data/other/0", ".data/b", ".data/b/../a/0", METADATA_NAME])
    def test_a_save_writes_only_to_its_own_folder(self, storage, location):
        transaction = storage.begin("b")
        with pytest.raises(MetadataError, match=r"\.data/b/"):
            transaction.create(location, 1)
        transaction.abort()

    def test_locations_are_normalised_like_text(self, storage):
        save(storage, "a", {"0": b"x"})
        self.plant(storage, "0/h/b", b"y")
        for location in ("0/h/a/../b", "./0//h/b", "0/missing/../../0/h/./b"):
            assert read(storage, location) == b"y"

    def test_a_missing_file_is_told_from_a_folder(self, storage):
        save(storage, "a", {"0": b"x"})
        for location in (".data/a/1", ".data/a/0/1", "elsewhere/0"):
            with pytest.raises(MissingDataError) as caught:
                storage.open(location)
            assert location in str(caught.value)
        with pytest.raises(DataError, match="found a folder") as caught:
            storage.open(".data/a")
        assert not isinstance(caught.value, MissingDataError)

    @pytest.mark.parametrize(("offset", "size"), [(0, 11), (5, 6), (10, 1), (100, 1)])
    def test_reading_behind_the_end_is_an_error(self, storage, offset, size):
        save(storage, "a", {"0": b"0123456789"})
        reader = storage.open(".data/a/0")
        with pytest.raises(DataError) as caught:
            reader.read_into(offset, memoryview(bytearray(size)))
        reader.close()
        assert ".data/a/0" in str(caught.value)
        assert f"at least {offset + size} bytes, found a file of 10 bytes" in str(caught.value)

    @pytest.mark.parametrize(("offset", "size"), [(0, 11), (10, 1), (-1, 1)])
    def test_writing_outside_of_the_size_is_an_error(self, storage, offset, size):
        transaction = storage.begin("a")
        writer = transaction.create(".data/a/0", 10)
        with pytest.raises(StorageError):
            writer.write(offset, memoryview(bytes(size)))
        transaction.abort()

    def test_a_file_is_created_once(self, storage):
        transaction = storage.begin("a")
        transaction.create(".data/a/0", 1)
        with pytest.raises(StorageError) as caught:
            transaction.create(".data/a/x/../0", 1)
        assert caught.value.errno == errno.EEXIST
        transaction.abort()

    def test_a_file_has_its_size_even_if_nothing_was_written(self, storage):
        transaction = storage.begin("a")
        transaction.create(".data/a/0", 5).finish()
        transaction.commit(metadata_for([".data/a/0"]))
        assert read(storage, ".data/a/0") == bytes(5)

    def test_closing_twice_is_harmless_and_writing_after_it_is_an_error(self, storage):
        transaction = storage.begin("a")
        writer = transaction.create(".data/a/0", 1)
        writer.finish()
        writer.close()
        writer.close()
        with pytest.raises(StorageError):
            writer.write(0, memoryview(b"x"))
        transaction.commit(metadata_for([".data/a/0"]))
        reader = storage.open(".data/a/0")
        reader.close()
        reader.close()

    # --- other things at the place -----------------------------------------------------------------------------------

    def test_nothing_is_no_snapshot(self, storage):
        assert not storage.is_snapshot()
        with pytest.raises(SnapshotNotFoundError, match="found nothing") as caught:
            storage.read_metadata()
        assert storage.url in str(caught.value)

    def test_other_files_are_no_snapshot_and_are_not_touched(self, storage):
        self.plant(storage, "notes/today.txt", b"mine")
        assert not storage.is_snapshot()
        with pytest.raises(NotASnapshotError):
            storage.read_metadata()
        with pytest.raises(NotASnapshotError):
            storage.begin("a")
        with pytest.raises(NotASnapshotError):
            storage.remove()
        assert self.stored(storage) == {"notes/today.txt": b"mine"}

    # --- removing ----------------------------------------------------------------------------------------------------

    def test_discard_removes_what_it_is_told(self, storage, caplog):
        caplog.set_level(logging.ERROR)
        metadata = save(storage, "a", {"0": b"x", "sub/1": b"y"})
        self.plant(storage, "0/h/old", b"z")
        storage.discard(["0/h/x/../old", ".data/a/sub/1", "never/there", *HOSTILE, METADATA_NAME, ".data"])
        assert self.stored(storage) == {METADATA_NAME: metadata, ".data/a/0": b"x"}

    def test_remove_leaves_nothing(self, storage):
        save(storage, "a", {"0": b"x", "sub/1": b"y"})
        storage.remove()
        assert self.stored(storage) == {}
        assert not storage.is_snapshot()
        with pytest.raises(SnapshotNotFoundError):
            storage.read_metadata()
        save(storage, "b", {"0": b"x"})
        assert storage.is_snapshot()

    def test_remove_of_nothing_is_no_error(self, storage):
        storage.remove()

    def test_remove_takes_what_the_metadata_names_and_keeps_the_rest(self, storage):
        self.plant(
            storage, METADATA_NAME, metadata_for(["0/h/x/../model", "batched/x", "0", "never/there", *HOSTILE[1:-1]])
        )
        self.plant(storage, "0/h/model", b"named")
        self.plant(storage, "batched/x", b"named")
        self.plant(storage, ".data/dead/0", b"leftover")
        for number in range(7):
            self.plant(storage, f"notes/{number}.txt", b"mine")
        with pytest.warns(UserWarning, match=r"notes/0\.txt.*notes/4\.txt(?!.*notes)"):
            storage.remove()
        assert self.stored(storage) == {f"notes/{number}.txt": b"mine" for number in range(7)}

    def test_remove_of_damaged_metadata_removes_only_our_own_data(self, storage):
        self.plant(storage, METADATA_NAME, b"\0garbage")
        self.plant(storage, ".data/a/0", b"ours")
        self.plant(storage, "0/model", b"whose?")
        with pytest.warns(UserWarning, match="0/model"):
            storage.remove()
        assert self.stored(storage) == {"0/model": b"whose?"}

    def test_remove_of_an_unfinished_save_leaves_nothing(self, storage):
        self.plant(storage, ".data/a/0", b"ours")
        with pytest.raises(NotASnapshotError):
            storage.read_metadata()
        storage.remove()
        assert self.stored(storage) == {}
