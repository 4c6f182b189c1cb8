"""Charts as SVG: where points are, which ticks there are, and that text is text."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluvial.engines.report.charts import MOST_POINTS, bar_chart, bounds, line_chart, number, thinned, ticks


def coordinates(figure: str) -> list[list[tuple[float, float]]]:
    """Return the points of each line of a figure."""
    return [[tuple(map(float, p.split(","))) for p in line.split()] for line in re.findall(r'points="([^"]*)"', figure)]  # type: ignore[misc]


def test_points_are_placed_in_proportion() -> None:
    """Upwards, from the left; a point that is no number is left out; both lines share their axes."""
    one, two = coordinates(
        line_chart("t", {"a": [(0, 0.0), (1, math.nan), (2, 1.0), (4, 2.0)], "b": [(2, 1.0), (4, math.inf)]})
    )
    assert len(one) == 3
    assert one[1] == two[0]
    assert one[1][0] == pytest.approx((one[0][0] + one[2][0]) / 2, abs=0.1)
    assert one[1][1] == pytest.approx((one[0][1] + one[2][1]) / 2, abs=0.1)
    assert one[0][1] > one[2][1], "down is smaller"


def test_a_figure_is_well_formed_and_its_text_is_text() -> None:
    for figure in (line_chart("<a> & b", {"<c>": [(1, 1.0)]}), bar_chart("<a> & b", {"<c>": {"<d>": 1.0}}, xlabel="<e>")):
        text = "".join(ElementTree.fromstring(figure).itertext())
        assert {"<a> & b", "<c>"} <= {part for part in re.findall(r"<a> & b|<c>", text)}
    assert line_chart("t", {"a": []}) == line_chart("t", {}) == bar_chart("t", {"a": {"b": 0.0}}, xlabel="x") == ""


def test_bars_are_as_high_as_their_share() -> None:
    heights = [
        float(height)
        for height in re.findall(r'height="([\d.]+)"/>', bar_chart("t", {"a": {"x": 0.5, "y": 0.25}}, xlabel="x"))
    ]
    assert heights[0] == pytest.approx(2 * heights[1], abs=0.2)


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_ticks_are_round_and_enclose_the_values(a: float, b: float) -> None:
    """Whatever the values, also the same one twice."""
    low, high = bounds([a, b])
    found = ticks(low, high)
    step = found[1] - found[0]
    assert found[0] <= low + 1e-6 * step
    assert found[-1] >= high - 1e-6 * step
    assert 2 <= len(found) <= 7


def test_long_lines_are_thinned_to_means() -> None:
    """The mean of the line stays, and so does its order."""
    points = [(float(i), float(i % 7)) for i in range(7 * MOST_POINTS)]
    found = thinned(points)
    assert len(found) == MOST_POINTS
    assert found == sorted(found)
    assert sum(y for _, y in found) / len(found) == pytest.approx(3.0)
    assert thinned(points[:5]) == points[:5]


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.25, "0.25"), (1e-7, "1e-07"), (123456.0, "1.2e+05"), (1200.0, "1200")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text
