"""Waits: a line after five seconds, then after ever longer times, and nothing of short ones."""

import pytest

from fluvial.engines import waits
from fluvial.engines.waits import Waits, count_parts, format_seconds, wait_for


class Clock:
    """A clock that a test moves; at every second the waits are looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(waits, "TICK", 1e6)  # the thread never looks
        self.now, self.said = 0.0, list[tuple[float, str]]()
        self.waits = Waits(lambda line: self.said.append((self.now, line)), clock=lambda: self.now)

    def spend(self, seconds: int) -> None:
        """Let seconds pass."""
        for _ in range(seconds):
            self.now += 1
            self.waits.report()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_long_wait_is_said_after_five_seconds_and_then_ever_less_often(clock: Clock) -> None:
    with clock.waits:
        with wait_for("rollout"):
            clock.spend(4)
        assert clock.said == []
        with wait_for("rollout"):
            clock.spend(100)
    assert [(now - 4, line) for now, line in clock.said] == [
        (5, "rollout, 5 s"),
        (15, "rollout, 15 s"),
        (35, "rollout, 35 s"),
        (75, "rollout, 1 min 15 s"),
    ]


def test_no_wait_in_another_is_silent_and_one_that_repeats_does_not_flood(clock: Clock) -> None:
    with clock.waits, wait_for("opening"):
        clock.spend(100)
        before = len(clock.said)
        with wait_for("weights"):
            clock.spend(5)
        assert clock.said[before:] == [(105, "opening: weights, 5 s")]
        for _ in range(100):
            with wait_for("part"):
                clock.spend(6)
        assert "opening: part, 5 s" in [line for _, line in clock.said]
        assert len(clock.said) < before + 12


def test_counted_parts_say_what_is_left(clock: Clock) -> None:
    """Of parts of 64, the last of which is smaller; a loop that is left early is over."""
    with clock.waits:
        for start in count_parts("sampling", range(0, 160, 64), 64, 160):
            clock.spend(10)
            if start == 64:
                break
    assert clock.said == [(5, "sampling 0/160 samples, 5 s"), (15, "sampling 64/160 samples, 15 s, 22 s left")]
    assert clock.waits.stack == []


def test_without_waits_nothing_is_said_or_counted_beyond_the_total() -> None:
    assert [*count_parts("sampling", [1, 2], 1, 2)] == [1, 2]
    with wait_for("anything", 3) as wait:
        wait.advance(5)
    assert wait.done == 3


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59, "59 s"),
        (60, "1 min"),
        (200, "3 min 20 s"),
        (3600, "1 h"),
        (18660, "5 h 11 min"),
        (183600, "2 d 3 h"),
    ],
)
def test_durations_are_read_by_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
