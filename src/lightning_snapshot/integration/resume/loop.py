"""`ResumeState`: random numbers and data loaders of a training loop of one's own, as with Fabric."""

import copy
import logging
from typing import Any

from lightning_snapshot.integration.ranks import rank_and_world_size
from lightning_snapshot.integration.resume import rng
from lightning_snapshot.integration.resume.passes import follow, go_on, is_followed, keep_workers, pass_of, settle
from lightning_snapshot.integration.resume.rng import generators_of
from lightning_snapshot.integration.resume.shares import distributed_sampler
from lightning_snapshot.stateful import Stateful

__all__ = ["ResumeState"]

_logger = logging.getLogger("lightning_snapshot")


class ResumeState:
    """Random numbers of this rank, and where its data loaders are, as one more object of a state.

    ::

        resume = ResumeState(loader)                                            # before the loader is read from
        fabric.save("state.ckpt", {"model": model, "resume": resume, ...})      # and fabric.load with the same

    After a load, the next ``for batch in loader`` goes on with the batch that was next at the save, if that was inside
    of such a loop. Which epoch that is, and telling it samplers with ``set_epoch``, stays with the loop.

    Args:
        loaders: Those of torch and torchdata, or what ``fabric.setup_dataloaders`` makes of them. Others are kept if
            they have ``state_dict`` and ``load_state_dict``; the random numbers that they draw when a pass begins are
            drawn again in its middle.
    """

    def __init__(self, *loaders: Any) -> None:
        self._wrappers = loaders
        self._loaders = [getattr(loader, "_dataloader", loader) for loader in loaders]
        for loader in self._loaders:
            follow(loader)

    def state_dict(self) -> dict[str, Any]:
        """A copy of all that is needed, as plain data."""
        now = rng.capture(cuda=True)
        rank, world_size = rank_and_world_size()
        loaders = [self._state_of(*each) for each in zip(self._loaders, self._wrappers, strict=True)]
        rng.restore(now)  # loaders with a state may draw numbers when they are asked for it
        return {"rank": rank, "world_size": world_size, "rng": rng.storable(now), "loaders": loaders}

    def _state_of(self, loader: Any, wrapper: Any) -> dict[str, Any]:
        now = pass_of(loader)
        is_over = now is None or now.is_over
        data_sets = settle(loader) if is_over else {}
        sampler = distributed_sampler(loader)
        return {
            "pass": None if now is None else rng.storable(now.state()),
            "is_over": is_over,
            "data_sets": data_sets,
            "passes": getattr(wrapper, "_num_iter_calls", 0),
            "seed": None if sampler is None else sampler.seed,
            "state": copy.deepcopy(loader.state_dict()) if isinstance(loader, Stateful) else None,
            "generators": rng.storable(rng.capture(generators_of(loader))["generators"]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the random numbers, and let the next passes over the loaders go on where they were.

        If the number of ranks has changed, nothing is set, with a warning: each rank had its own.
        """
        if (state["rank"], state["world_size"]) != rank_and_world_size():
            _logger.warning(
                "the state was saved by rank %d of %d and is loaded by rank %d of %d: random numbers and positions of "
                "data loaders are not restored, and the epoch begins with its first batch",
                *(state["rank"], state["world_size"]),
                *rank_and_world_size(),
            )
            return
        for loader, wrapper, its_state in zip(self._loaders, self._wrappers, state["loaders"], strict=True):
            counted = None if its_state["is_over"] else its_state["pass"]
            if loader is not wrapper:
                # Fabric tells the sampler as epoch how many passes there were.
                wrapper._num_iter_calls = its_state["passes"] - (counted is not None)  # noqa: SLF001  # no public way
            sampler = distributed_sampler(loader)
            if sampler is not None and its_state["seed"] is not None:
                sampler.seed = its_state["seed"]
            # Those that are followed would find nothing left to read at the end of a pass.
            if isinstance(loader, Stateful) and (counted is not None or not is_followed(loader)):
                loader.load_state_dict(its_state["state"])
                counted = counted and {**counted, "batches": 0, "digest": 0}  # it counts them itself
            if its_state["is_over"] and its_state["pass"] is not None:
                keep_workers(loader, its_state["pass"], its_state.get("data_sets", {}))
            if counted is not None:
                go_on(loader, counted, after=state["rng"])
            rng.restore({**state["rng"], "generators": its_state["generators"]}, generators_of(loader))
        rng.restore(state["rng"])
