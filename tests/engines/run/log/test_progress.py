"""Progress: a bar on a terminal, lines elsewhere, nothing on the other ranks."""

import io

from rich.console import Console

from fluvial.engines.run.log.progress import RunProgress, table


def lines(*, terminal: bool = False, total: int = 25, step: int = 1, done: int = 0) -> list[str]:
    """Return what a run prints."""
    out = io.StringIO()
    progress = RunProgress(Console(file=out, force_terminal=terminal, width=120), total=total, done=done)
    with progress:
        for _ in range(done, total, step):
            progress.advance({"reward": 0.51234, "grad_norm": 12345.0}, {"rollout": 1.256}, updates=step)
    return out.getvalue().splitlines()


def test_a_line_is_printed_every_ten_updates_and_at_the_end() -> None:
    """Also of several updates at once, and of a run that is resumed."""
    numbers = "  reward 0.512  grad_norm 1.23e+04  rollout 1.26s"
    assert lines() == [f"update {done}/25{numbers}" for done in (10, 20, 25)]
    for options, counts in (({"step": 5}, [10, 20, 25]), ({"step": 25}, [25]), ({"done": 18}, [20, 25])):
        assert [line.split()[1] for line in lines(**options)] == [f"{count}/25" for count in counts]  # type: ignore[arg-type]


def test_a_terminal_shows_a_bar_with_the_numbers_and_the_last_count() -> None:
    shown = "\n".join(lines(terminal=True, total=3))
    assert "3/3" in shown
    assert "reward 0.512" in shown


def test_a_line_stands_above_the_bar_as_it_is() -> None:
    """Brackets are markup to rich, and a long line would be wrapped."""
    out = io.StringIO()
    line = "samples " + "x" * 200
    RunProgress(Console(file=out, width=40), total=1).say(line)
    assert out.getvalue() == line + "\n"


def test_other_ranks_print_nothing() -> None:
    progress = RunProgress(None, total=1)
    with progress:
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
