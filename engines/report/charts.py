"""Charts of a run: lines and bars as SVG inside a page, and lines as a PNG."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]

MOST_POINTS = 300
COLOURS = ("#2563eb", "#d9480f", "#2b8a3e", "#9c36b5", "#0b7285", "#c2255c", "#846200", "#868e96")
DIM = "#80868f"  # of text and axes, for light and dark pages


def line_chart(title: str, lines: Mapping[str, Points], *, xlabel: str = "updates") -> str:
    """Return a figure of lines, or nothing where no line has a finite point.

    Args:
        title: what is shown.
        lines: points (x, y) by label, ordered by x; points that are not finite are left out.
        xlabel: what x counts.
    """
    finite = {label: [point for point in points if all(map(math.isfinite, point))] for label, points in lines.items()}
    finite = {label: thinned(points) for label, points in finite.items() if points}
    if not finite:
        return ""
    figure, axes = _figure()
    _draw(axes, finite, xlabel)
    return as_svg(figure, title)


def bar_chart(title: str, bars: Mapping[str, Mapping[str, float]], *, xlabel: str) -> str:
    """Return a figure of bars side by side: heights by position, by label; nothing where there are none."""
    positions = list(dict.fromkeys(position for heights in bars.values() for position in heights))
    if not any(height > 0 for heights in bars.values() for height in heights.values()):
        return ""
    figure, axes = _figure()
    width = 0.8 / len(bars)
    for number, (label, heights) in enumerate(bars.items()):
        places = [place - 0.4 + (number + 0.5) * width for place in range(len(positions))]
        axes.bar(places, [heights.get(position, 0.0) for position in positions], width, label=label)
    axes.set_xticks(range(len(positions)), positions)
    _finish(axes, xlabel)
    return as_svg(figure, title)


def curves(path: Path, panels: Mapping[str, Mapping[str, Points]], *, xlabel: str) -> None:
    """Write a PNG of line charts side by side: panel title -> line label -> points (x, y)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(panels), 4), layout="constrained")
    for number, (title, lines) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), number + 1, title=title)
        _draw(axes, lines, xlabel)
    figure.savefig(path, dpi=110)


def thinned(points: Points) -> list[tuple[float, float]]:
    """Return at most 300 points: the means of as many stretches of equal length, where there are more."""
    if len(points) <= MOST_POINTS:
        return list(points)
    edges = [i * len(points) // MOST_POINTS for i in range(MOST_POINTS + 1)]
    stretches = [points[start:stop] for start, stop in pairwise(edges)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in stretches]


def _figure() -> "tuple[Figure, Axes]":
    from cycler import cycler
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 2.7))
    axes = figure.add_axes((0.14, 0.15, 0.84, 0.72))
    axes.set_prop_cycle(cycler(color=COLOURS))
    axes.tick_params(colors=DIM, labelsize=8)
    axes.xaxis.label.set(color=DIM, fontsize=8)
    axes.spines[:].set_color(DIM)
    axes.locator_params(nbins=5)
    return figure, axes


def _draw(axes: "Axes", lines: Mapping[str, Points], xlabel: str) -> None:
    """Draw lines; few points are marked, so that a single evaluation is seen."""
    for label, points in lines.items():
        marker = "o" if len(points) < 30 else None
        axes.plot([x for x, _ in points], [y for _, y in points], label=label, marker=marker, markersize=4)
    _finish(axes, xlabel)


def _finish(axes: "Axes", xlabel: str) -> None:
    axes.set_xlabel(xlabel)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        above = {} if axes.get_title() else {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 4, "fontsize": 8}
        axes.legend(frameon=False, labelcolor=axes.xaxis.label.get_color(), **above)


def as_svg(figure: "Figure", title: str) -> str:
    """Return a figure with its title as HTML; its text is text, and the same chart is the same bytes."""
    from matplotlib import rc_context

    written = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.sans-serif": ["DejaVu Sans"]}):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = written.getvalue().partition("<svg")[2]
    svg = re.sub(r"<metadata>.*?</metadata>\s*|<style .*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' width="[\d.]+pt" height="[\d.]+pt"', "", svg, count=1)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # names of parts, which other charts of the page have as well
    name = escape(title)
    return f'<figure><figcaption>{name}</figcaption><svg role="img" aria-label="{name}" {svg.strip()}</figure>'
