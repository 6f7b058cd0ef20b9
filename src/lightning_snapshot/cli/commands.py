"""The commands and what they print."""

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.tree import Tree

from lightning_snapshot.cli.listing import Checkpoint, list_checkpoints, read_manifest
from lightning_snapshot.cli.outline import Node, Outline
from lightning_snapshot.errors import SnapshotError
from lightning_snapshot.storage import Found, look_at, open_storage

if TYPE_CHECKING:
    from lightning_snapshot.verify import Report

__all__ = ["run"]

_DAMAGED = 1
_ERROR = 2
_WIDTH = 1_000_000
_MAX_VALUE_CHARACTERS = 80
_KIB = 1024
_MINUTE, _HOUR, _DAY = 60, 3600, 86400

app = typer.Typer(
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


def run(arguments: Sequence[str] | None) -> NoReturn:
    """Run the command and exit; see `lightning_snapshot.cli.main`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Paths may hold bytes that are no text, and terminals may know few characters.
            stream.reconfigure(errors="backslashreplace")
    try:
        app(arguments, prog_name="lightning-snapshot")
    except (SnapshotError, OSError) as error:
        _complain(error)
    sys.exit(_ERROR)


@app.callback()
def describe() -> None:
    """Look at snapshots of lightning-snapshot and torchsnapshot, and check them."""


@app.command()
def ls(path: Annotated[str, typer.Argument(help="Folder of checkpoints, or a snapshot.")] = ".") -> None:
    """List the checkpoints in a folder, the oldest first, or the top-level keys of a snapshot."""
    storage = open_storage(path)
    if look_at(path) in (Found.FOLDER, Found.EMPTY):
        _print_checkpoints(list_checkpoints(path))
        return
    _print_keys(Outline(storage, read_manifest(storage), 0).whole())


@app.command()
def show(
    path: Annotated[str, typer.Argument(help="Snapshot.")],
    key: Annotated[str, typer.Argument(help="Show this part only, like state_dict or state_dict/fc.weight.")] = "",
    rank: Annotated[int, typer.Option(help="What this rank sees.")] = 0,
    as_json: _Json = False,  # noqa: FBT002  # typer's way
) -> None:
    """Show what is in a snapshot: types, shapes, dtypes, sizes, and the values of numbers and text."""
    storage = open_storage(path)
    manifest = read_manifest(storage)
    outline = Outline(storage, manifest, rank)
    first, _, rest = key.partition("/")
    if first.isdecimal() and first not in outline.roots:  # as in reports and `Snapshot.read_object`
        outline, key = Outline(storage, manifest, int(first)), rest
    node = outline.at(key) if key else outline.whole()
    if as_json:
        _print_json(node.to_json())
    else:
        _print(_tree(node, key or path))


@app.command()
def verify(
    paths: Annotated[list[str], typer.Argument(help="Snapshots.")],
    as_json: _Json = False,  # noqa: FBT002  # typer's way
) -> None:
    """Check everything in snapshots: metadata, files, lengths, checksums. Exits with 1 if something is wrong."""
    # torch is slow to import, and the other commands do without.
    from lightning_snapshot.snapshot import Snapshot  # noqa: PLC0415  # see above

    exit_code = 0
    results: list[dict[str, Any]] = []
    for path in paths:
        try:
            with _progress(path) as progress:
                report = Snapshot(path).verify(progress)
        except SnapshotError as error:
            exit_code = _ERROR
            results.append({"path": path, "error": str(error)})
            _complain(error)
            continue
        if not report.ok:
            exit_code = max(exit_code, _DAMAGED)
        results.append({"path": path, "ok": report.ok, **asdict(report)})
        if not as_json:
            _print_report(path, report)
    if as_json:
        _print_json(results)
    raise typer.Exit(exit_code)


# --- output ----------------------------------------------------------------------------------------------------------


def _print(renderable: Table | Tree) -> None:
    # Lines are not cut and not wrapped: terminals do that well, and programs that read them want lines.
    # The names in them were chosen by others: no markup, no emoji.
    Console(width=_WIDTH, markup=False, emoji=False, highlight=False).print(renderable)


def _safe(text: object) -> str:
    """Text on one line that leaves the terminal alone."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in str(text))


def _complain(error: Exception) -> None:
    typer.echo(f"lightning-snapshot: {_safe(error)}", err=True)


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


def _table(*columns: str, left: int) -> Table:
    """A table whose first columns are text, and whose others are numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", no_wrap=True)
    return table


def _print_checkpoints(checkpoints: Sequence[Checkpoint]) -> None:
    table = _table("name", "status", "epoch", "step", "size", "tensors", "ranks", "age", left=2)
    now = datetime.now(timezone.utc)
    for each in checkpoints:
        name = each.name if each.link is None else f"{each.name} -> {each.link}"
        numbers = each.epoch, each.step, _size(each.size_bytes), each.tensors, each.world_size
        cells = (name, each.status, *("-" if number is None else number for number in numbers))
        table.add_row(*map(_safe, cells), _age((now - each.saved).total_seconds()))
    _print(table)


def _print_keys(node: Node) -> None:
    table = _table("key", "type", "size", "tensors", left=2)
    for item in node.items or ():
        table.add_row(*map(_safe, (item.key, item.kind, _size(item.size_bytes) or "?", item.tensors)))
    _print(table)


def _tree(node: Node, name: str) -> Tree:
    tree = Tree(f"{_safe(name)}: {_text(node)}")
    for item in node.items or ():
        tree.children.append(_tree(item, str(item.key)))
    return tree


def _text(node: Node) -> str:
    """What a line says about a value."""
    size = _size(node.size_bytes) or "size unknown"
    if node.shape is not None:
        return f"{node.kind} {node.dtype or 'of unknown dtype'} {list(node.shape)}, {size}"
    if node.value is not None:
        text = _safe(repr(node.value) if isinstance(node.value, (str, bytes)) else node.value)
        return f"{node.kind} {text if len(text) <= _MAX_VALUE_CHARACTERS else text[:_MAX_VALUE_CHARACTERS] + '…'}"
    items = "" if node.items is None else f" ({len(node.items)})"
    return f"{_safe(node.kind)}{items}, {size}"


def _print_report(path: str, report: "Report") -> None:
    unverifiable = f", {report.unverifiable_files} without checksums" if report.unverifiable_files else ""
    files = _count(report.files_checked, "file") + unverifiable
    checked = f"{files}, {_size(report.bytes_checked)} in {report.seconds:.1f} s"
    for problem in report.problems:
        typer.echo(_safe(f"{path}: {problem}"))
    if report.ok:
        typer.echo(_safe(f"{path}: ok, {checked}"))
    else:
        # Not among the problems, of which each is a line.
        typer.echo(_safe(f"{path}: {_count(len(report.problems), 'problem')}, {checked}"), err=True)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _size(size_bytes: int | None) -> str | None:
    if size_bytes is None:
        return None
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < _KIB:
            break
        size, unit = size / _KIB, larger
    return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"


def _age(seconds: float) -> str:
    for name, length in (("d", _DAY), ("h", _HOUR), ("min", _MINUTE)):
        if seconds >= length:
            return f"{int(seconds // length)} {name}"
    return f"{max(0, int(seconds))} s"


@contextmanager
def _progress(path: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, if that is a terminal."""
    console = Console(stderr=True, markup=False, emoji=False)
    columns = BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()
    name = TextColumn("{task.description}", markup=False)
    with Progress(name, *columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(_safe(path), total=None)

        def show(done_bytes: int, total_bytes: int) -> None:
            bar.update(task, completed=done_bytes, total=total_bytes)

        yield show
