"""The import rule: a module knows only what is below it, and outside libraries only where they belong.

The table is the architecture. A module that it lacks fails the test, so that whoever adds one decides where it goes.
"""

import ast
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "lightning_snapshot"
SOURCE = ROOT / "src" / PACKAGE

NONE: frozenset[str] = frozenset()
MSGSPEC = frozenset({"msgspec"})  # for plain data: its structs are cheap to make, of which saves make many thousands
TORCH = frozenset({"torch"})
LIGHTNING = frozenset({"lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning"})


@dataclass(frozen=True)
class Row:
    """Modules that do not know each other; they may import those of all rows above, in this table.

    A name is a module, or a folder whose modules may import each other.
    """

    level: int
    modules: dict[str, frozenset[str]]
    """Module or folder → outside libraries that it may import."""


TABLE = (
    Row(0, {"errors": NONE}),
    Row(0, {"entries": MSGSPEC, "manifest_legacy": frozenset({"msgspec", "yaml"})}),
    Row(0, {"manifest": frozenset({"msgspec", "yaml"})}),
    Row(1, {"geometry": MSGSPEC, "tree": MSGSPEC}),
    Row(1, {"read_plan": MSGSPEC, "rebuild": NONE, "view": MSGSPEC, "write_plan": MSGSPEC}),
    Row(2, {"stateful": TORCH}),
    Row(2, {"arrays": NONE, "memory": TORCH, "stats": NONE, "vetting": NONE}),
    Row(
        2,
        {
            "devices": TORCH,
            "group": TORCH,
            "objects": TORCH,
            "storage": frozenset({"fsspec", "obstore"}),
            "tensors": TORCH,
        },
    ),
    Row(3, {"commit": NONE, "describe": TORCH | MSGSPEC, "execute": frozenset({"msgspec", "xxhash"}), "survey": TORCH}),
    Row(3, {"writing": frozenset({"xxhash"})}),
    Row(4, {"options": NONE}),
    Row(4, {"session": NONE}),
    Row(4, {"exchange": MSGSPEC, "saving": NONE}),
    Row(4, {"background": NONE}),
    Row(4, {"leaves": TORCH | MSGSPEC}),
    Row(4, {"restore": TORCH, "save": NONE, "together": NONE, "verify": frozenset({"xxhash"})}),
    Row(4, {"app_state": TORCH, "save_as_one": TORCH | MSGSPEC | {"xxhash"}, "save_each": MSGSPEC}),
    Row(4, {"siblings": TORCH, "snapshot": TORCH}),
    Row(5, {"cli": frozenset({"rich", "typer"}), "integration": TORCH | LIGHTNING}),
    Row(6, {"__init__": NONE}),
)
PLACES = {name: position for position, row in enumerate(TABLE) for name in row.modules}

PURE_LEVELS = (0, 1)
IMPURE_MODULES = frozenset(
    {
        *("asyncio", "concurrent", "multiprocessing", "queue", "subprocess", "threading"),
        *("random", "secrets", "uuid"),
        *("fcntl", "glob", "io", "mmap", "os", "pathlib", "select", "shutil", "socket", "tempfile"),
        "time",
    }
)
"""Threads, clocks, randomness and files of the standard library."""

OWN_NAME = re.compile(rf"{PACKAGE}\b|\.+\w")
"""Absolute or relative name of one of our modules."""

FORBIDDEN_ERRORS = frozenset({"AssertionError", "BaseException", "Exception", "RuntimeError"})
SUPPRESSION = re.compile(r"#\s*(?P<kind>type:\s*ignore|noqa|ruff:|mypy:|pyright:)", re.IGNORECASE)
EXPLAINED = re.compile(
    r"""\#\s*(
        type:\s*ignore\[[a-z0-9,\s-]+\]\s+\#   # mypy wants a second comment
        | noqa:\s*[A-Z]+[0-9]+(,\s*[A-Z]+[0-9]+)*\s+[\#-]
    )\s*(?!noqa|type:)\S+\s+\S+                # two words or more""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Module:
    """A module of the package, or source text that pretends to be one."""

    name: str
    """Dotted, below the package: ``storage.local``, ``storage.__init__``, ``errors``."""
    text: str
    known: frozenset[str]
    """Names of all modules."""

    @property
    def place(self) -> str:
        return self.name.split(".")[0]

    @property
    def row(self) -> Row:
        return TABLE[PLACES[self.place]]

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def is_module(self, dotted: str) -> bool:
        return dotted in self.known or f"{dotted}.__init__" in self.known


@dataclass(frozen=True)
class Import:
    line: int
    target: str
    """Full dotted name; of a module where that can be told apart from a name inside one."""
    within_function: str | None

    @property
    def library(self) -> str:
        return self.target.split(".")[0]


def _modules() -> list[Module]:
    files = {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in sorted(SOURCE.rglob("*.py"))
    }
    return [Module(name, text, frozenset(files)) for name, text in files.items()]


def _imports(module: Module) -> Iterator[Import]:
    def visit(node: ast.AST, function: str | None) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, function)
        elif isinstance(node, ast.ImportFrom):
            base = _base_of(node, module)
            for alias in node.names:
                if (base, alias.name) == (PACKAGE, "__version__"):
                    continue  # a constant; at run time `__init__` imports nothing
                inner = f"{base}.{alias.name}"
                names_module = base.startswith(PACKAGE) and module.is_module(inner.removeprefix(f"{PACKAGE}."))
                yield Import(node.lineno, inner if names_module else base, function)
        inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    return visit(module.tree, None)


def _base_of(node: ast.ImportFrom, module: Module) -> str:
    if node.level == 0:
        return node.module or ""
    parts = [PACKAGE, *module.name.split(".")]
    return ".".join(parts[: len(parts) - node.level] + ([node.module] if node.module else []))


def _own_place(target: str) -> str:
    """Where an import of the package leads: a module or folder of the table."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def find_unknown_module(module: Module) -> Iterator[str]:
    if module.place not in PLACES:
        yield f"{module.name}: not in TABLE of {Path(__file__).name}; decide which level it belongs to and add it"


def find_upward_imports(module: Module) -> Iterator[str]:
    here = PLACES[module.place]
    for found in _imports(module):
        if found.library != PACKAGE:
            continue
        target = _own_place(found.target)
        own_folder = target == module.place and "." in module.name
        if not own_folder and PLACES.get(target, len(TABLE)) >= here:
            yield f"{module.name}:{found.line}: imports {found.target}, which is not below it"


def find_misplaced_libraries(module: Module) -> Iterator[str]:
    allowed = module.row.modules[module.place]
    for found in _imports(module):
        pure = module.row.level in PURE_LEVELS
        if found.library in sys.stdlib_module_names:
            if pure and found.library in IMPURE_MODULES:
                yield f"{module.name}:{found.line}: imports {found.target}; levels 0 and 1 only compute"
        elif found.library != PACKAGE and found.library not in allowed:
            yield f"{module.name}:{found.line}: imports {found.target}; allowed here: {sorted(allowed) or 'nothing'}"


def find_hidden_imports(module: Module) -> Iterator[str]:
    lazy_names = module.name == "__init__"
    for found in _imports(module):
        # Some commands need no torch, and are to start without waiting for it.
        allowed = (lazy_names and found.within_function == "__getattr__") or module.place == "cli"
        if found.library == PACKAGE and found.within_function is not None and not allowed:
            yield f"{module.name}:{found.line}: imports {found.target} inside a function"
    # importlib is for what users name, not for a way round this test.
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and _last_name(node.func) in {"import_module", "__import__"} and not lazy_names:
            texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            if any(isinstance(text, str) and OWN_NAME.match(text) for text in texts):
                yield f"{module.name}:{node.lineno}: imports {texts[0]!r} past the import statement"


def find_vague_errors(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Assert):
            yield f"{module.name}:{node.lineno}: assert vanishes under -O; raise an error of {PACKAGE}.errors"
        elif isinstance(node, ast.Raise) and node.exc is not None:
            kind = _last_name(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
            if kind in FORBIDDEN_ERRORS:
                yield f"{module.name}:{node.lineno}: raises {kind}; use an error of {PACKAGE}.errors"


def find_files_opened(module: Module) -> Iterator[str]:
    if module.row.level not in PURE_LEVELS:
        return
    for node in ast.walk(module.tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in {"open", "input", "print"}
        ):
            yield f"{module.name}:{node.lineno}: calls {node.func.id}(); levels 0 and 1 only compute"


def find_bare_suppressions(name: str, text: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(StringIO(text).readline):
        if token.type == tokenize.COMMENT and SUPPRESSION.search(token.string) and not EXPLAINED.search(token.string):
            yield (
                f"{name}:{token.start[0]}: {token.string!r} needs a code and a reason on the same line: "
                "`# type: ignore[code]  # reason` or `# noqa: CODE - reason`"
            )


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _expect_none(findings: Iterable[str]) -> None:
    lines = list(findings)
    assert not lines, "\n".join(lines)


CHECKS = [
    find_upward_imports,
    find_misplaced_libraries,
    find_hidden_imports,
    find_vague_errors,
    find_files_opened,
]


def test_every_module_is_in_the_table() -> None:
    modules = _modules()
    assert modules, f"no modules found in {SOURCE}"
    _expect_none(line for module in modules for line in find_unknown_module(module))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_package_obeys(check) -> None:
    known = [module for module in _modules() if module.place in PLACES]
    _expect_none(line for module in known for line in check(module))


def test_suppressions_say_why() -> None:
    files = [
        path for folder in ("src", "tests", "examples", "benchmarks") for path in sorted(ROOT.glob(f"{folder}/**/*.py"))
    ]
    _expect_none(
        line
        for path in files
        for line in find_bare_suppressions(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    )


KNOWN = frozenset(
    {"__init__", "errors", "manifest", "save", "storage.__init__", "storage.base", "storage.local", "tree"}
)


@pytest.mark.parametrize(
    ("check", "name", "text"),
    [
        (find_unknown_module, "surprise", ""),
        (find_unknown_module, "surprise.inner", ""),
        (find_upward_imports, "manifest", "from lightning_snapshot.tree import flatten"),
        (find_upward_imports, "manifest", "import lightning_snapshot.tree"),
        (find_upward_imports, "manifest", "from lightning_snapshot import tree"),
        (find_upward_imports, "manifest", "from . import tree"),
        (find_upward_imports, "manifest", "from .tree import flatten"),
        (find_upward_imports, "geometry", "from lightning_snapshot.tree import flatten"),
        (find_upward_imports, "errors", "from lightning_snapshot.errors import SnapshotError"),
        (find_upward_imports, "storage.local", "from ..save import save"),
        (find_upward_imports, "storage.local", "from lightning_snapshot.surprise import x"),
        (find_upward_imports, "cli", "from lightning_snapshot import Snapshot"),
        (find_upward_imports, "tree", "if TYPE_CHECKING:\n    from lightning_snapshot.save import save"),
        (find_misplaced_libraries, "tree", "import torch"),
        (find_misplaced_libraries, "tree", "def f():\n    import torch"),
        (find_misplaced_libraries, "tree", "import os.path"),
        (find_misplaced_libraries, "manifest", "from concurrent.futures import Future"),
        (find_misplaced_libraries, "execute", "import torch"),
        (find_misplaced_libraries, "snapshot", "import lightning.pytorch"),
        (find_misplaced_libraries, "integration.plugin", "import fsspec"),
        (find_hidden_imports, "save", "def f():\n    from lightning_snapshot.errors import SnapshotError"),
        (find_hidden_imports, "__init__", "def f():\n    from lightning_snapshot.errors import SnapshotError"),
        (find_hidden_imports, "integration.plugin", "async def f():\n    from . import callbacks"),
        (find_hidden_imports, "save", "import importlib\nimportlib.import_module('lightning_snapshot.errors')"),
        (find_hidden_imports, "integration.plugin", "import_module(f'lightning_snapshot.{name}')"),
        (find_vague_errors, "save", "raise RuntimeError('no')"),
        (find_vague_errors, "save", "raise builtins.Exception"),
        (find_vague_errors, "save", "assert x"),
        (find_files_opened, "tree", "open('x')"),
    ],
)
def test_checks_find_what_they_are_for(check, name: str, text: str) -> None:
    assert len(list(check(Module(name, text, KNOWN | {name})))) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("manifest", "import msgspec, yaml, re\nfrom lightning_snapshot.errors import MetadataError"),
        ("tree", "from lightning_snapshot import manifest, errors, __version__"),
        ("storage.__init__", "from lightning_snapshot.storage.local import Local\nfrom .base import Storage"),
        ("storage.local", "import os, threading, fsspec\nfrom lightning_snapshot.storage.base import Storage"),
        ("integration.plugin", "import torch\ndef f():\n    import lightning.pytorch\n    import_module('x')"),
        ("__init__", "def __getattr__(name):\n    from lightning_snapshot.save import save"),
        ("cli.commands", "import typer\ndef verify():\n    from lightning_snapshot.save import save"),
        ("restore", "def f():\n    import torch.distributed\n    raise ValueError\ndef g():\n    raise"),
        ("tree", "x.open()"),
    ],
)
def test_checks_leave_the_rest_alone(name: str, text: str) -> None:
    module = Module(name, text, KNOWN | {name})
    assert not [line for check in [find_unknown_module, *CHECKS] for line in check(module)]


@pytest.mark.parametrize(
    "comment",
    [
        "# type: ignore",
        "# type: ignore[misc]",
        "# type: ignore  # because of that",
        "# type: ignore[misc]  # noqa: S301",
        "# noqa",
        "# noqa: S301",
        "# noqa: S301 -",
        "# NOQA: S301",
        "# ruff: noqa: S301 - for the whole file",
        "# mypy: ignore-errors",
    ],
)
def test_bare_suppressions_are_found(comment: str) -> None:
    assert list(find_bare_suppressions("x", f"x = 1  {comment}\n"))


@pytest.mark.parametrize(
    "comment",
    [
        "# type: ignore[misc]  # torch has no types here",
        "# type: ignore[misc, no-any-return]  # torch has no types here",
        "# noqa: S301 - the caller asked for it",
        "# noqa: S301, BLE001  # the caller asked for it",
        "# an ordinary comment",
    ],
)
def test_explained_suppressions_pass(comment: str) -> None:
    assert not list(find_bare_suppressions("x", f"x = 1  {comment}\nmessage = '# noqa'\n"))
