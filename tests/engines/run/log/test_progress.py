"""Progress: a bar on a terminal, lines elsewhere, nothing on the other ranks."""

import io
import itertools
import re

import pytest
from rich.console import Console

from fluvial.engines.run.log.progress import RunProgress, table


def lines(
    *, width: int = 0, every: int = 1, total: int = 25, step: int = 1, done: int = 0, end: int | None = None
) -> list[str]:
    """Return what a run prints until update `end`, 30 s each; `width` is that of a terminal, 0 is none."""
    out, now = io.StringIO(), itertools.count(0, 30 * step)
    shown = Console(file=out, force_terminal=bool(width), width=width or 120)
    progress = RunProgress(shown, total=total, every=every)
    with progress:
        progress.clock = lambda: float(next(now))
        progress.begin(done)
        for _ in range(done, end or total, step):
            progress.advance({"reward": 0.51234, "grad_norm": 12345.0}, {"rollout": 1.256}, updates=step)
    return out.getvalue().splitlines()


def test_a_line_is_printed_per_update_with_the_time_that_is_left() -> None:
    """Also of several updates at once, and of a run that is resumed."""
    numbers = "  reward 0.512  grad_norm 1.23e+04  rollout 1.26s"
    assert lines(total=4) == [
        f"update {done}/4{left}{numbers}"
        for done, left in ((1, "  1 min 30 s left"), (2, "  1 min left"), (3, "  30 s left"), (4, ""))
    ]
    for options, counts in (
        ({"every": 10}, [10, 20, 25]),
        ({"step": 5, "every": 10}, [10, 20, 25]),
        ({"step": 25}, [25]),
        ({"done": 22}, [23, 24, 25]),
    ):
        assert [line.split()[1] for line in lines(**options)] == [f"{count}/25" for count in counts]


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_shows_count_bar_time_left_and_reward(width: int) -> None:
    """The time that is left before the end; then the bar goes, so that what follows stands below the run's lines."""
    for end, left in ((199, "30 s left"), (200, "")):
        printed = lines(width=width, total=200, done=190, end=end)
        shown = [line for line in printed if f"{end}/200" in line]
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown[-1]).strip()
        assert re.match(rf"update {end}/200 [━╸╺]+ +{left} *reward 0\.512  rollout 1\.26s ", text)
        assert len(re.findall("[━╸╺]", text)) == (10 if width == 80 else 20)
        assert len(text) <= width
        assert printed[-1].endswith("\x1b[2K")


def test_a_line_stands_above_the_bar_as_it_is() -> None:
    """Brackets are markup to rich, and a long line would be wrapped."""
    out = io.StringIO()
    line = "samples [red] [/x] " + "x" * 200
    RunProgress(Console(file=out, width=40), total=1).say(line)
    assert out.getvalue() == line + "\n"


def test_other_ranks_print_nothing() -> None:
    progress = RunProgress(None, total=1)
    with progress:
        progress.begin(0)
        progress.advance({}, {})
        progress.say("hidden")
    assert progress.done == 1


def test_a_table_has_a_row_per_name() -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(
        table("held out", ("exact", "drift"), {"before": ("0.520", "0"), "after": ("0.967", "1")})
    )
    shown = [line.split() for line in out.getvalue().splitlines()]
    assert shown[0] == ["held", "out"]
    assert [row for row in shown if "0.520" in row or "0.967" in row] == [
        ["│", "before", "│", "0.520", "│", "0", "│"],
        ["│", "after", "│", "0.967", "│", "1", "│"],
    ]
