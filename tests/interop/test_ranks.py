"""What we write on several ranks, torchsnapshot reads on any number of them."""

from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_snapshot import Snapshot, StateDict
from tests.ranks.processes import run_ranks

pytestmark = [pytest.mark.interop, pytest.mark.distributed]

ROWS = torch.arange(15.0).reshape(5, 3)


def take(rank: int, path: str) -> list[str]:
    world_size = distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    grid = init_device_mesh("cpu", (2, world_size // 2))
    torch.manual_seed(0)
    state = {
        "module": torch.nn.Linear(4, 3),
        "shared": StateDict(big=torch.arange(1024.0 * 1024).reshape(1024, 1024), number=5, nothing=None),
        "spread": StateDict(
            rows=distribute_tensor(ROWS, mesh, [Shard(0)]),
            columns=distribute_tensor(ROWS, mesh, [Shard(1)]),
            hybrid=distribute_tensor(ROWS, grid, [Replicate(), Shard(0)]),
            half=distribute_tensor(ROWS.to(torch.bfloat16), grid, [Shard(1), Shard(0)]),
            everywhere=distribute_tensor(ROWS, mesh, [Replicate()]),
        ),
        "own": StateDict(rank=rank, tensor=torch.full((3,), float(rank)), object=(rank,)),
    }
    snapshot = Snapshot.take(path, state, replicated=["module/*", "shared/*"])
    pieces = snapshot.get_manifest()["0/shared/big"].chunks
    return sorted({piece.tensor.location.partition("_")[0][-1] for piece in pieces})


def _restore_with_torchsnapshot(path: str, saved_text: str, store: str) -> None:
    import os
    import sys
    import traceback

    import torch
    import torchsnapshot
    from torch import distributed

    rows = torch.arange(15.0).reshape(5, 3)
    saved = int(saved_text)

    def restore(rank: int, world_size: int) -> None:
        address = f"file://{store}-{world_size}"
        distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
        torch.manual_seed(1)
        spread = {name: torch.zeros(5, 3) for name in ("rows", "columns", "hybrid", "everywhere")}
        app_state = {
            "module": torch.nn.Linear(4, 3),
            "shared": torchsnapshot.StateDict(big=torch.zeros(1024, 1024), number=0, nothing=1),
            "spread": torchsnapshot.StateDict(**spread, half=torch.zeros(5, 3, dtype=torch.bfloat16)),
        }
        if world_size <= saved:  # otherwise torchsnapshot's collectives get out of step
            app_state["own"] = torchsnapshot.StateDict(rank=-1, tensor=torch.zeros(3), object=0)
        snapshot = torchsnapshot.Snapshot(path)
        snapshot.restore(app_state)
        torch.manual_seed(0)
        assert torch.equal(app_state["module"].weight, torch.nn.Linear(4, 3).weight)
        assert torch.equal(app_state["shared"]["big"].flatten(), torch.arange(1024.0 * 1024))
        assert (app_state["shared"]["number"], app_state["shared"]["nothing"]) == (5, None)
        for name in spread:
            assert torch.equal(app_state["spread"][name], rows), name
        assert torch.equal(app_state["spread"]["half"], rows.to(torch.bfloat16))
        if world_size <= saved:
            assert app_state["own"]["rank"] == rank
            assert app_state["own"]["object"] == (rank,)
            assert torch.equal(app_state["own"]["tensor"], torch.full((3,), float(rank)))
        read = torch.zeros(5, 3)
        snapshot.read_object(f"{min(rank, saved - 1)}/spread/rows", obj_out=read)
        assert torch.equal(read, rows)
        distributed.barrier()

    children = []
    for size in (1, 2, 4):
        for rank in range(size):
            child = os.fork()
            if child == 0:
                try:
                    restore(rank, size)
                except BaseException:  # noqa: BLE001 - whatever it is, the parent has to see it
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
    sys.exit(any(os.waitpid(child, 0)[1] for child in children))


@pytest.mark.parametrize("saved", [2, 4])
def test_torchsnapshot_restores_on_other_ranks(torchsnapshot, saved: int, tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert run_ranks(take, saved, str(path))[0] == [str(rank) for rank in range(saved)]  # everybody wrote of it
    torchsnapshot.run(_restore_with_torchsnapshot, path, saved, tmp_path / "store")
