"""Snapshots in folders of a disk."""

import errno
import fcntl
import logging
import mmap
import os
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from lightning_snapshot.errors import (
    DataError,
    MetadataError,
    NotASnapshotError,
    SnapshotNotFoundError,
    StorageError,
    StoragePermissionError,
    UnsupportedFeatureError,
)
from lightning_snapshot.manifest import decode
from lightning_snapshot.storage import METADATA_NAME, open_storage
from lightning_snapshot.storage.local import LocalStorage, clear_folder
from lightning_snapshot.storage.locations import data_locations
from lightning_snapshot.storage.posix import Posix
from tests.edges.faulty_posix import FaultyPosix, SimulatedCrash
from tests.edges.storage_contract import StorageContract, located, metadata_for, read, save, write

OLD = {"0": b"old" * 100, "1": b"old" * 10}
NEW = {"0": b"new" * 200, "sub/1": b"new"}


def local(root: Path, posix=None) -> LocalStorage:
    return LocalStorage(root, str(root), posix or FaultyPosix())


def tree(folder: Path) -> dict[str, bytes | str]:
    """All files and links below a folder, and empty folders."""
    return {
        path.relative_to(folder).as_posix(): (
            f"-> {path.readlink()}" if path.is_symlink() else path.read_bytes() if path.is_file() else "empty"
        )
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file() or not any(path.iterdir())
    }


def saved(save_id: str, files: dict[str, bytes]) -> dict[str, bytes]:
    """What `tree` shows of a snapshot."""
    return {METADATA_NAME: metadata_for(located(save_id, files)), **located(save_id, files)}


def observe(root: Path):
    """What somebody finds who wants to load from a path: a snapshot, a stock checkpoint, or None."""
    storage = local(root)
    try:
        metadata = storage.read_metadata()
    except (NotASnapshotError, SnapshotNotFoundError):
        return root.read_bytes() if root.is_file() else None
    return {
        METADATA_NAME: metadata,
        **{name: read(storage, name) for name in data_locations(decode(metadata, source=""))},
    }


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "run" / "epoch=3-step=400.ckpt"


class TestContract(StorageContract):
    @pytest.fixture
    def storage(self, root):
        return open_storage(root)

    def again(self, storage):
        return open_storage(storage.url)

    def plant(self, storage, location, content):
        path = Path(storage.url, location)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def stored(self, storage):
        root = Path(storage.url)
        assert not [path for path in root.parent.glob("*") if path != root]
        return {name: content for name, content in tree(root).items() if (name, content) != (".data", "empty")}


class TestOpenStorage:
    @pytest.mark.parametrize(
        "form", ["{}", "{}/", "file://{}", "file://{}//", "local://{}", "file:{}", "{}/x/..", "{}/."]
    )
    def test_forms_of_a_path(self, root, form):
        storage = open_storage(form.format(root))
        assert storage.url == form.format(root)
        save(storage, "a", OLD)
        assert tree(root) == saved("a", OLD)

    def test_path_objects(self, root):
        save(open_storage(root), "a", OLD)
        assert tree(root) == saved("a", OLD)

    @pytest.mark.parametrize("form", ["x.ckpt", "./x.ckpt", "file://x.ckpt", "sub/../x.ckpt"])
    def test_relative_paths_do_not_move_with_the_working_folder(self, tmp_path, monkeypatch, form):
        monkeypatch.chdir(tmp_path)
        storage = open_storage(form)
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        save(storage, "a", OLD)
        assert tree(tmp_path / "x.ckpt") == saved("a", OLD)
        assert {path.name for path in tmp_path.iterdir()} == {"x.ckpt", "elsewhere"}

    def test_parent_parts_mean_what_the_file_system_says(self, tmp_path):
        (tmp_path / "far/inner").mkdir(parents=True)
        (tmp_path / "near").symlink_to(tmp_path / "far/inner")
        save(open_storage(f"{tmp_path}/near/../x.ckpt"), "a", OLD)
        assert tree(tmp_path / "far/x.ckpt") == saved("a", OLD)

    def test_unknown_protocols_are_refused(self):
        with pytest.raises(UnsupportedFeatureError, match=r"nowhere://bucket/x: .*not known"):
            open_storage("nowhere://bucket/x")

    def test_a_url_that_went_through_pathlib_is_refused(self):
        with pytest.raises(NotASnapshotError, match=r"'s3://bucket/x'.*found 's3:/bucket/x'.*pathlib"):
            open_storage(Path("s3://bucket/x"))

    @pytest.mark.parametrize("url", ["registry:model", "registry:org/team/model:version:v2", "Registry:x"])
    def test_the_model_registry_needs_litmodels(self, url):
        with pytest.raises(UnsupportedFeatureError, match="litmodels"):
            open_storage(url)

    @pytest.mark.parametrize("url", ["", "file://", "a\0b"])
    def test_no_path_is_an_error(self, url):
        with pytest.raises(NotASnapshotError, match="expected the path"):
            open_storage(url)

    def test_options_that_would_be_ignored_are_refused(self, root):
        with pytest.raises(UnsupportedFeatureError, match="anon"):
            open_storage(root, {"anon": True})
        save(open_storage(root, {}), "a", OLD)


class TestReading:
    def test_nothing_behind_a_link(self, tmp_path):
        (tmp_path / "x").symlink_to("gone")
        with pytest.raises(SnapshotNotFoundError, match=r"a link to .*gone"):
            local(tmp_path / "x").read_metadata()

    def test_snapshots_are_found_behind_links(self, root, tmp_path):
        save(local(root), "a", OLD)
        (tmp_path / "last.ckpt").symlink_to(root)
        assert local(tmp_path / "last.ckpt").is_snapshot()
        assert observe(tmp_path / "last.ckpt") == saved("a", OLD)

    @pytest.mark.parametrize(
        ("files", "words"),
        [
            ({}, "an empty folder"),
            ({".data/a/0": b""}, "unfinished save"),
            ({".metadata": b"", "__0_0.distcp": b""}, r"\(DCP\)"),
            ({"meta.pt": b"", "__0_0.distcp": b""}, r"\(DCP\).*FSDP"),
            ({"notes.txt": b""}, "a folder that holds other things"),
        ],
    )
    def test_other_folders_are_told_apart(self, root, files, words):
        root.mkdir(parents=True)
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
        with pytest.raises(NotASnapshotError, match=words) as caught:
            local(root).read_metadata()
        assert str(root) in str(caught.value)

    def test_a_file_is_no_snapshot(self, tmp_path):
        (tmp_path / "stock.ckpt").write_bytes(b"PK")
        assert not local(tmp_path / "stock.ckpt").is_snapshot()
        with pytest.raises(NotASnapshotError, match="found a file"):
            local(tmp_path / "stock.ckpt").read_metadata()

    def test_a_place_below_a_file_is_nothing(self, tmp_path):
        (tmp_path / "stock.ckpt").write_bytes(b"PK")
        with pytest.raises(SnapshotNotFoundError):
            local(tmp_path / "stock.ckpt" / "x").read_metadata()

    def test_metadata_that_cannot_be_metadata(self, root):
        root.mkdir(parents=True)
        with (root / METADATA_NAME).open("wb") as file:
            file.truncate(4 * 1024**3 + 1)
        with pytest.raises(MetadataError, match="at most 4294967296 bytes"):
            local(root).read_metadata()
        (root / METADATA_NAME).unlink()
        (root / METADATA_NAME).mkdir()
        with pytest.raises(MetadataError, match="found a folder"):
            local(root).read_metadata()

    @pytest.mark.parametrize("link", ["file", "folder"])
    def test_links_that_lead_out_are_refused(self, root, tmp_path, link):
        save(local(root), "a", OLD)
        (tmp_path / "secret").write_bytes(b"secret")
        if link == "file":
            (root / "0").symlink_to(tmp_path / "secret")
        else:
            (root / "0").symlink_to(tmp_path)
        location = "0" if link == "file" else "0/secret"
        with pytest.raises(MetadataError, match="found a link to") as caught:
            local(root).open(location)
        assert repr(location) in str(caught.value)
        assert str(tmp_path / "secret") in str(caught.value)

    def test_links_inside_are_followed(self, root):
        save(local(root), "a", OLD)
        (root / "0").symlink_to(".data/a/0")
        assert read(local(root), "0") == OLD["0"]

    def test_a_pipe_is_refused_instead_of_waited_for(self, root):
        root.mkdir(parents=True)
        os.mkfifo(root / "0")
        with pytest.raises(DataError, match="found a device or pipe"):
            local(root).open("0")

    def test_short_reads_and_writes_go_on(self, root):
        posix = FaultyPosix(most_bytes=7)
        save(local(root, posix), "a", OLD)
        assert observe(root) == saved("a", OLD)
        assert read(local(root, posix), ".data/a/0") == OLD["0"]

    def test_a_file_that_shrinks_while_it_is_open(self, root):
        save(local(root), "a", OLD)
        reader = local(root).open(".data/a/0")
        os.truncate(root / ".data/a/0", 5)
        with pytest.raises(DataError, match=r"expected at least 300 bytes, found a file of 5 bytes"):
            reader.read_into(0, memoryview(bytearray(300)))
        reader.close()

    def test_refusals_of_the_system_keep_their_errno(self, root):
        save(local(root), "a", OLD)
        posix = FaultyPosix(fail_at=1, error=errno.EACCES)
        with pytest.raises(StoragePermissionError, match=r"could not open .*\.data/a/0") as caught:
            local(root, posix).open(".data/a/0")
        assert caught.value.errno == errno.EACCES
        posix = FaultyPosix(fail_at=2, error=errno.EIO)
        reader = local(root, posix).open(".data/a/0")
        with pytest.raises(StorageError, match="could not read 10 bytes at offset 20 of") as caught:
            reader.read_into(20, memoryview(bytearray(10)))
        assert caught.value.errno == errno.EIO
        reader.close()


class TestSaving:
    def test_a_new_name_appears_at_commit_and_nothing_looks_like_a_checkpoint_before(self, root):
        transaction = local(root).begin("a")
        write(transaction, located("a", NEW))
        (staging,) = root.parent.iterdir()
        assert "ckpt_" not in staging.name
        assert staging.name.startswith(".snapshot-")
        assert not staging.name.endswith(".ckpt")
        transaction.commit(metadata_for(located("a", NEW)))
        assert [path.name for path in root.parent.iterdir()] == [root.name]
        assert tree(root) == saved("a", NEW)

    def test_an_empty_folder_is_a_claim_and_is_replaced(self, root):
        root.mkdir(parents=True)
        save(local(root), "a", NEW)
        assert tree(root.parent) == {f"{root.name}/{name}": content for name, content in saved("a", NEW).items()}

    def test_an_unfinished_save_is_replaced(self, root):
        (root / ".data/dead/sub").mkdir(parents=True)
        (root / ".data/dead/sub/0").write_bytes(b"dead")
        (root / ".data/dead.metadata").write_bytes(b"dead")
        save(local(root), "a", NEW)
        assert tree(root) == saved("a", NEW)

    def test_a_file_is_replaced(self, root):
        root.parent.mkdir()
        root.write_bytes(b"stock")
        save(local(root), "a", NEW)
        assert tree(root.parent) == {f"{root.name}/{name}": content for name, content in saved("a", NEW).items()}

    @pytest.mark.parametrize("without", [(), ("exchange",)])
    @pytest.mark.parametrize("target", ["best.ckpt", "stock.ckpt", "dangling.ckpt"])
    def test_a_link_is_replaced_and_its_target_is_not_touched(self, root, target, without):
        save(local(root.with_name("best.ckpt")), "best", OLD)
        root.with_name("stock.ckpt").write_bytes(b"stock")
        before = tree(root.parent)
        root.symlink_to(target)
        save(local(root, FaultyPosix(without=without)), "a", NEW)
        assert not root.is_symlink()
        assert tree(root.parent) == before | {
            f"{root.name}/{name}": content for name, content in saved("a", NEW).items()
        }

    @pytest.mark.parametrize("name", [".metadata", "meta.pt", "notes.txt", ".hidden"])
    def test_other_folders_are_refused_untouched(self, root, name):
        root.mkdir(parents=True)
        (root / name).write_bytes(b"mine")
        with pytest.raises(NotASnapshotError, match="nothing was changed") as caught:
            local(root).begin("a")
        assert ("DCP" in str(caught.value)) == name.startswith(".meta") or name == "meta.pt"
        assert tree(root.parent) == {f"{root.name}/{name}": b"mine"}

    def test_a_data_folder_that_is_a_link_is_not_written_through(self, root, tmp_path):
        save(local(root), "a", OLD)
        (tmp_path / "elsewhere").mkdir()
        (root / ".data").rename(tmp_path / "moved")
        (root / ".data").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(StorageError, match="found a link"):
            local(root).begin("b")
        assert tree(tmp_path / "elsewhere") == {}

    def test_a_parent_that_is_a_file(self, root):
        root.parent.write_bytes(b"")
        with pytest.raises(StorageError, match="could not start a save to"):
            local(root).begin("a")

    def test_rights_are_what_the_umask_leaves(self, root):
        before = os.umask(0o027)
        try:
            save(local(root), "a", NEW)
        finally:
            os.umask(before)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [root, *root.rglob("*")]}
        assert modes == {
            root.name: 0o750,
            METADATA_NAME: 0o640,
            ".data": 0o750,
            "a": 0o750,
            "0": 0o640,
            "sub": 0o750,
            "1": 0o640,
        }

    @pytest.mark.parametrize("writer", ["ours", "torchsnapshot"])
    def test_the_folders_time_changes_with_commits_only(self, root, writer):
        """Lightning takes the folder with the latest modification time for the last checkpoint."""
        if writer == "ours":
            save(local(root), "a", OLD)
        else:
            (root / "0").mkdir(parents=True)
            (root / "0/model").write_bytes(b"old")
            (root / METADATA_NAME).write_bytes(metadata_for(["0/model"]))
        os.utime(root, (1, 1))
        local(root).begin("failed").abort()
        transaction = local(root).begin("b")
        write(transaction, located("b", NEW))
        assert root.stat().st_mtime == 1
        transaction.commit(metadata_for(located("b", NEW)))
        assert root.stat().st_mtime > 1
        os.utime(root, (2, 2))
        local(root).discard(["0/model"])
        assert tree(root) == saved("b", NEW)
        assert root.stat().st_mtime == 2
        local(root).begin("c").abort()
        assert root.stat().st_mtime == 2

    def test_no_space_is_an_error_before_anything_is_written(self, root):
        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        posix = FaultyPosix(before={"allocate": full})
        transaction = local(root, posix).begin("a")
        with pytest.raises(StorageError, match=r"could not reserve 4096 bytes for .*\.data/a/0: No space") as caught:
            transaction.create(".data/a/0", 4096)
        assert caught.value.errno == errno.ENOSPC
        transaction.abort()
        assert "write" not in [call.name for call in posix.calls]
        assert posix.open_paths == []

    def test_space_is_reserved_when_the_file_is_created(self, root):
        transaction = local(root).begin("a")
        transaction.create(".data/a/0", 1 << 20)
        (path,) = root.parent.rglob("0")
        assert path.stat().st_size == 1 << 20
        assert path.stat().st_blocks * 512 >= 1 << 20
        transaction.abort()

    def test_a_write_that_makes_no_progress_is_an_error(self, root):
        transaction = local(root, FaultyPosix(most_bytes=0)).begin("a")
        writer = transaction.create(".data/a/0", 3)
        with pytest.raises(StorageError, match="nothing was written"):
            writer.write(0, memoryview(b"abc"))
        transaction.abort()

    def test_nothing_stays_open(self, root):
        posix = FaultyPosix()
        save(local(root, posix), "a", OLD)
        save(local(root, posix), "b", NEW)
        local(root, posix).begin("c").abort()
        assert posix.open_paths == []


class TestTogether:
    """Several saves to one place, at the same time."""

    @pytest.mark.parametrize("exists", [False, True])
    def test_a_save_that_lives_is_not_taken_for_a_leftover(self, root, exists):
        if exists:
            save(local(root), "old", OLD)
        first, second = local(root).begin("first"), local(root).begin("second")
        write(first, located("first", OLD))
        write(second, located("second", NEW))
        local(root.with_name("neighbour.ckpt")).begin("third").abort()
        first.commit(metadata_for(located("first", OLD)))
        assert observe(root) == saved("first", OLD)
        second.commit(metadata_for(located("second", NEW)))
        assert tree(root.parent) == {f"{root.name}/{name}": content for name, content in saved("second", NEW).items()}

    @pytest.mark.parametrize("exists", [False, True])
    def test_a_second_save_of_the_same_id_is_refused_and_the_first_goes_on(self, root, exists):
        if exists:
            save(local(root), "old", OLD)
        transaction = local(root).begin("a")
        write(transaction, located("a", NEW))
        with pytest.raises(StorageError) as caught:
            local(root).begin("a")
        assert caught.value.errno == errno.EEXIST
        transaction.commit(metadata_for(located("a", NEW)))
        assert tree(root) == saved("a", NEW)

    def test_the_lock_of_a_process_ends_with_it(self, root):
        program = (
            "import sys\nfrom lightning_snapshot.storage import open_storage\n"
            "transaction = open_storage(sys.argv[1]).begin('other')\n"
            "transaction.create('.data/other/0', 1)\nprint('ready', flush=True)\nsys.stdin.read()"
        )
        command = [sys.executable, "-c", program, str(root)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"ready\n"
            left = root.parent / ".snapshot-other.tmp"
            local(root).begin("a").abort()
            assert left.exists()
            process.kill()
            process.wait()
            local(root).begin("b").abort()
            assert not left.exists()

    def test_a_folder_that_is_cleaned_away_before_it_is_locked_is_made_again(self, root):
        removed = []

        def clean(path):
            if not removed:
                removed.append(path)
                path.rmdir()

        save(local(root, FaultyPosix(before={"open_folder": clean})), "a", OLD)
        assert tree(root) == saved("a", OLD)
        removed.clear()
        # This time between opening and locking.
        save(local(root, FaultyPosix(after={"open_folder": clean})), "b", NEW)
        assert removed
        assert tree(root) == saved("b", NEW)

    def test_another_save_that_commits_first_is_replaced_and_foreign_files_are_kept(self, root):
        transaction = local(root).begin("a")
        write(transaction, located("a", NEW))
        save(local(root), "b", OLD)
        (root / "notes.txt").write_bytes(b"mine")
        transaction.commit(metadata_for(located("a", NEW)))
        assert tree(root.parent) == {
            f"{root.name}/{name}": content for name, content in (saved("a", NEW) | {"notes.txt": b"mine"}).items()
        }

    @pytest.mark.parametrize("kind", ["file", "link"])
    def test_a_file_or_link_that_appears_meanwhile_is_replaced(self, root, kind):
        transaction = local(root).begin("a")
        write(transaction, located("a", NEW))
        if kind == "file":
            root.write_bytes(b"stock")
        else:
            root.symlink_to("gone")
        transaction.commit(metadata_for(located("a", NEW)))
        assert tree(root.parent) == {f"{root.name}/{name}": content for name, content in saved("a", NEW).items()}

    def test_a_place_that_changes_just_before_the_rename_is_looked_at_again(self, root):
        def appear(source, target):
            if target == root and not root.exists():
                save(local(root), "b", OLD)

        save(local(root, FaultyPosix(before={"rename": appear})), "a", NEW)
        assert tree(root) == saved("a", NEW)

    def test_a_foreign_folder_that_appears_meanwhile_is_kept(self, root):
        transaction = local(root).begin("a")
        write(transaction, located("a", NEW))
        root.mkdir()
        (root / "notes.txt").write_bytes(b"mine")
        with pytest.raises(NotASnapshotError):
            transaction.commit(metadata_for(located("a", NEW)))
        transaction.abort()
        assert tree(root.parent) == {f"{root.name}/notes.txt": b"mine"}

    def test_what_a_living_save_has_moved_inside_is_not_taken_for_a_leftover(self, root):
        def clean(source, target):
            if target == root / METADATA_NAME:
                local(root).begin("cleaner").abort()

        transaction = local(root, FaultyPosix(before={"rename": clean})).begin("a")
        write(transaction, located("a", NEW))
        save(local(root), "b", OLD)
        transaction.commit(metadata_for(located("a", NEW)))
        assert tree(root) == saved("a", NEW)

    def test_a_cleaner_that_comes_late_does_not_take_the_folder_that_was_made_anew(self, root):
        (root.parent / ".snapshot-a.tmp").mkdir(parents=True)
        living = []

        def replace(*_):
            if not living:
                (root.parent / ".snapshot-a.tmp").rmdir()
                living.append(local(root).begin("a"))

        local(root, FaultyPosix(before={"lock": replace})).begin("b").abort()
        write(living[0], located("a", NEW))
        living[0].commit(metadata_for(located("a", NEW)))
        assert tree(root) == saved("a", NEW)

    def test_a_lock_that_a_forked_child_still_holds_is_given_back(self, root):
        def refuse(*_):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))

        posix = FaultyPosix(before={"remove_folder": refuse})
        transaction = local(root, posix).begin("a")
        (inherited,) = [os.dup(descriptor) for descriptor in posix.descriptors]
        try:
            transaction.abort()
            assert _names_beside(root) == {".snapshot-a.tmp"}
            local(root).begin("b").abort()
            assert _names_beside(root) == set()
        finally:
            os.close(inherited)

    def test_leftovers_are_removed_when_a_save_begins(self, root):
        _snapshot_with_leftovers(root)
        local(root).begin("a").abort()
        assert tree(root.parent) == {f"{root.name}/{name}": content for name, content in saved("old", OLD).items()}

    def test_what_an_exchange_has_replaced_goes_when_the_exchange_is_durable(self, root):
        root.parent.mkdir()
        (root.parent / ".snapshot-a.tmp").write_bytes(b"stock")
        posix = FaultyPosix()
        local(root, posix).begin("b").abort()
        assert not (root.parent / ".snapshot-a.tmp").exists()
        names = [call.name for call in posix.calls]
        assert names.index("sync_folder") < names.index("unlink")

    def test_a_folder_is_not_locked_through_a_link(self, tmp_path):
        (tmp_path / "link").symlink_to(tmp_path)
        with pytest.raises(OSError, match="link"):
            Posix().open_folder(tmp_path / "link")

    def test_folders_that_only_look_like_leftovers_are_kept(self, root):
        (root.parent / ".snapshot-mine.tmp").mkdir(parents=True)
        (root.parent / ".snapshot-mine.tmp/notes.txt").write_bytes(b"mine")
        (root.parent / ".snapshot-mine.old/inner").mkdir(parents=True)
        (root.parent / ".snapshot-mine.old/inner/notes.txt").write_bytes(b"mine")
        (root / ".data/not a save").mkdir(parents=True)
        (root / METADATA_NAME).write_bytes(metadata_for([]))
        before = tree(root.parent)
        local(root).begin("a").abort()
        assert tree(root.parent) == before

    def test_without_locks_only_what_was_complete_is_removed(self, root):
        posix = FaultyPosix(without=("lock",))
        save(local(root, posix), "a", OLD)
        (root / ".data/unknown").mkdir()
        save(local(root, posix), "b", NEW)
        assert tree(root) == saved("b", NEW) | {".data/unknown": "empty"}

    def test_leftovers_that_cannot_be_removed_do_not_stop_a_save(self, root, caplog):
        def refuse(*_):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))

        save(local(root), "a", OLD)
        posix = FaultyPosix(before={"unlink": refuse})
        with caplog.at_level(logging.WARNING, logger="lightning_snapshot"):
            save(local(root, posix), "b", NEW)
        assert "could not remove" in caplog.text
        assert observe(root) == saved("b", NEW)
        save(local(root), "c", NEW)
        assert tree(root) == saved("c", NEW)


class TestRemoving:
    @pytest.mark.parametrize("target", ["best.ckpt", "stock.ckpt", "dangling.ckpt"])
    def test_only_the_link_is_removed(self, root, target):
        save(local(root.with_name("best.ckpt")), "best", OLD)
        root.with_name("stock.ckpt").write_bytes(b"stock")
        before = tree(root.parent)
        root.symlink_to(target)
        local(root).remove()
        assert tree(root.parent) == before

    def test_a_stock_checkpoint_is_removed(self, root):
        root.parent.mkdir()
        root.write_bytes(b"stock")
        local(root).remove()
        assert tree(root.parent) == {}

    def test_an_empty_folder_is_removed(self, root):
        root.mkdir(parents=True)
        local(root).remove()
        assert not root.exists()

    @pytest.mark.parametrize("mark", [".metadata", "meta.pt"])
    def test_sharded_checkpoints_of_lightning_are_removed_whole(self, root, mark):
        (root / "sub").mkdir(parents=True)
        for name in (mark, "__0_0.distcp", "sub/x"):
            (root / name).write_bytes(b"")
        local(root).remove()
        assert not root.exists()

    def test_the_metadata_goes_first(self, root):
        save(local(root), "a", OLD)
        posix = FaultyPosix()
        local(root, posix).remove()
        changes = [call for call in posix.calls if call.name in ("rename", "unlink", "remove_folder", "sync_folder")]
        assert [(call.name, call.paths[0]) for call in changes[:2]] == [
            ("rename", root / METADATA_NAME),
            ("sync_folder", root),
        ]

    @pytest.mark.parametrize("prepare", ["ours", "torchsnapshot"])
    def test_a_removal_that_is_killed_anywhere_is_finished_by_the_next_save_or_removal(self, tmp_path, prepare):
        number, posix = 0, FaultyPosix()
        while number == 0 or posix.crashed:
            number += 1
            for end in ("save", "remove", "clear"):
                root = tmp_path / f"{number} {end}" / "x.ckpt"
                (_snapshot if prepare == "ours" else _torchsnapshot)(root)
                old = observe(root)
                posix = FaultyPosix(crash_at=number)
                with suppress(SimulatedCrash):
                    local(root, posix).remove()
                assert observe(root) in (old, None), number
                if end == "save":
                    save(local(root), "new", NEW)
                    local(root).discard(located("old", OLD) if prepare == "ours" else ["0/model"])
                    assert tree(root.parent) == {f"x.ckpt/{name}": part for name, part in saved("new", NEW).items()}
                elif end == "remove":
                    local(root).remove()
                    assert tree(root.parent) == {}, number
                else:
                    gone = observe(root) is None
                    clear_folder(root.parent, FaultyPosix())
                    assert (tree(root.parent) == {}) == gone, number
                    assert observe(root) == (None if gone else old), number
        assert number > 5

    def test_what_others_put_into_the_data_folder_is_kept(self, root):
        save(local(root), "a", OLD)
        (root / ".data/notes.txt").write_bytes(b"mine")
        with pytest.warns(UserWarning, match=r"kept .*: \.data/notes\.txt$"):
            local(root).remove()
        assert tree(root) == {".data/notes.txt": b"mine"}

    def test_a_folder_that_also_holds_other_things_is_no_unfinished_save(self, root):
        (root / ".data/images").mkdir(parents=True)
        (root / "main.py").write_bytes(b"mine")
        before = tree(root)
        for action in (local(root).remove, lambda: local(root).begin("new")):
            with pytest.raises(NotASnapshotError, match="a folder that holds other things"):
                action()
        assert tree(root) == before

    def test_nothing_behind_links_is_removed(self, root, tmp_path):
        (tmp_path / "far/inner").mkdir(parents=True)
        (tmp_path / "far/inner/0").write_bytes(b"mine")
        save(local(root), "a", OLD)
        (root / ".data/a/link").symlink_to(tmp_path / "far")
        (root / "out").symlink_to(tmp_path / "far")
        (root / "file").symlink_to(tmp_path / "far/inner/0")
        (root / METADATA_NAME).write_bytes(metadata_for(["out/inner/0", "file"]))
        local(root).discard(["out/inner/0"])
        with pytest.warns(UserWarning, match="out"):
            local(root).remove()
        assert tree(root) == {"out": f"-> {tmp_path}/far"}
        assert tree(tmp_path / "far") == {"inner/0": b"mine"}

    def test_discard_never_raises(self, root, caplog):
        save(local(root), "a", OLD)
        with caplog.at_level(logging.WARNING, logger="lightning_snapshot"):
            local(root, FaultyPosix(fail_at=1, error=errno.EACCES)).discard([".data/a/0", ".data/a/1"])
        assert "could not remove '.data/a/0'" in caplog.text
        assert list(tree(root)) == [METADATA_NAME, ".data/a/0"]
        local(root.with_name("nothing")).discard(["0"])

    def test_discard_leaves_the_folder_in_which_saves_begin(self, root):
        save(local(root), "a", OLD)
        local(root).discard(located("a", OLD))
        assert tree(root) == {METADATA_NAME: metadata_for(located("a", OLD)), ".data": "empty"}

    def test_a_refusal_is_an_error(self, root):
        save(local(root), "a", OLD)

        def refuse(source, target):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))

        with pytest.raises(StoragePermissionError, match="could not remove"):
            local(root, FaultyPosix(before={"rename": refuse})).remove()
        assert observe(root) == saved("a", OLD)


def _refusal(number: int):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    return refuse


class TestSystemsThatKnowLess:
    """What network file systems and other kernels answer; the system calls themselves are replaced."""

    @pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
    def test_space_that_cannot_be_reserved(self, root, monkeypatch, number):
        monkeypatch.setattr(os, "posix_fallocate", _refusal(number))
        transaction = open_storage(root).begin("a")
        transaction.create(".data/a/0", 1000).finish()
        transaction.commit(metadata_for([".data/a/0"]))
        assert read(open_storage(root), ".data/a/0") == bytes(1000)

    def test_space_that_is_not_there(self, root, monkeypatch):
        monkeypatch.setattr(os, "posix_fallocate", _refusal(errno.ENOSPC))
        with pytest.raises(StorageError, match="No space"):
            save(open_storage(root), "a", OLD)

    @pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
    def test_folders_that_cannot_be_synced(self, root, monkeypatch, number):
        real = os.fsync

        def files_only(descriptor):
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                _refusal(number)()
            real(descriptor)

        monkeypatch.setattr(os, "fsync", files_only)
        save(open_storage(root), "a", OLD)
        assert tree(root) == saved("a", OLD)

    @pytest.mark.parametrize("of", ["folder", "file"])
    def test_a_sync_that_fails_is_an_error(self, root, monkeypatch, of):
        def fail(descriptor):
            if stat.S_ISDIR(os.fstat(descriptor).st_mode) == (of == "folder"):
                _refusal(errno.EIO)()

        monkeypatch.setattr(os, "fsync", fail)
        root.parent.mkdir()
        with pytest.raises(StorageError) as caught:
            save(open_storage(root), "a", OLD)
        assert caught.value.errno == errno.EIO
        assert observe(root) is None

    @pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
    def test_no_locks(self, root, monkeypatch, number):
        monkeypatch.setattr(fcntl, "flock", _refusal(number))
        save(open_storage(root), "a", OLD)
        transaction = open_storage(root).begin("living")
        save(open_storage(root), "b", NEW)
        transaction.create(".data/living/0", 1)
        transaction.abort()
        assert tree(root) == saved("b", NEW)

    def test_no_scattered_reads(self, root, monkeypatch):
        save(open_storage(root), "a", OLD)
        monkeypatch.delattr(os, "preadv")
        assert read(open_storage(root), ".data/a/0") == OLD["0"]


# --- faults at every operation ---------------------------------------------------------------------------------------


def _nothing(root: Path) -> None:
    root.parent.mkdir()


def _no_parents(root: Path) -> None:
    pass


def _claim(root: Path) -> None:
    root.mkdir(parents=True)


def _snapshot(root: Path) -> None:
    save(local(root), "old", OLD)


def _snapshot_with_leftovers(root: Path) -> None:
    save(local(root), "old", OLD)
    (root / ".data/dead").mkdir()
    (root / ".data/dead/0").write_bytes(b"dead")
    (root / ".data/dead.metadata").write_bytes(b"dead")
    (root.parent / ".snapshot-dead.tmp/.data/dead").mkdir(parents=True)


def _torchsnapshot(root: Path) -> None:
    (root / "0").mkdir(parents=True)
    (root / "0/model").write_bytes(b"old")
    (root / METADATA_NAME).write_bytes(metadata_for(["0/model"]))


def _unfinished(root: Path) -> None:
    (root / ".data/dead").mkdir(parents=True)
    (root / ".data/dead/0").write_bytes(b"dead")


def _stock(root: Path) -> None:
    root.parent.mkdir()
    root.write_bytes(b"stock")


def _link(root: Path) -> None:
    save(local(root.with_name("best.ckpt")), "best", OLD)
    root.symlink_to("best.ckpt")


SCENES = {
    scene.__name__.strip("_"): scene
    for scene in (
        *(
            _nothing,
            _no_parents,
            _claim,
            _snapshot,
            _snapshot_with_leftovers,
            _torchsnapshot,
            _unfinished,
            _stock,
            _link,
        ),
    )
}
EVERYTHING, NO_EXCHANGE, NO_LOCKS = (), ("exchange",), ("exchange", "lock")
SITUATIONS = [
    *(pytest.param(prepare, EVERYTHING, id=name) for name, prepare in SCENES.items()),
    pytest.param(_stock, NO_EXCHANGE, id="stock, no exchange"),
    pytest.param(_link, NO_EXCHANGE, id="link, no exchange"),
    pytest.param(_nothing, NO_LOCKS, id="nothing, no locks"),
    pytest.param(_snapshot_with_leftovers, NO_LOCKS, id="snapshot_with_leftovers, no locks"),
]


def _names_beside(root: Path) -> set[str]:
    return {path.name for path in root.parent.glob("*")}


@pytest.mark.parametrize("fault", ["fail_at", "crash_at"])
@pytest.mark.parametrize(("prepare", "without"), SITUATIONS)
def test_a_fault_at_any_operation_leaves_the_old_or_the_new(tmp_path, prepare, without, fault):
    new, latest = saved("new", NEW), saved("latest", OLD)
    number, finished = 0, False
    while not finished:
        number += 1
        root = tmp_path / str(number) / "x.ckpt"
        prepare(root)
        old, beside = observe(root), _names_beside(root)
        posix = FaultyPosix(without=without, **{fault: number})
        returned = False
        try:
            save(local(root, posix), "new", NEW)
            returned = True
        except (StorageError, SimulatedCrash):
            pass
        finished = len(posix.calls) < number and not posix.crashed
        assert posix.open_paths == [], number
        seen = observe(root)
        assert seen == new if returned else seen in (old, new), number

        save(local(root), "latest", OLD)
        assert observe(root) == latest, number
        if prepare is _link:
            assert observe(root.with_name("best.ckpt")) == saved("best", OLD), number
        if "lock" not in without:
            assert _names_beside(root) == beside - {".snapshot-dead.tmp"} | {root.name}, number
            assert {path.name for path in (root / ".data").iterdir()} == {"latest"}, number
    assert number > 20, "the faults never met the save"


@pytest.mark.parametrize(("prepare", "without"), SITUATIONS)
def test_everything_is_durable_before_it_is_published_and_then_before_the_old_goes(tmp_path, prepare, without):
    root = tmp_path / "run" / "x.ckpt"
    prepare(root)
    posix = FaultyPosix(without=without)
    storage = local(root, posix)
    transaction = storage.begin("new")
    begun = len(posix.calls)
    write(transaction, located("new", NEW))
    transaction.commit(metadata_for(located("new", NEW)))
    calls = posix.calls

    published = max(
        at
        for at, call in enumerate(calls)
        if call.name in ("rename", "exchange") and call.paths[-1] in (root, root / METADATA_NAME)
    )
    for at, call in enumerate(calls[:published]):
        path = call.paths[0] if call.paths else None
        if call.name in ("create_file", "make_folder") and ".old" not in path.name:
            assert any(
                later.name == "sync_folder" and later.paths[0] == path.parent for later in calls[at:published]
            ), path
        if call.name in ("create_file", "write", "allocate"):
            assert any(later.name == "sync" and later.paths[0] == path for later in calls[at:published]), path
    changed = root if calls[published].paths[-1] == root / METADATA_NAME else root.parent
    after = [call for call in calls[published + 1 :] if call.name in ("sync_folder", "unlink", "remove_folder")]
    assert (after[0].name, after[0].paths[0]) == ("sync_folder", changed)
    assert not any(call.name in ("unlink", "remove_folder") for call in calls[begun:published])


def test_a_commit_that_may_not_be_durable_says_so_and_is_not_undone(root):
    save(local(root), "old", OLD)

    def fail_behind_the_rename(path):
        if any(call.name == "rename" for call in posix.calls):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    posix = FaultyPosix(before={"sync_folder": fail_behind_the_rename})
    with pytest.raises(StorageError, match="which is in place"):
        save(local(root, posix), "new", NEW)
    assert observe(root) == saved("new", NEW)
    # If a power cut undoes the rename, the old snapshot is the one that counts.
    assert (root / ".data/old/0").read_bytes() == OLD["0"]


@pytest.mark.parametrize("prepare", SCENES.values(), ids=SCENES)
@pytest.mark.parametrize("name", ["rename", "exchange"])
def test_an_interrupt_right_behind_the_commit_does_not_undo_it(tmp_path, prepare, name):
    root = tmp_path / "run" / "x.ckpt"
    prepare(root)

    def interrupt(*_):
        raise KeyboardInterrupt

    posix = FaultyPosix(after={name: interrupt})
    with suppress(KeyboardInterrupt):
        save(local(root, posix), "new", NEW)
    assert observe(root) == saved("new", NEW)
    save(local(root), "latest", OLD)
    assert observe(root) == saved("latest", OLD)


@pytest.mark.parametrize("prepare", [_stock, _link])
def test_an_exchange_in_two_steps_that_was_killed_is_finished_by_the_next_reader(tmp_path, prepare):
    root = tmp_path / "run" / "x.ckpt"
    prepare(root)

    def crash(source, target):
        if source == root:
            posix.crash_at = len(posix.calls) + 1

    posix = FaultyPosix(without=("exchange",), after={"rename": crash})
    with pytest.raises(SimulatedCrash):
        save(local(root, posix), "new", NEW)
    assert not os.path.lexists(root)
    reading = FaultyPosix()
    local(root, reading).read_metadata()
    changes = [call.name for call in reading.calls if call.name in ("rename", "sync_folder", "unlink", "remove_folder")]
    assert changes == ["rename", "sync_folder", "unlink", "remove_folder", "sync_folder"]
    assert observe(root) == saved("new", NEW)
    assert _names_beside(root) - {"best.ckpt"} == {root.name}


def test_an_exchange_in_two_steps_that_others_finish_and_then_replace_is_no_failure(root):
    _stock(root)

    def save_too(source, target):
        if source == root:
            save(local(root), "other", OLD)

    save(local(root, FaultyPosix(without=("exchange",), after={"rename": save_too})), "new", NEW)
    assert tree(root.parent) == {f"{root.name}/{name}": content for name, content in saved("other", OLD).items()}


def test_a_removal_that_cannot_finish_an_exchange_says_so(root):
    """Otherwise the next reader would find what is said to be removed."""
    _stock(root)
    (root.parent / ".snapshot-dead.old").mkdir()
    root.rename(root.parent / ".snapshot-dead.old" / root.name)
    with pytest.raises(StorageError, match="could not remove"):
        local(root, FaultyPosix(before={"rename": _refusal(errno.EIO)})).remove()
    assert observe(root) == b"stock"


def test_an_exchange_in_two_steps_that_fails_is_undone_at_once(root):
    _stock(root)

    def fail(source, target):
        if target == root and source.name.endswith(".tmp"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(StorageError, match="could not publish the snapshot"):
        save(local(root, FaultyPosix(without=("exchange",), before={"rename": fail})), "new", NEW)
    assert tree(root.parent) == {root.name: b"stock"}


def test_a_save_whose_exchange_was_finished_by_a_reader_has_succeeded(root):
    _stock(root)

    def read_meanwhile(source, target):
        if source == root:
            assert observe(root) == saved("new", NEW)

    save(local(root, FaultyPosix(without=("exchange",), after={"rename": read_meanwhile})), "new", NEW)
    assert tree(root.parent) == {f"{root.name}/{name}": content for name, content in saved("new", NEW).items()}


def test_what_an_interrupted_save_moved_away_does_not_come_back(root):
    _stock(root)

    def crash(source, target):
        if target == root:
            posix.crash_at = len(posix.calls) + 1

    posix = FaultyPosix(without=("exchange",), after={"rename": crash})
    with pytest.raises(SimulatedCrash):
        save(local(root, posix), "new", NEW)
    local(root).remove()
    assert observe(root) is None
    assert _names_beside(root) == set()


def test_what_was_moved_away_comes_back_if_the_new_snapshot_is_lost(root):
    _stock(root)
    (root.parent / ".snapshot-lost.old").mkdir()
    root.rename(root.parent / ".snapshot-lost.old" / root.name)
    assert observe(root) == b"stock"
    assert _names_beside(root) == {root.name}


# --- direct access ---------------------------------------------------------------------------------------------------

_MIB = 1024 * 1024


@pytest.mark.parametrize("without", [(), ("open_direct",)])
@pytest.mark.parametrize("size", [_MIB, _MIB + 1, _MIB + 511, _MIB + 513, _MIB + 4095, _MIB + 4097, 2 * _MIB - 1])
def test_large_files_are_read_and_written_whole_past_the_page_cache_or_not(tmp_path, without, size) -> None:
    posix = FaultyPosix(without=without)
    storage = local(tmp_path / "snapshot", posix)
    content = os.urandom(size)
    transaction = storage.begin("save")
    save_in_pages(transaction.create(".data/save/0", size), content)
    transaction.commit(metadata_for({".data/save/0": content}))

    reader = storage.open(".data/save/0")
    found = mmap.mmap(-1, 2 * _MIB)
    with memoryview(found) as view:
        reader.read_into(0, view[:size])
    reader.close()

    assert found[:size] == content
    assert "open_direct" in {call.name for call in posix.calls}
    assert not posix.open_paths


@pytest.mark.parametrize("call", ["open_direct", "close"])
def test_nothing_stays_open_when_a_large_file_cannot_be_opened_or_closed(tmp_path, call) -> None:
    save(local(tmp_path / "snapshot"), "save", {"0": bytes(_MIB)})

    def load(posix) -> None:
        local(tmp_path / "snapshot", posix).open(".data/save/0").close()

    healthy = FaultyPosix()
    load(healthy)
    number = [found.name for found in healthy.calls].index(call) + 1
    posix = FaultyPosix(fail_at=number, error=errno.EIO)
    with pytest.raises(StorageError, match=r"could not (open|close) .*\.data/save/0"):
        load(posix)
    assert posix.open_paths == []


def save_in_pages(writer, content: bytes) -> None:
    """Write as the engine does: page-aligned blocks at multiples of their size."""
    buffer = mmap.mmap(-1, 64 * 1024)
    with memoryview(buffer) as view:
        for offset in range(0, len(content), len(view)):
            part = content[offset : offset + len(view)]
            view[: len(part)] = part
            writer.write(offset, view[: len(part)])
    writer.finish()


def test_a_refused_direct_write_goes_through_the_page_cache(tmp_path) -> None:
    content = os.urandom(_MIB + 100)
    storage = local(tmp_path / "snapshot")
    transaction = storage.begin("save")
    writer = transaction.create(".data/save/0", len(content))

    # No staging buffer, and at an odd address: the kernel refuses that with EINVAL.
    odd = memoryview(bytearray(b"x" + content))[1:]
    writer.write(0, odd)
    writer.finish()
    transaction.commit(metadata_for({".data/save/0": content}))

    assert read(storage, ".data/save/0") == content


def test_a_save_that_is_published_while_another_one_cleans_up_keeps_its_data(tmp_path) -> None:
    root = tmp_path / "snapshot"
    save(local(root), "first", OLD)
    content = {"0": b"latest" * 50}

    def publish_another(*paths: Path) -> None:
        if not (root / ".data" / "third").exists() and "second" in str(root.joinpath(METADATA_NAME).read_bytes()):
            save(local(root), "third", content)

    # Right after its own publication, before it looks for what is unused.
    save(local(root, FaultyPosix(after={"rename": publish_another})), "second", NEW)

    assert tree(root) == saved("third", content)


def test_a_double_colon_in_a_name_is_part_of_the_name(tmp_path) -> None:
    for name in ("lr=1::a.ckpt", "lr=1::b.ckpt"):
        save(open_storage(tmp_path / name), "save", OLD)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lr=1::a.ckpt", "lr=1::b.ckpt"]
