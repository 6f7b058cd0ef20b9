"""Every error that this package raises on purpose, in one tree.

::

    SnapshotError
    ├── SnapshotNotFoundError      (FileNotFoundError)   nothing at that path
    ├── NotASnapshotError          (ValueError)          something else is at that path
    ├── MetadataError              (ValueError)          .snapshot_metadata is damaged or inconsistent
    ├── DataError                  (ValueError)          a data file does not hold what the metadata says
    │   ├── MissingDataError       (FileNotFoundError)   a data file is gone
    │   └── ChecksumError                                bytes changed since they were written
    ├── EntryNotFoundError         (KeyError)            the snapshot has no such key
    ├── TargetMismatchError        (ValueError)          the tensor to load into has another dtype or shape
    ├── UnsafeObjectError          (UnpicklingError)     a value needs code that is not on the allow-list
    ├── UnsupportedValueError      (TypeError)           a value cannot be stored
    ├── UnsupportedFeatureError    (NotImplementedError) this version cannot do that
    ├── StateChangedError          (RuntimeError)        a tensor changed while a save with overlap was reading it
    ├── SaveCancelledError         (RuntimeError)        a save was given up for a newer one
    ├── RankError                  (RuntimeError)        another rank failed, or the ranks do not act together
    │   └── RankTimeoutError       (TimeoutError)        a rank did not come, or shows no sign of life
    └── StorageError               (OSError)             the storage refused; ``errno`` says why
        └── StoragePermissionError (PermissionError)

Each message names the place, what was expected, what was found and what to do. Each class also derives from the
builtin that a caller would reach for, so ``except FileNotFoundError`` keeps working.
"""

import json
import pickle
import traceback
from typing import NoReturn

__all__ = [
    "ChecksumError",
    "DataError",
    "EntryNotFoundError",
    "MetadataError",
    "MissingDataError",
    "NotASnapshotError",
    "RankError",
    "RankTimeoutError",
    "SaveCancelledError",
    "SnapshotError",
    "SnapshotNotFoundError",
    "StateChangedError",
    "StorageError",
    "StoragePermissionError",
    "TargetMismatchError",
    "UnsafeObjectError",
    "UnsupportedFeatureError",
    "UnsupportedValueError",
    "error_from_report",
    "raise_storage_error",
    "report_of_error",
    "retold",
]

_REPORT_CHARACTERS = 20_000  # some libraries put whole tensors into their messages


class SnapshotError(Exception):
    """Base of all errors of this package."""


class SnapshotNotFoundError(SnapshotError, FileNotFoundError):
    """There is nothing at the path of the snapshot."""


class NotASnapshotError(SnapshotError, ValueError):
    """What is at the path is no snapshot: another kind of checkpoint, an ordinary folder, an unfinished save."""


class MetadataError(SnapshotError, ValueError):
    """``.snapshot_metadata`` cannot be understood or contradicts itself."""


class DataError(SnapshotError, ValueError):
    """A data file does not hold what the metadata says."""


class MissingDataError(DataError, FileNotFoundError):
    """A data file that the metadata names does not exist."""


class ChecksumError(DataError):
    """The bytes of a data file differ from those that were written."""


class EntryNotFoundError(SnapshotError, KeyError):
    """The snapshot holds nothing under that key."""

    def __str__(self) -> str:
        # KeyError shows repr(message), which turns a sentence into a quoted string.
        return Exception.__str__(self)


class TargetMismatchError(SnapshotError, ValueError):
    """The tensor to load into does not have the dtype or shape of the stored one."""


class UnsafeObjectError(SnapshotError, pickle.UnpicklingError):
    """Reading a value would run code that is not on the allow-list, and the caller did not ask for that."""


class UnsupportedValueError(SnapshotError, TypeError):
    """A value cannot be stored."""


class UnsupportedFeatureError(SnapshotError, NotImplementedError):
    """This version does not offer what was asked for."""


class StateChangedError(SnapshotError, RuntimeError):
    """A tensor changed between the call of a save with ``overlap`` and its reading. Nothing is published."""


class SaveCancelledError(SnapshotError, RuntimeError):
    """A save that went on behind training was given up because a newer one came."""


class RankError(SnapshotError, RuntimeError):
    """Another rank failed for a reason that is not in this tree, or the ranks do not act together."""


class RankTimeoutError(RankError, TimeoutError):
    """A rank did not come, or shows no sign of life any more."""


class StorageError(SnapshotError, OSError):
    """The storage refused an operation (disk full, input/output error, …)."""


class StoragePermissionError(StorageError, PermissionError):
    """The storage refused an operation for lack of permission."""


def raise_storage_error(operation: str, path: str, error: OSError) -> NoReturn:
    """Re-raise an operating system error as a `StorageError` that says which operation failed where.

    Args:
        operation: What was tried, as a verb phrase: ``"write 4096 bytes at offset 0 of"``.
        path: The file or folder.
        error: What the operating system said.

    Raises:
        StorageError: Always; with the ``errno`` of ``error``.
    """
    kind = StoragePermissionError if isinstance(error, PermissionError) else StorageError
    raise kind(error.errno, f"could not {operation} {path}: {error.strerror or error}") from error


def report_of_error(rank: int, error: BaseException) -> str:
    """What the other ranks have to know of an error, as text; `error_from_report` reads it.

    Args:
        rank: Where it was raised.
        error: Of this tree or any other.
    """
    kind = next((base.__name__ for base in type(error).__mro__ if base.__module__ == __name__), None)
    number = None
    if kind is None:
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
    elif isinstance(error, OSError) and error.errno is not None:
        number, text = error.errno, str(error.strerror)
    else:
        text = str(error)
    return json.dumps({"rank": rank, "kind": kind, "errno": number, "text": text[:_REPORT_CHARACTERS]})


def retold(error: SnapshotError, prefix: str) -> SnapshotError:
    """The same error with more text, for somebody who was not there when it was raised."""
    if isinstance(error, OSError) and error.errno is not None:
        return type(error)(error.errno, f"{prefix}: {error.strerror}")
    return type(error)(f"{prefix}: {error}")


def error_from_report(report: str | bytes) -> SnapshotError:
    """The error to raise on a rank that hears of another one's: of the same class if that is in this tree."""
    found = json.loads(report)
    if found["kind"] is None:
        return RankError(f"rank {found['rank']} raised {found['text']}")
    kind: type[SnapshotError] = globals()[found["kind"]]
    text = f"rank {found['rank']}: {found['text']}"
    return kind(text) if found["errno"] is None else kind(found["errno"], text)
