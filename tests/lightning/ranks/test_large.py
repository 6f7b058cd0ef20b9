"""How much each of two ranks writes, reads and takes of memory."""

import pytest

from tests.lightning.ranks import large
from tests.lightning.ranks.large import BUDGET_BYTES, MIB, MODEL_BYTES, STATE_BYTES
from tests.ranks.processes import needs_fully_shard, run_ranks

pytestmark = pytest.mark.distributed

# The plan, threads, what Python and torch load meanwhile.
MARGIN_BYTES = 12 * MIB
# Whole blocks of 4 MiB are read, also where only a part is wanted.
BLOCKS_BYTES = 2 * 4 * MIB


@pytest.mark.parametrize(
    ("name", "layout"), [("lightning", "ddp"), pytest.param("pytorch_lightning", "fsdp2", marks=needs_fully_shard)]
)
def test_each_rank_writes_half_and_reads_no_more_than_it_needs(name, layout, tmp_path):
    saved = run_ranks(large.save, 2, name, tmp_path, layout)
    loaded = run_ranks(large.load, 2, name, tmp_path, layout)

    assert STATE_BYTES <= sum(found["written"] for found in saved) < 1.01 * STATE_BYTES
    for found in saved:
        assert found["written"] < 1.1 * STATE_BYTES / 2
        assert found["grown"] < BUDGET_BYTES + MARGIN_BYTES
    share = 1 if layout == "ddp" else 2
    for found in loaded:
        assert STATE_BYTES / share <= found["resume read"] < STATE_BYTES / share + BLOCKS_BYTES
        # With DDP, Lightning reads the whole checkpoint for any purpose.
        needed = STATE_BYTES if layout == "ddp" else MODEL_BYTES / 2
        assert needed <= found["validate read"] < needed + BLOCKS_BYTES
        # DDP's optimizer takes its state from the checkpoint; everything else is read into what is there.
        own = STATE_BYTES - MODEL_BYTES if layout == "ddp" else 0
        assert found["resume grown"] < own + BUDGET_BYTES + MARGIN_BYTES
        assert found["copy grown"] > 0.8 * STATE_BYTES, "the measurement must see a copy"
