from pathlib import Path
import pytest
from lightning_snapshot.storage import open_storage
from lightning_snapshot.storage.posix import Posix
from tests.edges.storage_contract import StorageContract, save

class TestLocalStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path):
        return open_storage(tmp_path / "run" / "epoch=3-step=400.ckpt")

    def again(self, storage):
        return open_storage(storage.url)

    def plant(self, storage, location, content):
        path = Path(storage.url, location)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def stored(self, storage):
        root = Path(storage.url)
        beside = [path for path in root.parent.glob("*") if path != root]
        assert not beside
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
