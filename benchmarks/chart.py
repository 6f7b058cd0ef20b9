"""The chart of save_load.py."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import OURS
from matplotlib.figure import Figure

_OURS_COLOUR, _PEER_COLOUR, _LIMIT_COLOUR = "#5b3fd6", "#b4b8c5", "#d1495b"


def draw(path: Path, rows: Sequence[Mapping[str, Any]], raw_save: float, raw_load: float) -> None:
    """Bars of all peers, and the limit of the device as a line.

    Args:
        path: PNG to write.
        rows: As in the JSON; rows of the device are left out.
        raw_save: Bytes per second.
        raw_load: Bytes per second.
    """
    bars = [row for row in rows if not row["name"].startswith(("raw device", "fio"))]
    bars.sort(key=lambda row: row["save_bytes_per_second"])
    names = [row["name"] for row in bars]
    figure = Figure(figsize=(10, 0.34 * len(bars) + 1.3), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, action, title, limit in (
        (axes[0], "save", "Durable save, GB/s", raw_save),
        (axes[1], "load", "Cold load, GB/s", raw_load),
    ):
        values = [row[f"{action}_bytes_per_second"] / 1e9 for row in bars]
        colours = [_OURS_COLOUR if name == OURS else _PEER_COLOUR for name in names]
        drawn = axis.barh(names, values, color=colours)
        axis.bar_label(drawn, fmt="%.2f", padding=3, fontsize=8)
        line = axis.axvline(limit / 1e9, color=_LIMIT_COLOUR, linestyle="--", linewidth=1)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlim(0, 1.12 * max(*values, limit / 1e9))
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=9)
    label = "what the disk can (O_DIRECT)"
    figure.legend([line], [label], loc="outside lower right", fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a date inside, the same figures give the same file.
    figure.savefig(path, dpi=150, metadata={"Software": None})
