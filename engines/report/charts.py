"""Charts of a run as inline SVG: lines over updates, and bars. Colours come from the page's style sheet."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 420, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 8, 12, 26
MOST_POINTS, COLOURS = 300, 8


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
    everything = [point for points in finite.values() for point in points]
    xs, ys = ticks(*bounds([x for x, _ in everything])), ticks(*bounds([y for _, y in everything]))
    low_x, high_x = bounds([x for x, _ in everything])

    def place(x: float, y: float) -> str:
        across, up = (x - low_x) / (high_x - low_x), (y - ys[0]) / (ys[-1] - ys[0])
        return f"{LEFT + across * (WIDTH - LEFT - RIGHT):.1f},{HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM):.1f}"

    parts = []
    for y in ys:
        (x0, level), (x1, _) = (place(x, y).split(",") for x in (low_x, high_x))
        parts.append(f'<line class="grid" x1="{x0}" y1="{level}" x2="{x1}" y2="{level}"/>')
        parts.append(f'<text class="y" x="{LEFT - 5}" y="{level}">{number(y)}</text>')
    parts += [
        f'<text class="x" x="{place(x, ys[0]).split(",")[0]}" y="{HEIGHT - 10}">{number(x)}</text>'
        for x in xs
        if low_x <= x <= high_x
    ]
    for i, points in enumerate(finite.values()):
        colour = f"c{i % COLOURS}"
        placed = [place(x, y) for x, y in points]
        parts.append(f'<polyline class="{colour}" points="{" ".join(placed)}"/>')
        if len(points) < 30:
            parts += [f'<circle class="{colour}" cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="2.2"/>' for p in placed]
    return _figure(title, parts, list(finite), xlabel)


def bar_chart(title: str, bars: Mapping[str, Mapping[str, float]], *, xlabel: str) -> str:
    """Return a figure of bars side by side: heights by position, by label; nothing where there are none."""
    positions = list(dict.fromkeys(position for heights in bars.values() for position in heights))
    most = max((height for heights in bars.values() for height in heights.values()), default=0.0)
    if not most > 0:
        return ""
    parts = []
    slot = (WIDTH - LEFT - RIGHT) / len(positions)
    width = 0.8 * slot / len(bars)
    ys = ticks(0.0, most)
    for y in ys:
        level = HEIGHT - BOTTOM - y / ys[-1] * (HEIGHT - TOP - BOTTOM)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{level:.1f}" x2="{WIDTH - RIGHT}" y2="{level:.1f}"/>')
        parts.append(f'<text class="y" x="{LEFT - 5}" y="{level:.1f}">{number(y)}</text>')
    for k, position in enumerate(positions):
        middle = LEFT + (k + 0.5) * slot
        parts.append(f'<text class="x" x="{middle:.1f}" y="{HEIGHT - 10}">{escape(position)}</text>')
        for i, heights in enumerate(bars.values()):
            height = heights.get(position, 0.0) / ys[-1] * (HEIGHT - TOP - BOTTOM)
            left = LEFT + k * slot + 0.1 * slot + i * width
            parts.append(
                f'<rect class="c{i % COLOURS}" x="{left:.1f}" y="{HEIGHT - BOTTOM - height:.1f}" width="{width:.1f}" '
                f'height="{height:.1f}"/>'
            )
    return _figure(title, parts, list(bars), xlabel)


def thinned(points: Points) -> list[tuple[float, float]]:
    """Return at most 300 points: the means of as many stretches of equal length, where there are more."""
    if len(points) <= MOST_POINTS:
        return list(points)
    edges = [i * len(points) // MOST_POINTS for i in range(MOST_POINTS + 1)]
    stretches = [points[start:stop] for start, stop in pairwise(edges)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in stretches]


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return the smallest and the largest value, apart even if all are the same."""
    low, high = min(values), max(values)
    if low == high:
        spread = abs(low) / 2 or 1.0
        return low - spread, high + spread
    return low, high


def ticks(low: float, high: float, *, about: int = 4) -> list[float]:
    """Return round numbers at equal distances; the first is at most `low`, the last at least `high`."""
    rough = (high - low) / about
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def number(value: float) -> str:
    """Return a number in few characters."""
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2g}"
    return f"{round(value, 6):g}"


def _figure(title: str, parts: Sequence[str], labels: Sequence[str], xlabel: str) -> str:
    """Return a figure with its title and its legend."""
    keys = "".join(f'<span><i class="c{i % COLOURS}"></i>{escape(label)}</span>' for i, label in enumerate(labels))
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    legend = f'<div class="legend">{keys}<em>{escape(xlabel)}</em></div>'
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}{legend}</figure>"
