"""Snapshots in memory."""

import uuid

import pytest

from lightning_snapshot.storage import METADATA_NAME
from lightning_snapshot.storage.memory import MemoryStorage
from tests.edges.storage_contract import StorageContract, save


class TestMemoryStorage(StorageContract):
    @pytest.fixture
    def storage(self):
        return MemoryStorage(f"memory://{uuid.uuid4()}/x.ckpt")

    def again(self, storage):
        return MemoryStorage(storage.url)

    def plant(self, storage, location, content):
        storage.files[location] = content

    def stored(self, storage):
        return dict(storage.files)

    def test_places_do_not_mix(self, storage):
        save(storage, "a", {"0": b"x"})
        assert MemoryStorage(storage.url + "/other").files == {}

    def test_operations_are_noted_in_order(self, storage):
        save(storage, "a", {"0": b"x"})
        storage.read_metadata()
        assert storage.operations == [
            ("begin", "a"),
            ("create", ".data/a/0"),
            ("write", ".data/a/0"),
            ("finish", ".data/a/0"),
            ("commit", "a"),
            ("read_metadata", METADATA_NAME),
        ]
