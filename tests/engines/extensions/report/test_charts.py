"""Charts as SVG: where points are, and that text is text; a PNG of all panels, also of a run without numbers."""

import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib.figure
import numpy as np
import pytest
from PIL import Image

from fluvial.engines.extensions.report.charts import (
    COLOURS,
    MOST_POINTS,
    LineChart,
    draw_bars,
    draw_curves,
    draw_lines,
    thin,
)

pytestmark = pytest.mark.usefixtures("charts")


def coordinates(figure: str, colour: str) -> list[tuple[float, float]]:
    path = next(path for path in re.findall(r'<path d="([^"]*)"[^>]*style="([^"]*)"', figure) if f": {colour}" in path[1])
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path[0])]


def test_points_are_placed_in_proportion() -> None:
    """Upwards, from the left; a point that is no number is left out; both lines share their axes."""
    figure = draw_lines(
        LineChart("t", {"a": [(0, 0.0), (1, math.nan), (2, 1.0), (4, 4.0)], "b": [(2, 1.0), (4, 2.0), (5, math.inf)]})
    )
    one, two = (coordinates(figure, colour) for colour in COLOURS[:2])
    assert (len(one), len(two)) == (3, 2)
    assert one[1] == two[0]
    assert one[1][0] == pytest.approx((one[0][0] + one[2][0]) / 2, abs=0.1)
    assert one[1][1] == pytest.approx((3 * one[0][1] + one[2][1]) / 4, abs=0.1)
    assert one[0][1] > one[2][1], "down is smaller"


def test_a_figure_is_well_formed_and_its_text_is_text() -> None:
    """Nothing of it leads out of the page, and no part has a name that a part of another chart has."""
    figures = (
        draw_lines(LineChart("<a> & b", {"<c>": [(1, 1.0)]}, "<f>")),
        draw_bars("a", {"<c>": {"<d>": 1.0}}, xlabel="<e>"),
    )
    for figure, words in zip(figures, ({"<a> & b", "<c>", "<f>", "updates"}, {"a", "<c>", "<d>", "<e>"}), strict=True):
        assert words <= {text.strip() for text in ElementTree.fromstring(figure).itertext()}
        assert set(re.findall(r"https?://[^\"]*", figure)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    names = [re.findall(r' id="([^"]*)"', figure) for figure in figures]
    assert all(names)
    assert len({name for found in names for name in found}) == sum(map(len, names))


def numbers(figure: str) -> list[str]:
    return [text.strip() for text in re.findall(r"<text [^>]*>([^<]*)</text>", figure) if text.strip() != "updates"]


def test_shares_are_percent_from_0() -> None:
    """Also where all of them are 0, or a line of one point; no axis goes below 0 or above 102 %."""
    for points, most in (([(1, 0.0), (2, 0.0)], 100.0), ([(1, 0.2), (2, 0.1)], 21.6), ([(1, 1.0)], 102.0)):
        ticks = [text for text in numbers(draw_lines(LineChart("t", {"": points}, y="share"))) if text.endswith("%")]
        assert ticks[0] == "0 %"
        assert 0 < float(ticks[-1].removesuffix(" %")) <= most


def test_sizes_begin_at_0_and_others_do_not() -> None:
    """A size below 0, which no range from 0 could show, is shown; no factor stands above an axis."""
    points = [(1, 5.1), (2, 5.2)]
    assert "0" in numbers(draw_lines(LineChart("t", {"": points}, y="from_zero")))
    assert "0" not in numbers(draw_lines(LineChart("t", {"": points})))
    assert "-2" in numbers(draw_lines(LineChart("t", {"": [(1, -2.0), (2, 2.0)]}, y="from_zero")))
    near = numbers(draw_lines(LineChart("t", {"": [(1, -0.88602), (2, -0.88584)]})))
    assert len(near) == len({*near}), "two ticks with one number"
    assert "1e-08" in numbers(draw_lines(LineChart("t", {"": [(1, -1e-8), (2, 1e-8)]})))


def test_a_lone_line_without_a_label_has_no_legend() -> None:
    """And nothing to draw is no figure; the same chart is the same bytes."""
    points = [(1.0, 1.0)]
    assert "legend" not in draw_lines(LineChart("t", {"": points}))
    chart = LineChart("t", {"a": points, "b": []})
    figure = draw_lines(chart)
    assert figure.count("<i ") == 1, "a line without points has no key"
    assert f'background:{COLOURS[0]}"></i>a<' in figure
    assert draw_lines(chart) == figure
    empty = draw_lines(LineChart("t", {"a": []})), draw_lines(LineChart("t", {})), draw_bars("t", {"a": {}}, xlabel="x")
    assert empty == ("", "", "") == (*empty[:2], draw_bars("t", {"a": {"b": 0.0}}, xlabel="x"))


def test_bars_are_as_high_as_their_share() -> None:
    figure = draw_bars("t", {"a": {"x": 0.5, "y": 0.25}, "b": {"x": 0.125}}, xlabel="x")
    paths = re.findall(r'<path d="([^"]*)"[^>]*style="fill: (#\w+)', figure)
    heights = {}
    for colour in COLOURS[:2]:
        found = [re.findall(r"[ML] [-\d.]+ ([-\d.]+)", path) for path, fill in paths if fill == colour]
        heights[colour] = [max(map(float, ys)) - min(map(float, ys)) for ys in found]
    first, second = (heights[colour] for colour in COLOURS[:2])
    assert first[0] == pytest.approx(2 * first[1], abs=0.2)
    assert first[0] == pytest.approx(4 * second[0], abs=0.2)


def test_long_lines_are_thinned_to_means() -> None:
    points = [(float(i), float(i % 7)) for i in range(7 * MOST_POINTS)]
    found = thin(points)
    assert len(found) == MOST_POINTS
    assert found == sorted(found)
    assert sum(y for _, y in found) / len(found) == pytest.approx(3.0)
    assert thin(points[:5]) == points[:5]


POINTS = {"mean": [(1.0, 0.5), (2.0, 0.75)]}


def test_curves_are_a_png_as_wide_as_a_page_of_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two charts per row; those without points are left out, if there are others. Each line has its points and its label."""
    cases: list[tuple[int, int, list[Any]]] = [(2, 3, [POINTS] * 5), (1, 1, [POINTS, {"relative": []}]), (1, 1, [{}])]
    for columns, rows, charts in cases:
        draw_curves(tmp_path / "curves.png", [LineChart("t", each) for each in charts])
        with Image.open(tmp_path / "curves.png") as image:
            image.load()  # raises if the file is cut short
            assert (image.format, image.size) == ("PNG", (517 * columns, 341 * rows))
    drawn: list[matplotlib.figure.Figure] = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, *args, **options: drawn.append(figure))
    many = [(float(x), float(x * x)) for x in range(30)]
    shown = [LineChart("reward", {"mean": [(3.0, 0.5)]}, "per sample"), LineChart("norm", {"": many}, y="from_zero")]
    draw_curves(tmp_path / "curves.png", shown)
    one, other = drawn[0].axes
    assert (one.get_title(loc="left"), other.get_title(loc="left")) == ("reward", "norm")
    assert (one.get_xlabel(), one.get_ylabel()) == ("updates", "per sample")
    first, second = one.get_lines()[0], other.get_lines()[0]
    assert (first.get_label(), first.get_marker(), second.get_marker()) == ("mean", "o", "None")
    assert np.asarray(first.get_xydata()).tolist() == [[3.0, 0.5]]
    assert np.asarray(second.get_xydata()).tolist() == [list(point) for point in many]
    assert (one.get_legend() is not None, other.get_legend(), other.get_ylim()[0]) == (True, None, 0)
