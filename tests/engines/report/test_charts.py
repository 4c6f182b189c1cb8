"""Charts as SVG: where points are, and that text is text."""

import math
import re
from xml.etree import ElementTree

import pytest

from fluvial.engines.report.charts import COLOURS, MOST_POINTS, bar_chart, line_chart, thinned

pytestmark = pytest.mark.usefixtures("charts")


def coordinates(figure: str, colour: str) -> list[tuple[float, float]]:
    """Return the points of the first path of a colour."""
    path = next(path for path in re.findall(r'<path d="([^"]*)"[^>]*style="([^"]*)"', figure) if f": {colour}" in path[1])
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path[0])]


def test_points_are_placed_in_proportion() -> None:
    """Upwards, from the left; a point that is no number is left out; both lines share their axes."""
    figure = line_chart("t", {"a": [(0, 0.0), (1, math.nan), (2, 1.0), (4, 4.0)], "b": [(2, 1.0), (4, 2.0), (5, math.inf)]})
    one, two = (coordinates(figure, colour) for colour in COLOURS[:2])
    assert (len(one), len(two)) == (3, 2)
    assert one[1] == two[0]
    assert one[1][0] == pytest.approx((one[0][0] + one[2][0]) / 2, abs=0.1)
    assert one[1][1] == pytest.approx((3 * one[0][1] + one[2][1]) / 4, abs=0.1)
    assert one[0][1] > one[2][1], "down is smaller"


def test_a_figure_is_well_formed_and_its_text_is_text() -> None:
    """Nothing of it leads out of the page, and no part has a name that a part of another chart has."""
    figures = (line_chart("<a> & b", {"<c>": [(1, 1.0)]}), bar_chart("a", {"<c>": {"<d>": 1.0}}, xlabel="<e>"))
    for figure, words in zip(figures, ({"<a> & b", "<c>", "updates"}, {"a", "<c>", "<d>", "<e>"}), strict=True):
        assert words <= {text.strip() for text in ElementTree.fromstring(figure).itertext()}
        assert set(re.findall(r"https?://[^\"]*", figure)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    names = [re.findall(r' id="([^"]*)"', figure) for figure in figures]
    assert all(names)
    assert len({name for found in names for name in found}) == sum(map(len, names))


def test_the_same_chart_is_the_same_bytes() -> None:
    lines = {"a": [(0.0, 1.0), (1.0, 2.0)]}
    assert line_chart("t", lines) == line_chart("t", lines)


def test_nothing_to_draw_is_no_figure() -> None:
    assert line_chart("t", {"a": []}) == line_chart("t", {}) == bar_chart("t", {"a": {"b": 0.0}}, xlabel="x") == ""


def test_bars_are_as_high_as_their_share() -> None:
    """Side by side, where there are several per position."""
    figure = bar_chart("t", {"a": {"x": 0.5, "y": 0.25}, "b": {"x": 0.125}}, xlabel="x")
    paths = re.findall(r'<path d="([^"]*)"[^>]*style="fill: (#\w+)', figure)
    heights = {}
    for colour in COLOURS[:2]:
        found = [re.findall(r"[ML] [-\d.]+ ([-\d.]+)", path) for path, fill in paths if fill == colour]
        heights[colour] = [max(map(float, ys)) - min(map(float, ys)) for ys in found]
    first, second = (heights[colour] for colour in COLOURS[:2])
    assert first[0] == pytest.approx(2 * first[1], abs=0.2)
    assert first[0] == pytest.approx(4 * second[0], abs=0.2)


def test_long_lines_are_thinned_to_means() -> None:
    """The mean of the line stays, and so does its order."""
    points = [(float(i), float(i % 7)) for i in range(7 * MOST_POINTS)]
    found = thinned(points)
    assert len(found) == MOST_POINTS
    assert found == sorted(found)
    assert sum(y for _, y in found) / len(found) == pytest.approx(3.0)
    assert thinned(points[:5]) == points[:5]
