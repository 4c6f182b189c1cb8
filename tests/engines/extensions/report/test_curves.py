"""Line charts: a PNG with every panel, also of a run that has no numbers yet."""

from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest
from PIL import Image

from fluvial.engines.extensions.report import charts

pytestmark = pytest.mark.usefixtures("charts")


POINTS = {"mean": [(1.0, 0.5), (2.0, 0.75)]}


@pytest.mark.parametrize(
    ("lines", "columns", "rows"),
    [([POINTS] * 5, 2, 3), ([POINTS, {"relative": []}], 1, 1), ([{}], 1, 1)],
    ids=["five", "a line without points", "no lines"],
)
def test_curves_are_a_png_as_wide_as_a_page_of_text(
    lines: list[dict[str, list[tuple[float, float]]]], columns: int, rows: int, tmp_path: Path
) -> None:
    """Two charts per row; charts without points are left out, if there are others."""
    charts.curves(tmp_path / "curves.png", [charts.LineChart("t", each) for each in lines])
    with Image.open(tmp_path / "curves.png") as drawn:
        drawn.load()  # raises if the file is cut short
        assert (drawn.format, drawn.size) == ("PNG", (517 * columns, 341 * rows))


def test_each_line_has_its_points_and_its_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few points are marked, so that a single evaluation is seen."""
    drawn: list[matplotlib.figure.Figure] = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, *args, **options: drawn.append(figure))
    many = [(float(x), float(x * x)) for x in range(30)]
    shown = [
        charts.LineChart("reward", {"mean": [(3.0, 0.5)]}, "per sample"),
        charts.LineChart("norm", {"": many}, y="from_zero"),
    ]
    charts.curves(tmp_path / "curves.png", shown)
    (figure,) = drawn
    one, other = figure.axes
    assert (one.get_title(loc="left"), other.get_title(loc="left")) == ("reward", "norm")
    assert (one.get_xlabel(), one.get_ylabel()) == ("updates", "per sample")
    assert one.get_lines()[0].get_label() == "mean"
    assert np.asarray(one.get_lines()[0].get_xydata()).tolist() == [[3.0, 0.5]]
    assert np.asarray(other.get_lines()[0].get_xydata()).tolist() == [list(point) for point in many]
    assert (one.get_lines()[0].get_marker(), other.get_lines()[0].get_marker()) == ("o", "None")
    assert one.get_legend() is not None
    assert other.get_legend() is None
    assert other.get_ylim()[0] == 0
