"""A sample of the matrix by default, all of it with ``--complete-resume``; ranks that know Lightning and torchdata."""

from pathlib import Path

import lightning
import pytest

from tests.ranks import processes

processes._context.set_forkserver_preload([*processes._PRELOADED, "tests.lightning.ranks.worlds", "tests.resume.cases"])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--complete-resume", action="store_true", help="try every kind of loader at every moment")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--complete-resume", default=False):
        items[:] = [item for item in items if item.name.partition("[")[0] != "test_the_complete_matrix"]
    if lightning.__version__.startswith("2.4."):
        # Its resumes skip validations and call hooks again, see docs/exact-resume.md.
        here = Path(__file__).parent
        for item in items:
            if item.path.is_relative_to(here) and not item.name.startswith("test_a_loop_of_ones_own"):
                item.add_marker(pytest.mark.skip("exact from Lightning 2.5 on"))


@pytest.fixture(autouse=True)
def _in_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
