"""The knobs of a save or load, with their defaults. Everything below the public API takes them as arguments."""

import os
from dataclasses import dataclass

__all__ = ["Options"]

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Options:
    """Knobs of one save or load.

    Attributes:
        memory_budget_bytes: Upper bound of the staging memory. At least one block is always used.
        threads: Threads that read, write, copy and hash.
        verify: Check the checksums of everything that is read.
        trusted: Let stored objects run their own code when they are read.
        block_bytes: Stretch of a file that has one checksum, and unit of reading and writing.
        chunk_bytes: Tensors larger than this are cut (512 MiB, as torchsnapshot does).
        file_bytes: A data file is closed before it would grow beyond this, because torchsnapshot reads all ranges that
            it wants of one file in one piece.
    """

    memory_budget_bytes: int = 64 * _MIB
    threads: int = 4
    verify: bool = True
    trusted: bool = False
    block_bytes: int = 4 * _MIB
    chunk_bytes: int = 512 * _MIB
    file_bytes: int = 1024 * _MIB

    def __post_init__(self) -> None:
        """Refuse a budget that is none.

        Raises:
            ValueError: ``memory_budget_bytes`` is no positive whole number.
        """
        budget = self.memory_budget_bytes
        if type(budget) is not int or budget <= 0:
            msg = f"memory_budget_bytes must be a positive whole number of bytes, found {budget!r}"
            raise ValueError(msg)

    @classmethod
    def from_env(cls) -> "Options":
        """The defaults, changed by what the environment says.

        ``LIGHTNING_SNAPSHOT_MEMORY_BUDGET_BYTES`` sets ``memory_budget_bytes``.

        Raises:
            ValueError: The variable does not hold a positive whole number.
        """
        text = os.environ.get("LIGHTNING_SNAPSHOT_MEMORY_BUDGET_BYTES")
        if text is None:
            return cls()
        if not text.isdecimal() or int(text) == 0:
            msg = f"LIGHTNING_SNAPSHOT_MEMORY_BUDGET_BYTES must be a positive number of bytes, found {text!r}"
            raise ValueError(msg)
        return cls(memory_budget_bytes=int(text))
