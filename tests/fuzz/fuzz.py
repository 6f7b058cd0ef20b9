"""``python -m tests.fuzz.fuzz``: damages and forges snapshots, loads them, and looks for anything but our own errors.

Every case follows from a seed and a number, so ``--case SEED:NUMBER`` repeats it. What must hold:

- A load gives a value or a `SnapshotError`, in bounded memory and time, and never ends the process.
- A damaged snapshot of this project gives the values that were saved, or an error: never other values.
"""

import argparse
import faulthandler
import json
import os
import resource
import secrets
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from lightning_snapshot.errors import SnapshotError
from lightning_snapshot.manifest import Manifest
from lightning_snapshot.restore import load, read_manifest, read_value
from lightning_snapshot.storage.locations import data_locations
from lightning_snapshot.storage.memory import MemoryStorage
from tests.engine.strategies import SMALL, same
from tests.fuzz.mutate import damage, forge
from tests.fuzz.seeds import Seed, seeds
from tests.hostile.sandbox import memory_bytes

MAX_ADDRESS_BYTES = 2 * 1024**3
MAX_GROWTH_BYTES = 256 * 1024**2
MAX_CPU_SECONDS = 10
MAX_WAIT_SECONDS = 60
MAX_SAVED = 3

Loader = Callable[[MemoryStorage, Random], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """A changed snapshot.

    Attributes:
        name: ``seed:number``, from which all of it follows.
        seed: What was changed.
        files: What it was changed to.
        must_not_lie: Whether values that load have to be the ones that were saved.
    """

    name: str
    seed: Seed
    files: Mapping[str, bytes]
    must_not_lie: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that must not happen.

    Attributes:
        case: Its name.
        kind: What happened, in a few words that are the same for the same defect.
        detail: All that is known.
    """

    case: str
    kind: str
    detail: str


def make_case(name: str, known: list[Seed]) -> Case:
    random = Random(name)
    own = [seed for seed in known if seed.is_own]
    seed = random.choice(own) if random.random() < 0.5 else random.choice(known)
    is_damage = random.random() < 0.4
    files = damage(random, seed.files) if is_damage else forge(random, seed.files)
    return Case(name, seed, files, must_not_lie=is_damage and seed.is_own)


def load_all_ways(storage: MemoryStorage, random: Random) -> dict[str, Any]:
    """Open a snapshot as several ranks, and single values of it."""
    manifest: Manifest = read_manifest(storage)
    data_locations(manifest)
    for rank in {1, manifest.world_size}:
        ignore_refusals(lambda rank=rank: load(storage, rank=rank, options=SMALL))
    for path in random.sample(sorted(manifest.entries), min(2, len(manifest.entries))):
        ignore_refusals(lambda path=path: read_value(storage, path, options=SMALL))
    ignore_refusals(lambda: load(storage, rank=0, options=SMALL, mmap=True))
    return load(storage, rank=0, options=SMALL)


def ignore_refusals(way: Callable[[], Any]) -> None:
    with suppress(SnapshotError):
        way()


def judge(case: Case, expected: Mapping[str, dict[str, Any]], loader: Loader = load_all_ways) -> Finding | None:
    """Load a case, and say what is wrong with what happens."""
    storage = MemoryStorage(f"memory://{__name__}")
    storage.files.clear()
    storage.files.update(case.files)
    Path("/proc/self/clear_refs").write_text("5")  # the highest memory use is counted from here
    memory, started = memory_bytes("VmRSS"), time.process_time()
    found = None
    try:
        state = loader(storage, Random(case.name))
        if case.must_not_lie and not same(state, expected[case.seed.name]):
            wanted = expected[case.seed.name]
            keys = [key for key in {*wanted, *state} if key not in state or not same(state[key], wanted.get(key))]
            found = "other values than were saved", f"under {keys}"
    except SnapshotError:
        pass
    except Exception as error:  # noqa: BLE001  # that is what is looked for
        found = f"{type(error).__name__} {place_of(error)}", traceback.format_exc()
    growth, used = memory_bytes("VmHWM") - memory, time.process_time() - started
    if growth > MAX_GROWTH_BYTES:
        found = "memory", f"{growth} bytes more than before"
    elif used > MAX_CPU_SECONDS:
        found = "time", f"{used} seconds"
    return Finding(case.name, *found) if found else None


def place_of(error: Exception) -> str:
    """The last line of our own that an error came through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "lightning_snapshot" in frame.filename]
    return f"{Path(frames[-1].filename).name} {frames[-1].name}" if frames else "tests"


def expected_states(known: list[Seed]) -> dict[str, dict[str, Any]]:
    """What the snapshots of this project hold."""
    states = {}
    for seed in known:
        if seed.is_own:
            storage = MemoryStorage(f"memory://{__name__}")
            storage.files.clear()
            storage.files.update(seed.files)
            states[seed.name] = load(storage, rank=0, options=SMALL)
    return states


# --- workers ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Worker:
    """A process that runs every n-th case. It says which one it begins, so that a death can be told from an end."""

    process: int
    answers: Any
    number: int


def start_worker(run: Callable[[int], Finding | None], numbers: range, deadline: float) -> Worker:
    reader, writer = os.pipe()
    process = os.fork()
    if process:
        os.close(writer)
        return Worker(process, os.fdopen(reader), -1)
    os.close(reader)
    limit = memory_bytes("VmSize") + MAX_ADDRESS_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process,
    faulthandler.register(signal.SIGALRM, file=2, all_threads=True, chain=True)  # after saying where it was
    with os.fdopen(writer, "w") as pipe:
        for number in numbers:
            if time.monotonic() > deadline:
                break
            print(number, file=pipe, flush=True)
            signal.setitimer(signal.ITIMER_REAL, MAX_WAIT_SECONDS)
            finding = run(number)
            if finding:
                print(json.dumps([finding.case, finding.kind, finding.detail]), file=pipe, flush=True)
        print("end", file=pipe, flush=True)
    os._exit(0)


def answers_of(worker: Worker, seed: str) -> Iterator[Finding]:
    """What a worker finds, until it ends or dies."""
    is_over = False
    with worker.answers as lines:
        for line in lines:
            if line.strip().isdigit():
                worker.number = int(line)
            elif line.strip() == "end":
                is_over = True
            else:
                yield Finding(*json.loads(line))
    _, status = os.waitpid(worker.process, 0)
    if not is_over:
        ended = signal.Signals(status & 127).name if status & 127 else f"exit status {status >> 8}"
        yield Finding(f"{seed}:{worker.number}", f"the process died of {ended}", "")


def run_share(
    run: Callable[[int], Finding | None], numbers: range, deadline: float, seed: str
) -> tuple[int, list[Finding]]:
    """Run cases in one process at a time; a new one goes on where one has died.

    Returns:
        How many cases were run, and what was found.
    """
    findings: list[Finding] = []
    count = 0
    while numbers and time.monotonic() < deadline:
        worker = start_worker(run, numbers, deadline)
        findings.extend(answers_of(worker, seed))
        if worker.number < 0:
            break
        done = numbers.index(worker.number) + 1
        count += done
        numbers = numbers[done:]
    return count, findings


def save_finding(folder: Path, finding: Finding, files: Mapping[str, bytes]) -> None:
    place = folder / finding.case.replace(":", "-")
    for location, content in files.items():
        path = place / "snapshot" / location.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (place / "why.txt").write_text(
        f"{finding.kind}\n\n{finding.detail}\n\nRepeat with: python -m tests.fuzz.fuzz --case {finding.case}\n"
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--cases", type=int, default=10**9, help="stop after so many")
    parser.add_argument("--seed", default=str(secrets.randbits(32)))
    parser.add_argument("--case", help="repeat one case, SEED:NUMBER")
    parser.add_argument("--findings", type=Path, default=Path("build/fuzz"))
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the threads of this process would be missing in those that it forks
    known = seeds()
    expected = expected_states(known)
    if options.case:
        finding = judge(make_case(options.case, known), expected)
        print(finding or "nothing found")
        return 1 if finding else 0

    print(f"seed {options.seed}", flush=True)
    started = time.monotonic()
    count, findings = run_share(
        lambda number: judge(make_case(f"{options.seed}:{number}", known), expected),
        range(options.cases),
        started + options.seconds,
        options.seed,
    )
    by_kind: dict[str, list[Finding]] = {}
    for finding in findings:
        by_kind.setdefault(finding.kind, []).append(finding)
    for kind, same_kind in by_kind.items():
        print(f"{len(same_kind)} times: {kind}: {', '.join(finding.case for finding in same_kind[:MAX_SAVED])}")
        for finding in same_kind[:MAX_SAVED]:
            save_finding(options.findings, finding, make_case(finding.case, known).files)
    print(f"{count} cases in {time.monotonic() - started:.0f} s, {len(findings)} findings of {len(by_kind)} kinds")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
