"""What is left of an epoch when it goes on with another number of ranks.

Known is the order of the whole epoch for torch's sequential, random and distributed samplers. All ranks together have
read its beginning; the rest is dealt out anew, as ``DistributedSampler`` does it.
"""

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightning_snapshot.integration.resume import rng

__all__ = ["Share", "batches_of", "distributed_sampler", "share_after", "share_of"]

Share: TypeAlias = dict[str, Any]
"""Order of an epoch, how much of it was read before, and whose part of the rest is meant; plain data."""


def share_of(loader: Any, world_size: int) -> Share | None:
    """What a rank reads in one pass; None if the order of the whole epoch is not known.

    Args:
        loader: A loader before its pass.
        world_size: Number of ranks.
    """
    order = _order_of(loader, world_size)
    if order is None or type(loader.batch_sampler) is not BatchSampler:
        return None
    return {
        "order": order,
        "batch_size": loader.batch_sampler.batch_size,
        "drop_last": loader.batch_sampler.drop_last,
        "read": 0,
        "rank": None,
        "world_size": world_size,
    }


def share_after(share: Share, batches: int, first: rng.Rng | None, rank: int, world_size: int) -> Share:
    """What another rank reads of the rest.

    Args:
        share: What was being read.
        batches: How many batches each rank has read of it.
        first: Random numbers before its first index was drawn.
        rank: Now.
        world_size: Now.
    """
    read = share["read"] + batches * share["batch_size"] * share["world_size"]
    order = share["order"]
    if order["kind"] == "random" and "rng" not in order:
        order = {**order, "rng": first}
    return {**share, "order": order, "read": min(read, order["length"]), "rank": rank, "world_size": world_size}


def batches_of(share: Share) -> list[list[int]]:
    """The batches of a rank's part of the rest."""
    rest = list(_indices(share["order"]))[share["read"] :]
    world_size = share["world_size"]
    if share["drop_last"]:
        rest = rest[: len(rest) // world_size * world_size]
    while rest and len(rest) % world_size:
        rest += rest[: -len(rest) % world_size]
    return list(BatchSampler(rest[share["rank"] :: world_size], share["batch_size"], share["drop_last"]))


def distributed_sampler(loader: object) -> Any:
    """The ``DistributedSampler`` of a loader, if it has one."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None))
    return next((each for each in samplers if isinstance(each, DistributedSampler)), None)


def _order_of(loader: DataLoader[Any], world_size: int) -> dict[str, Any] | None:
    sampler = loader.sampler
    if type(sampler) is DistributedSampler and sampler.num_replicas == world_size:
        described = {name: getattr(sampler, name) for name in ("seed", "epoch", "shuffle")}
        return {"kind": "distributed", "length": len(loader.dataset), **described}  # type: ignore[arg-type]  # that sampler has asked it, too
    if world_size > 1:
        return None
    if type(sampler) is SequentialSampler:
        return {"kind": "sequential", "length": len(sampler)}
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return {"kind": "random", "length": len(sampler), "has_generator": sampler.generator is not None}
    return None


def _indices(order: dict[str, Any]) -> Iterator[int]:
    numbers = range(order["length"])
    if order["kind"] == "sequential":
        yield from numbers
    elif order["kind"] == "distributed":
        how = {"shuffle": order["shuffle"], "seed": order["seed"]}
        sampler: DistributedSampler[int] = DistributedSampler(numbers, num_replicas=1, rank=0, **how)  # type: ignore[arg-type]  # a range has a length, and is not read
        sampler.set_epoch(order["epoch"])
        yield from sampler
    else:
        now = rng.capture()
        generator = torch.Generator() if order["has_generator"] else None
        rng.restore({**order["rng"]}, [] if generator is None else [generator])
        drawn = list(RandomSampler(numbers, generator=generator))
        rng.restore(now)
        yield from drawn
