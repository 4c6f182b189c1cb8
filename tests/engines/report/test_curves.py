"""Line charts: a PNG with every panel, also of a run that has no numbers yet."""

from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest
from PIL import Image

from fluvial.engines.report import charts

pytestmark = pytest.mark.usefixtures("charts")


@pytest.mark.parametrize(
    "panels",
    [
        {"reward": {"mean": [(1.0, 0.5), (2.0, 0.75)]}, "drift": {"relative": []}},
        {"reward": {}},
    ],
    ids=["a line without points", "a panel without lines"],
)
def test_curves_are_a_png_with_every_panel_side_by_side(
    panels: dict[str, dict[str, list[tuple[float, float]]]], tmp_path: Path
) -> None:
    charts.curves(tmp_path / "curves.png", panels, xlabel="updates")
    with Image.open(tmp_path / "curves.png") as drawn:
        drawn.load()  # raises if the file is cut short
        assert (drawn.format, drawn.size) == ("PNG", (int(5.5 * len(panels) * 110), 4 * 110))


def test_each_line_has_its_points_and_its_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few points are marked, so that a single evaluation is seen."""
    drawn: list[matplotlib.figure.Figure] = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, *args, **options: drawn.append(figure))
    many = [(float(x), float(x * x)) for x in range(30)]
    charts.curves(tmp_path / "curves.png", {"reward": {"mean": [(3.0, 0.5)]}, "norm": {"clipped": many}}, xlabel="updates")
    (figure,) = drawn
    one, other = figure.axes
    assert (one.get_title(), other.get_title(), one.get_xlabel()) == ("reward", "norm", "updates")
    assert [line.get_label() for axes in figure.axes for line in axes.get_lines()] == ["mean", "clipped"]
    assert np.asarray(one.get_lines()[0].get_xydata()).tolist() == [[3.0, 0.5]]
    assert np.asarray(other.get_lines()[0].get_xydata()).tolist() == [list(point) for point in many]
    assert (one.get_lines()[0].get_marker(), other.get_lines()[0].get_marker()) == ("o", "None")
    assert one.get_legend() is not None
