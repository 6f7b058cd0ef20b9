"""Planning for many simulated ranks: what rank 0 does, what the ranks send each other, and how long the manifest is."""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import common

from lightning_snapshot.exchange import Contribution, Opening, Part, collect, distribute, hand_in
from lightning_snapshot.geometry import Box
from lightning_snapshot.group import Meeting
from lightning_snapshot.manifest import (
    Extension,
    FileRecord,
    Manifest,
    OrderedDictEntry,
    RankNotes,
    TensorNote,
    decode,
    encode,
)
from lightning_snapshot.memory import no_garbage_collection
from lightning_snapshot.session import Heard
from lightning_snapshot.view import view_of_rank
from lightning_snapshot.write_plan import Holders, Layout, Planner, TensorSpec

_SHAPE = (8192, 512)
_REPLICAS = 8
_BLOCK_BYTES = 4 << 20
_MIB = 2.0**20


@dataclass
class Line(Meeting):
    """One rank's end of a meeting in which the ranks take turns: rank 0 comes last to gather, and first to scatter."""

    rank: int
    gathered: list[bytes] = field(default_factory=list)
    scattered: list[bytes] = field(default_factory=list)

    def gather(self, name: str, payload: bytes) -> list[bytes] | None:
        self.gathered.append(payload)
        return None if self.rank else [payload, *self.gathered[:-1]]

    def scatter(self, name: str, payloads: Sequence[bytes] = ()) -> bytes:
        if self.rank == 0:
            self.scattered.extend(payloads)
        return self.scattered[self.rank]


@dataclass(frozen=True)
class Job:
    """What the ranks of a job have."""

    contribution: Callable[[int], Contribution]
    holders: Holders | None = None


def _names(tensors: int) -> list[str]:
    return [f"state_dict/layers.{number // 10}.weight.{number % 10}" for number in range(tensors)]


def _notes(names: Sequence[str], placement: str) -> RankNotes:
    return RankNotes(
        ("state_dict",), tensors={name: TensorNote(placement=placement) for name in names} if placement else {}
    )


def ddp(world_size: int, tensors: int) -> Job:
    """All ranks hold everything; as Lightning saves it."""
    names = _names(tensors)
    keys = OrderedDictEntry([name.partition("/")[2] for name in names])
    spec = TensorSpec("torch.float32", 4, _SHAPE, replicated=True)
    first = Contribution({"state_dict": keys, **dict.fromkeys(names, spec)}, _notes(names, ""), ("state_dict",))
    other = Contribution({}, RankNotes(over_rank_0=True), ("state_dict",))
    return Job(lambda rank: other if rank else first, {"state_dict": range(world_size)})


def sharded(shards: int, tensors: int, placement: str) -> Job:
    """Rank r holds shard r modulo ``shards`` of each tensor; as Lightning saves it."""
    names = _names(tensors)
    keys = OrderedDictEntry([name.partition("/")[2] for name in names])
    rows = -(-_SHAPE[0] // shards)

    def contribution(rank: int) -> Contribution:
        begin = min(_SHAPE[0], rank % shards * rows)
        box = Box((begin, 0), (min(rows, _SHAPE[0] - begin), _SHAPE[1]))
        specs = dict.fromkeys(names, TensorSpec("torch.float32", 4, _SHAPE, box))
        if rank:
            return Contribution(specs, RankNotes(over_rank_0=True), ("state_dict",))
        return Contribution({"state_dict": keys, **specs}, _notes(names, placement), ("state_dict",))

    return Job(contribution, {"state_dict": range(1)})


JOBS: dict[str, Callable[[int, int], Job]] = {
    "DDP": ddp,
    "FSDP2": lambda world_size, tensors: sharded(world_size, tensors, f"Shard(dim=0) on {world_size}"),
    "HSDP": lambda world_size, tensors: sharded(
        world_size // _REPLICAS, tensors, f"Replicate(), Shard(dim=0) on {_REPLICAS}x{world_size // _REPLICAS}"
    ),
}


class Clock:
    """Processor seconds of rank 0 by stage: nothing here waits, and nobody else on the machine should count."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, stage: str, action: Callable[[], Any]) -> Any:
        begin = time.process_time()
        with no_garbage_collection():
            result = action()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.process_time() - begin
        return result


class Ranks:
    """The ranks of a job through several saves."""

    def __init__(self, world_size: int, job: Job) -> None:
        self._world_size = world_size
        self._job = job
        self._heard = [Heard() for _ in range(world_size)]
        self._planner = Planner()
        self.metadata = b""

    def save(self, save_id: str, path: str) -> dict[str, Any]:
        """All that rank 0 does in a save, except for writing; and what travels."""
        clock = Clock()
        opening = Opening(save_id, path, self._heard[0].token, {"state_dict": "0" * 32})
        line = Line(0)
        everyone: list[Contribution] = []
        for rank in [*range(1, self._world_size), 0]:
            line.rank = rank
            act = partial(collect, line, self._heard[rank], opening, self._job.contribution(rank))
            everyone = act() if rank else clock.time("specs", act)
        gathered = sum(map(len, line.gathered))
        layout = Layout(save_id, 512 << 20, 1024 << 20)
        plan = clock.time(
            "plan", lambda: self._planner.plan([each.specs for each in everyone], layout, self._job.holders)
        )
        parts = [Part("", files) for files in plan.files]
        line.rank = 0
        clock.time("parts", lambda: distribute(line, self._heard[0], opening, parts))
        for rank in range(1, self._world_size):
            line.rank = rank
            distribute(line, self._heard[rank], opening, None)
        receipts = [
            {
                file.location: FileRecord(file.size_bytes, "0123456789abcdef" * -(-file.size_bytes // _BLOCK_BYTES))
                for file in files
            }
            for files in plan.files
        ]
        received = [len(message) for message in line.scattered[1:]]
        last = Line(0)
        for rank in [*range(1, self._world_size), 0]:
            last.rank = rank
            act = partial(hand_in, last, receipts[rank])
            records = act() if rank else clock.time("receipts", act)
        notes = {str(rank): each.notes for rank, each in enumerate(everyone)}
        extension = Extension(save_id, "benchmark", _BLOCK_BYTES, records, notes)
        manifest = Manifest("0.1.0", self._world_size, plan.entries, extension)
        self.metadata = clock.time("manifest", lambda: encode(manifest))
        for heard in self._heard:
            heard.token = save_id
        return {
            "rank_0_seconds": sum(clock.seconds.values()),
            "stage_seconds": clock.seconds,
            "gathered_bytes": gathered,
            "received_bytes": max(received),
            "receipt_bytes": sum(map(len, last.gathered)),
            "metadata_bytes": len(self.metadata),
        }


def _open(metadata: bytes) -> None:
    view_of_rank(decode(metadata, source="benchmark"), 0)


def measure(layout: str, world_size: int, tensors: int, rounds: int) -> dict[str, Any]:
    """First and later saves of a job, and opening what it has saved."""
    firsts, laters, opens = [], [], []
    for number in range(rounds):
        ranks = Ranks(world_size, JOBS[layout](world_size, tensors))
        firsts.append(ranks.save(f"first{number}", "/checkpoint"))
        laters.append(ranks.save(f"later{number}", "/checkpoint"))
        metadata = ranks.metadata
        del ranks
        gc.collect()
        clock = Clock()
        clock.time("open", partial(_open, metadata))
        opens.append(clock.seconds["open"])
        gc.collect()
    first, later = (min(saves, key=lambda save: save["rank_0_seconds"]) for saves in (firsts, laters))
    return {
        "layout": layout,
        "ranks": world_size,
        "tensors": tensors,
        "first": first,
        "later": later,
        "open_seconds": min(opens),
    }


def _cells(row: dict[str, Any]) -> Iterator[str]:
    first, later = row["first"], row["later"]
    yield row["layout"]
    yield f"{row['ranks']:,}"
    yield f"{first['rank_0_seconds']:.2f}"
    yield f"{later['rank_0_seconds']:.2f}"
    yield f"{first['gathered_bytes'] / _MIB:.2f}"
    yield f"{later['gathered_bytes'] / _MIB:.2f}"
    yield f"{first['received_bytes'] / 1024:.1f}"
    yield f"{later['received_bytes'] / 1024:.1f}"
    yield f"{first['metadata_bytes'] / _MIB:.1f}"
    yield f"{row['open_seconds']:.2f}"


def main() -> None:
    """Run it."""
    arguments = common.parse_arguments(__doc__ or "", more=_more)
    tensors = max(10, round(1000 * arguments.scale))
    rows = []
    for world_size in arguments.ranks:
        for layout in arguments.layouts:
            print(f"{layout}, {world_size} ranks", file=sys.stderr, flush=True)
            rows.append(measure(layout, world_size, tensors, arguments.rounds))
    header = [
        "",
        "ranks",
        "save s",
        "later s",
        "sent to 0, MiB",
        "later",
        "to each, KiB",
        "later",
        "metadata MiB",
        "open s",
    ]
    results = (
        f"{tensors:,} tensors of {_SHAPE[0]} by {_SHAPE[1]}; processor seconds of rank 0, without writing data.\n\n"
        + common.table(header, [list(_cells(row)) for row in rows])
    )
    common.report("plan_scale", arguments, results, rows, _ratios(rows))


def _ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The worst layout counts; a job with twice the ranks may take twice the time."""
    ratios: dict[str, float] = {}
    by_layout: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_layout.setdefault(row["layout"], []).append(row)
        if row["ranks"] == 1024:
            ratios["plan_1024_seconds"] = max(ratios.get("plan_1024_seconds", 0.0), row["first"]["rank_0_seconds"])
    for found in by_layout.values():
        few, many = found[0], found[-1]
        if many["ranks"] > few["ranks"]:
            more = many["ranks"] / few["ranks"]
            growth = many["first"]["rank_0_seconds"] / few["first"]["rank_0_seconds"] / more
            received = many["first"]["received_bytes"] / few["first"]["received_bytes"]
            ratios["plan_growth_per_rank"] = max(ratios.get("plan_growth_per_rank", 0.0), growth)
            ratios["received_growth"] = max(ratios.get("received_growth", 0.0), received)
    return ratios


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024], help="numbers of ranks; try 4096, too")
    parser.add_argument("--layouts", nargs="+", choices=JOBS, default=list(JOBS), help="which jobs")


if __name__ == "__main__":
    main()
