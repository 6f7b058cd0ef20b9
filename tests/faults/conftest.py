"""A fixed sample of the fault matrix by default, all of it with ``--complete-faults``."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

KINDS = {
    "faults": "operations x faults tried",
    "kills": "kills survived",
    "power cuts": "states of the disk after power cuts tried",
    "defects": "seeded defects found",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--complete-faults", action="store_true", help="try every fault at every operation")


@dataclass(frozen=True)
class Sample:
    """Which part of the matrix a test tries.

    Attributes:
        chance: Chooses, the same way every time.
        complete: Everything instead of a sample.
    """

    request: pytest.FixtureRequest
    chance: random.Random
    complete: bool

    def numbers(self, calls: Sequence[str], stride: int) -> range:
        """Numbers of calls, from 1 on: all of them, or every so many, from another one on for each test."""
        first, step = (1, 1) if self.complete else (self.chance.randint(1, stride), stride)
        return range(first, len(calls) + 1, step)

    def count(self, kind: str, number: int = 1) -> None:
        """Report what has been tried, and that it went well."""
        self.request.node.user_properties.append((kind, number))


@pytest.fixture
def sample(request: pytest.FixtureRequest) -> Sample:
    complete = request.config.getoption("--complete-faults", default=False)
    return Sample(request, random.Random(request.node.name), complete)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    counts = [item for report in reports if report.when == "call" for item in report.user_properties]
    terminalreporter.section("fault matrix")
    for kind, words in KINDS.items():
        terminalreporter.write_line(f"{sum(number for name, number in counts if name == kind):7,} {words}")
    terminalreporter.write_line(f"{len(terminalreporter.getreports('failed')):7,} losses, which is tests that failed")
