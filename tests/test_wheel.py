"""What users install: the wheel, not the checkout."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"


def _run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds nothing but what the wheel installs."""
    scratch = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check")
    _run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", str(ROOT), cwd=scratch)
    (wheel,) = (scratch / "dist").iterdir()
    _run(*pip, "install", "--no-deps", "--target", "site", str(wheel), cwd=scratch)
    return scratch / "site"


def _distribution(installed: Path) -> metadata.Distribution:
    (distribution,) = metadata.distributions(path=[str(installed)])
    return distribution


def test_the_wheel_holds_the_package_and_nothing_else(installed: Path) -> None:
    files = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()}
    # pip compiles what it installs.
    ours = {file for file in files if file.parts[0] == "lightning_snapshot" and "__pycache__" not in file.parts}
    in_checkout = {
        path.relative_to(SOURCE)
        for path in (SOURCE / "lightning_snapshot").rglob("*")
        if path.suffix in {".py", ".typed"}
    }
    assert ours == in_checkout
    assert Path("lightning_snapshot/py.typed") in ours
    assert {file.parts[0] for file in files} == {
        "bin",
        "lightning_snapshot",
        f"lightning_snapshot-{_distribution(installed).version}.dist-info",
    }


@pytest.mark.parametrize("group", ["lightning.pytorch.callbacks_factory", "pytorch_lightning.callbacks_factory"])
def test_the_wheel_has_the_entry_points(installed: Path, group: str) -> None:
    (found,) = _distribution(installed).entry_points.select(group=group)
    assert (found.name, found.value) == ("snapshot", "lightning_snapshot.integration.entry_points:callbacks")


def test_the_wheel_names_its_dependencies_but_no_lightning(installed: Path) -> None:
    requirements = _distribution(installed).requires or []
    required = sorted(line.split(">")[0].lower() for line in requirements if "extra ==" not in line)
    assert required == ["fsspec", "msgspec", "pyyaml", "torch", "xxhash"]
    extras = _distribution(installed).metadata.get_all("Provides-Extra")
    assert {"cli", "lightning", "pytorch-lightning"} <= set(extras or [])


def test_the_wheel_has_the_command(installed: Path) -> None:
    (script,) = _distribution(installed).entry_points.select(group="console_scripts")
    assert (script.name, script.value) == ("lightning-snapshot", "lightning_snapshot.cli:main")
    assert (installed / "bin" / "lightning-snapshot").is_file()


def test_the_installed_package_imports(installed: Path, tmp_path: Path) -> None:
    # -S and -I would take the dependencies away, so the order of the path has to decide.
    program = """if True:
        from importlib import metadata
        import lightning_snapshot
        from lightning_snapshot import Snapshot
        points = metadata.entry_points(group="lightning.pytorch.callbacks_factory", name="snapshot")
        print(lightning_snapshot.__file__, lightning_snapshot.__version__, {callable(p.load()) for p in points})
    """
    file, version, loads = _run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(installed)).split()
    assert file == str(installed / "lightning_snapshot" / "__init__.py")
    assert version == _distribution(installed).version
    assert loads == "{True}"
