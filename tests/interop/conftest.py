"""The real torchsnapshot, in a process of its own, with the torch that the tests run with."""

import inspect
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
VERSIONS = {
    "0.1.0": ROOT / ".interop" / "torchsnapshot-0.1.0",
    "nightly": ROOT / ".interop" / "torchsnapshot-nightly",
}
_TIMEOUT_SECONDS = 90.0
_numbers = count()


@dataclass(frozen=True)
class TorchSnapshot:
    """One version of torchsnapshot."""

    version: str
    target: Path
    scratch: Path

    def run(self, program: str | Callable[..., object], *args: object) -> str:
        """Run a program in a fresh interpreter that can import torchsnapshot, and return what it printed.

        Args:
            program: Source text that finds its arguments in ``sys.argv[1:]``; or a function that takes them, and that
                imports itself what it needs, because only its own source goes to the interpreter.
            args: Passed on as strings.
        """
        source = program if isinstance(program, str) else _source_of(program)
        script = self.scratch / f"program-{next(_numbers)}.py"
        script.write_text(textwrap.dedent(source), encoding="utf-8")
        path = [str(self.target), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        done = subprocess.run(
            [sys.executable, str(script), *map(str, args)],
            cwd=self.scratch,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
        if done.returncode != 0:
            pytest.fail(f"with torchsnapshot {self.version}, exit code {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout


def _source_of(function: Callable[..., object]) -> str:
    source = textwrap.dedent(inspect.getsource(function))
    return f"import sys\n\n{source}\n\n{function.__name__}(*sys.argv[1:])\n"


@pytest.fixture(params=VERSIONS)
def torchsnapshot(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TorchSnapshot:
    target = VERSIONS[request.param]
    if not (target / "torchsnapshot" / "__init__.py").is_file():
        pytest.fail(f"torchsnapshot {request.param} is not in {target}; run `make interop`")
    return TorchSnapshot(request.param, target, tmp_path_factory.mktemp("torchsnapshot"))
