"""Line charts of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np


def curves(path: Path, panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], *, xlabel: str) -> None:
    """Write a PNG of line charts side by side: panel title -> line label -> points (x, y)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(panels), 4), layout="constrained")
    for axes, (title, lines) in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels.items(), strict=True):
        for label, points in lines.items():
            marker = "o" if len(points) < 30 else None
            axes.plot([x for x, _ in points], [y for _, y in points], label=label, marker=marker, markersize=4)
        axes.set(title=title, xlabel=xlabel)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if any(lines):
            axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
