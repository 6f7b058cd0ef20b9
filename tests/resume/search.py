"""Resumes of runs that are drawn at random, for what nobody thought of when the matrix was written.

::

    python -m tests.resume.search --seconds 600 --seed 7

Prints each case that differs from the run that was left alone, as a `Case` to put into the matrix, and ends with
status 1 if there was one.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.ranks.processes import run_ranks
from tests.resume.cases import Case, compare_all

MOMENTS = (
    *("mid-epoch", "epoch end", "mid-validation", "last batch"),
    *("validation end", "first batch", "next epoch", "second batch"),
)
# Loader → sampler → how often it is drawn.
SAMPLERS = {
    "plain": {"sequential": 1, "random": 1, "generator": 1, "weighted": 1, "batches": 1, "unbatched": 1}
    | {"distributed": 1, "persistent": 2},
    "stateful": {"sequential": 1, "weighted": 1, "distributed": 1, "random": 1, "generator": 1, "batches": 1}
    | {"stream": 1, "long stream": 1, "rare states": 1, "rare states stream": 1}
    | {"persistent": 1, "persistent stream": 1, "persistent long stream": 2, "persistent rare states": 1},
    "nodes": {"distributed": 1},
    "own": {"": 1, "with length": 1},
    "litdata": {"random": 1},
    "several": {"min_size": 1, "max_size": 1, "max_size_cycle": 1},
}
LOADERS = {"plain": 4, "stateful": 5, "nodes": 1, "own": 1, "litdata": 1, "several": 1}
# torchdata's random samplers do not know ranks.
ALONE = {"random", "generator", "batches", "rare states", "persistent", "persistent rare states"}
BATCH_OF_CASES = 8


def _drawn(weights: dict[Any, int], chance: random.Random) -> Any:
    return chance.choices(list(weights), list(weights.values()))[0]


def draw(chance: random.Random, ranks: int) -> Case:
    """A case that Lightning accepts and that is exact according to docs/exact-resume.md."""
    while True:
        loader = _drawn(LOADERS, chance)
        sampler = _drawn(SAMPLERS[loader], chance)
        workers = chance.choice([0, 0, 2])
        has_workers = workers > 0 or "persistent" not in sampler
        is_alone = loader == "several" or (loader == "stateful" and sampler in ALONE)
        if has_workers and (ranks == 1 or not is_alone):
            break
    trainer: dict[str, Any] = {}
    if chance.random() < 0.45:
        trainer["limit_train_batches"] = chance.choice([4, 5, 7])
    validation = chance.random()
    if validation < 0.25:
        trainer["val_check_interval"] = chance.choice([2, 3])
    elif validation < 0.4:
        trainer["check_val_every_n_epoch"] = 2
    others = {
        "accumulate_grad_batches": (2, 3),
        "reload_dataloaders_every_n_epochs": (1, 2),
        "limit_val_batches": (2,),
        "gradient_clip_val": (0.1,),
        "num_sanity_val_steps": (2,),
    }
    trainer |= {name: chance.choice(values) for name, values in others.items() if chance.random() < 0.2}
    if chance.random() < 0.15:
        trainer |= {"max_epochs": -1, "max_steps": 30}
    how = {"trainer": tuple(trainer.items()), "callback": (("save_gradients", True),)}
    return Case(loader, sampler, workers, ranks, chance.choice(MOMENTS), chance.random() < 0.3, **how)


def main() -> int:
    """Search until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no new cases after this")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    end = time.monotonic() + arguments.seconds
    tried = differ = 0
    while time.monotonic() < end:
        ranks = chance.choice([1, 1, 1, 2])
        cases = [draw(chance, ranks) for _ in range(BATCH_OF_CASES)]
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(compare_all, ranks, cases, Path(folder), timeout_seconds=600)
        for case, texts in zip(cases, zip(*found, strict=True), strict=True):
            # A limit can leave out the moment at which the case would save.
            tried += "not saved" not in texts
            wrong = [text for text in texts if text not in (None, "not saved")]
            differ += bool(wrong)
            if wrong:
                print(f"{wrong}: {case!r}", flush=True)
    print(f"seed {arguments.seed}: {tried} resumed runs, {differ} differ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
