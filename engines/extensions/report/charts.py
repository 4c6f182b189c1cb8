"""Charts: lines and bars as SVG within a page, and lines as a PNG."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]

MOST_POINTS = 300
COLOURS = ("#2563eb", "#d9480f", "#2b8a3e", "#9c36b5", "#0b7285", "#c2255c", "#846200", "#868e96")
DIM = "#80868f"  # of text and axes, for light and dark pages
DPI = 110  # of the PNG


class LineChart(NamedTuple):
    """Lines over the same axes.

    Args:
        title: title of the chart.
        lines: points (x, y) by label, ordered by x; points that are not finite are left out.
        unit: unit of y, or the meaning of a value.
        xlabel: label of the x axis.
        y: range of y: `free` fits the points, `from_zero` begins at 0, `share` is within 0 and 100 %.
    """

    title: str
    lines: Mapping[str, Points]
    unit: str = ""
    xlabel: str = "updates"
    y: Literal["free", "from_zero", "share"] = "free"

    @property
    def finite(self) -> dict[str, list[tuple[float, float]]]:
        """Finite points of each line that has any, at most 300 per line."""
        finite = {label: [point for point in line if all(map(math.isfinite, point))] for label, line in self.lines.items()}
        return {label: thin(points) for label, points in finite.items() if points}


def draw_lines(chart: LineChart) -> str:
    """Return a figure of lines as HTML; empty if no line has a finite point."""
    finite = chart.finite
    if not finite:
        return ""
    figure, axes = _make_figure()
    _draw(axes, chart, finite)
    return to_svg(figure, chart.title, chart.unit, [*finite])


def draw_bars(title: str, bars: Mapping[str, Mapping[str, float]], *, xlabel: str) -> str:
    """Return a figure of grouped bars as HTML, fractions by position, by label; empty without a bar above 0."""
    positions = list(dict.fromkeys(position for heights in bars.values() for position in heights))
    if not any(height > 0 for heights in bars.values() for height in heights.values()):
        return ""
    figure, axes = _make_figure()
    width = 0.8 / len(bars)
    for number, heights in enumerate(bars.values()):
        centres = [tick - 0.4 + (number + 0.5) * width for tick in range(len(positions))]
        axes.bar(centres, [heights.get(position, 0.0) for position in positions], width)
    axes.set_xticks(range(len(positions)), positions, fontsize=8)
    _finish_axes(axes, xlabel, "share")
    return to_svg(figure, title, "share of the samples", [*bars])


def draw_curve(path: Path, title: str, points: Points, unit: str = "") -> None:
    """Draw one line over updates as a PNG; entry point of the model card's curve (`fluvial.curves`)."""
    draw_curves(path, [LineChart(title, {"": points}, unit)])


def draw_curves(path: Path, charts: Sequence[LineChart]) -> None:
    """Write a PNG of line charts, two per row, about 1,000 pixels wide, to be readable within a page of text.

    Charts without points are left out, unless no chart has points.
    """
    from matplotlib.figure import Figure

    shown = [chart for chart in charts if chart.finite] or list(charts)
    columns = min(len(shown), 2)
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(4.7 * columns, 3.1 * rows), layout="constrained")
    for number, chart in enumerate(shown):
        axes = figure.add_subplot(rows, columns, number + 1)
        axes.set_title(chart.title, fontsize=11, fontweight="bold", loc="left")
        axes.set_prop_cycle(color=COLOURS)
        _draw(axes, chart, chart.finite)
        axes.set_ylabel(chart.unit, fontsize=9)
        if [*chart.finite] not in ([], [""]):
            axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=DPI)


def thin(points: Points) -> list[tuple[float, float]]:
    """Return at most 300 points; more are averaged over 300 parts of equal length."""
    if len(points) <= MOST_POINTS:
        return list(points)
    edges = [i * len(points) // MOST_POINTS for i in range(MOST_POINTS + 1)]
    parts = [points[start:stop] for start, stop in pairwise(edges)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def _make_figure() -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 2.6))
    axes = figure.add_axes((0.14, 0.17, 0.84, 0.78))
    axes.set_prop_cycle(color=COLOURS)
    axes.tick_params(colors=DIM, labelsize=10)
    axes.xaxis.label.set(color=DIM, fontsize=10)
    axes.spines[:].set_color(DIM)
    axes.locator_params(nbins=5)
    return figure, axes


def _draw(axes: "Axes", chart: LineChart, lines: Mapping[str, Points]) -> None:
    """Draw lines; few points get markers, so that a single evaluation is visible."""
    from matplotlib.ticker import MaxNLocator

    for label, points in lines.items():
        marker = "o" if len(points) < 30 else None
        axes.plot([x for x, _ in points], [y for _, y in points], label=label, marker=marker, markersize=4)
    _finish_axes(axes, chart.xlabel, chart.y)
    if all(float(x).is_integer() for line in lines.values() for x, _ in line):
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _finish_axes(axes: "Axes", xlabel: str, y: str) -> None:
    """Set the axes' range, numbers and label."""
    least, most = axes.dataLim.intervaly
    if y == "share":
        axes.set_ylim(0, min(1.08 * most, 1.02) if most > 0 else 1)  # all 0: the whole range
        axes.yaxis.set_major_formatter(lambda value, place: f"{100 * value:.3g} %")
    else:
        if y == "from_zero" and least >= 0:
            axes.set_ylim(0, 1.08 * most if most > 0 else 1)
        axes.yaxis.set_major_formatter(lambda value, place: f"{value:.6g}")  # no factor above the axis
    axes.set_xlabel(xlabel)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def to_svg(figure: "Figure", title: str, unit: str = "", labels: Sequence[str] = ()) -> str:
    """Return a figure with its title, unit and legend as HTML. Text stays text, and equal charts give equal bytes.

    The legend is left out if the only label is empty.
    """
    from matplotlib import rc_context

    written = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.sans-serif": ["DejaVu Sans"]}):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = written.getvalue().partition("<svg")[2]
    svg = re.sub(r"<metadata>.*?</metadata>\s*|<style .*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' width="[\d.]+pt" height="[\d.]+pt"', "", svg, count=1)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # other charts of the page have the same ids
    name = escape(title)
    caption = f"{name} <em>{escape(unit)}</em>" if unit else name
    keys = "".join(
        f'<span><i style="background:{COLOURS[number % len(COLOURS)]}"></i>{escape(label)}</span>'
        for number, label in enumerate(labels)
    )
    legend = f'<div class="legend">{keys}</div>' if [*labels] not in ([], [""]) else ""
    return f'<figure><figcaption>{caption}</figcaption>{legend}<svg role="img" aria-label="{name}" {svg.strip()}</figure>'
