"""A run that was saved, stopped and resumed is the run that was left alone, bit for bit.

``make test`` tries a sample; ``make resume-matrix`` (``--complete-resume``) tries all of it.
"""

from dataclasses import replace
from itertools import groupby, product

import pytest
from lightning.pytorch import callbacks

from tests.ranks.processes import needs_fully_shard, run_ranks
from tests.resume.cases import Case, compare_all

pytestmark = pytest.mark.distributed

MOMENTS = ("mid-epoch", "epoch end", "mid-validation", "last batch", "validation end", "first batch")
SAMPLERS = {
    "plain": ("sequential", "random", "generator", "weighted", "batches", "unbatched", "distributed"),
    "stateful": ("sequential", "random", "generator", "weighted", "batches", "stream", "distributed"),
    "nodes": ("distributed",),
}
STEPS = (("max_epochs", -1), ("max_steps", 30))
KEPT = (("save_gradients", True),)
WINDOWS = (("accumulate_grad_batches", 3), ("val_check_interval", 3))
DOUBLE = (("precision", "64-true"),)
CUT_SHORT = (("limit_train_batches", 5),)
# Workers that live on, passes that end before the loader does, and states that a loader does not note at each batch.
UNEVEN = (
    *(Case("stateful", sampler, workers=2) for sampler in ("persistent", "persistent stream")),
    *(
        Case("stateful", sampler, workers=2)
        for sampler in ("rare states", "rare states stream", "persistent rare states")
    ),
    *(Case(loader, "persistent", workers=2, trainer=CUT_SHORT) for loader in ("plain", "stateful")),
    *(Case("stateful", sampler, workers=2, trainer=CUT_SHORT) for sampler in ("random", "persistent long stream")),
    Case("stateful", "long stream", trainer=CUT_SHORT),
    *(Case("nodes", "distributed", workers=workers, trainer=CUT_SHORT) for workers in (0, 2)),
    *(Case("litdata", sampler, workers) for sampler, workers in (("random", 0), ("random", 2), ("sequential", 0))),
    *(Case("litdata", "random", ranks=ranks, trainer=CUT_SHORT) for ranks in (1, 2)),
    *(Case("own", sampler, trainer=how) for sampler in ("", "with length") for how in ((), CUT_SHORT)),
)
OPEN_WINDOWS = (("accumulate_grad_batches", 4), ("val_check_interval", 3))


def _averaging(moment):
    # From Lightning 2.6 on.
    return [Case(moment=moment, kind="averaging")] if hasattr(callbacks, "EMAWeightAveraging") else []


def _cases():
    for loader, samplers in SAMPLERS.items():
        for sampler, workers, ranks, moment in product(samplers, (0, 2), (1, 2), MOMENTS):
            for is_async in (False, True):
                if ranks == 1 or not (loader == "stateful" and sampler in ("random", "generator", "batches")):
                    yield Case(loader, sampler, workers, ranks, moment, is_async)
    for mode, workers, moment in product(("min_size", "max_size", "max_size_cycle"), (0, 2), MOMENTS):
        yield Case("several", mode, workers, 1, moment)
    for moment, how in product(MOMENTS, (STEPS, WINDOWS, OPEN_WINDOWS, (("reload_dataloaders_every_n_epochs", 1),))):
        yield Case(moment=moment, trainer=how, callback=KEPT)
    for moment in MOMENTS:
        yield Case(moment=moment, trainer=DOUBLE)
        yield from _averaging(moment)
    for moment in ("mid-epoch", "epoch end", "next epoch", "second batch"):
        yield Case(moment=moment, kind="ends early")
    for how in ((), STEPS, WINDOWS, CUT_SHORT, (("reload_dataloaders_every_n_epochs", 1),)):
        yield Case(moment="epoch start", trainer=how, callback=KEPT)
        yield Case(moment="first epoch", trainer=how, callback=KEPT)
    for loader, sampler in (("stateful", "stream"), ("nodes", "distributed"), ("own", ""), ("litdata", "random")):
        yield Case(loader, sampler, moment="epoch start")
    for case, moment in product(UNEVEN, (*MOMENTS, "next epoch", "second batch")):
        yield replace(case, moment=moment)
    for moment in MOMENTS[:3]:
        yield Case(sampler="persistent", workers=2, moment=moment)
        yield Case(moment=moment, kind="finetuning", callback=KEPT)
        yield Case("stateful", "sequential", ranks=2, moment=f"early {moment}")
        yield Case(ranks=2, moment=moment, namespace="pytorch_lightning")
        yield Case(ranks=2, moment=moment, trainer=(("reload_dataloaders_every_n_epochs", 2),))
    for moment in MOMENTS:
        yield Case(ranks=3, moment=moment)
        yield Case(ranks=3, moment=moment, strategy="many buckets", is_async=True)
        yield Case("stateful", "stream", ranks=3, moment=moment, strategy="many buckets")
    for ranks in (3, 4):
        yield Case(ranks=ranks, strategy="static graph")
        yield Case(ranks=ranks, strategy="fsdp2", moment="epoch end")
    spread = (("fsdp2", "lightning"), ("fsdp2", "pytorch_lightning"), ("fsdp1", "lightning"), ("tp", "lightning"))
    for (strategy, namespace), moment, is_async in product(spread, MOMENTS, (False, True)):
        how = {"strategy": strategy, "namespace": namespace, "is_async": is_async}
        yield Case(ranks=2, moment=moment, **how)
        if strategy != "fsdp1":
            yield Case(ranks=2, moment=moment, **how, trainer=OPEN_WINDOWS, callback=KEPT)


# What was hard to get right, without the slow starts of workers as far as possible.
SAMPLE = [
    *(Case(moment=moment) for moment in MOMENTS),
    *(Case(sampler=sampler, is_async=True) for sampler in ("generator", "weighted", "batches", "unbatched")),
    *(Case("stateful", sampler) for sampler in ("random", "batches", "stream")),
    Case("stateful", "weighted", moment="first batch"),
    *(Case("stateful", sampler, moment="epoch end") for sampler in ("random", "generator", "stream")),
    Case("stateful", "stream", moment="last batch"),
    *(Case("nodes", "distributed", moment=moment) for moment in ("mid-epoch", "epoch end")),
    *(Case("several", mode) for mode in ("min_size", "max_size", "max_size_cycle")),
    *(Case(moment=moment, trainer=STEPS) for moment in ("epoch end", "last batch")),
    *(
        Case(moment=moment, trainer=WINDOWS, callback=KEPT)
        for moment in ("mid-epoch", "mid-validation", "validation end")
    ),
    Case(moment="epoch end", trainer=(("reload_dataloaders_every_n_epochs", 1),)),
    Case(namespace="pytorch_lightning"),
    Case(workers=2),
    Case(sampler="persistent", workers=2, moment="epoch end"),
    *(Case("stateful", "persistent long stream", 2, moment=moment, trainer=CUT_SHORT) for moment in MOMENTS[1:3]),
    Case("plain", "persistent", workers=2, moment="next epoch", trainer=CUT_SHORT),
    Case("nodes", "distributed", moment="epoch end", trainer=CUT_SHORT),
    Case("own", "with length", moment="epoch end"),
    *(Case("litdata", "random", moment=moment, trainer=CUT_SHORT) for moment in MOMENTS[:2]),
    Case("stateful", "persistent stream", workers=2, moment="last batch"),
    Case("stateful", "rare states", workers=2, moment="second batch"),
    *(Case(moment=moment, kind="finetuning", callback=KEPT) for moment in ("mid-epoch", "epoch end")),
    *_averaging("mid-validation"),
    Case(kind="ends early"),
    *(Case(moment=moment, callback=KEPT) for moment in ("epoch start", "first epoch")),
    Case("stateful", "stream", ranks=2, moment="epoch start"),
    Case(trainer=DOUBLE),
    Case("stateful", "stream", workers=2),
    *(Case(ranks=2, moment=moment, is_async=True) for moment in MOMENTS[:3]),
    Case("stateful", "stream", ranks=2),
    Case("stateful", "sequential", ranks=2, moment="early mid-epoch", namespace="pytorch_lightning"),
    Case("nodes", "distributed", ranks=2),
    Case(ranks=2, trainer=(("reload_dataloaders_every_n_epochs", 2),)),
    Case(ranks=2, strategy="fsdp2", moment="mid-validation", is_async=True, namespace="pytorch_lightning"),
    Case(ranks=2, strategy="fsdp2", trainer=OPEN_WINDOWS, callback=KEPT),
    # Sums of more than two numbers depend on their order.
    *(Case(ranks=3, moment=moment, strategy="many buckets") for moment in ("first batch", "mid-epoch")),
]


def _groups(cases, size):
    """Cases that share processes, and as far as possible the run that is left alone."""
    cases = sorted(cases, key=lambda case: (case.ranks, case.strategy, str(replace(case, moment="", is_async=False))))
    for (_, strategy), found in groupby(cases, key=lambda case: (case.ranks, case.strategy)):
        marks = [needs_fully_shard] if strategy == "fsdp2" else []
        same = list(found)
        for group in (same[start : start + size] for start in range(0, len(same), size)):
            yield pytest.param(group, id=f"{group[0]}…", marks=marks)


def _check(cases, folder):
    found = run_ranks(compare_all, cases[0].ranks, cases, folder, timeout_seconds=600)
    wrong = [
        f"{case}: rank {rank}: {text}"
        for rank, texts in enumerate(found)
        for case, text in zip(cases, texts, strict=True)
        if text is not None
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("cases", list(_groups(SAMPLE, 10)))
def test_a_resumed_run_is_the_run_that_was_left_alone(cases, tmp_path):
    _check(cases, tmp_path)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cases", list(_groups(_cases(), 24)))
def test_the_complete_matrix(cases, tmp_path):
    _check(cases, tmp_path)
