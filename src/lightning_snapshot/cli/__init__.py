"""The command ``lightning-snapshot``: look at snapshots and check them. Needs the extra ``cli``."""

import sys
from collections.abc import Callable, Sequence

__all__ = ["main"]

_run: Callable[[Sequence[str] | None], None] | None = None
try:
    from lightning_snapshot.cli.commands import run as _run
except ModuleNotFoundError as error:
    if error.name not in {"rich", "typer"}:
        raise


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0 for success, 1 for a damaged snapshot, 2 for an error.

    Args:
        arguments: What follows the name of the command; by default that of the process.
    """
    if _run is None:
        print(  # noqa: T201  # this is a command
            "lightning-snapshot: the command line needs the packages typer and rich; install them with: "
            "pip install 'lightning-snapshot[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    _run(arguments)
