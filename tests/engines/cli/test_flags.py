"""What the library says of fields is printed as flags; parsing returns the very configuration."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from fluvial.engines.cli.parse import HelpPrintedError, field_names, flags_in_errors, parsed, typed, with_flags
from fluvial.engines.errors import LostProcessError, RunError, UsageError


@dataclass(frozen=True)
class Walk:
    """Settings of a rollout.

    Args:
        eta: Scale of the noise.
        window_low: First step of the window.
    """

    eta: float = 0.5
    window_low: int = 0

    def __post_init__(self) -> None:
        if self.eta < 0:
            raise ValueError(f"rollout.eta is {self.eta:g}, expected at least 0: set rollout.window_low too")


@dataclass(frozen=True)
class Loss:
    """An objective that the configuration's type does not name.

    Args:
        clip: Clip range.
    """

    clip: float = 1e-3


@dataclass(frozen=True)
class Run:
    """A run.

    Args:
        out: Run folder.
        updates: Number of updates.
        max_log_ratio: Bound of the log ratio.
        rewards: Names of rewards.
        rollout: How samples are made.
        objective: What is optimised.
    """

    out: Path
    updates: int = 10
    max_log_ratio: float = 1.0
    rewards: tuple[str, ...] = ()
    rollout: Walk = field(default_factory=Walk)
    objective: object = field(default_factory=Loss)


NAMES = field_names(Run(Path("x")))

# (what the library says, what is printed)
TABLE = [
    ("rollout.eta is 0", "--rollout.eta is 0"),
    ("rollout.eta is 0, set rollout.eta > 0.", "--rollout.eta is 0, set --rollout.eta > 0."),
    ("use rollout.window_low 2 or rollout.eta=1", "use --rollout.window-low 2 or --rollout.eta=1"),
    ("(rollout.eta)", "(--rollout.eta)"),
    ("objective.clip is below 0", "--objective.clip is below 0"),
    ("max_log_ratio is 2 and rollout.eta is 3", "--max-log-ratio is 2 and --rollout.eta is 3"),
    ("updates is 0, expected at least 1", "--updates is 0, expected at least 1"),
    ("train: updates is 0", "train: --updates is 0"),
    ("rollout.eta is 1, and rewards is set", "--rollout.eta is 1, and --rewards is set"),
    ("rewards 'mine:x' has the signature ()", "--rewards 'mine:x' has the signature ()"),
    ("it has none: set rewards to a name", "it has none: set --rewards to a name"),
    (
        "another run: rollout.eta 1 there, updates 2 there, 3 here",
        "another run: --rollout.eta 1 there, --updates 2 there, 3 here",
    ),
    # English, paths, modules, other people's names and what is a flag already stay as they are.
    ("the updates of a rollout; no updates are made", "the updates of a rollout; no updates are made"),
    ("a multiple of the updates is expected", "a multiple of the updates is expected"),
    ("--rollout.eta is 0", "--rollout.eta is 0"),
    ("rollout.etas is 0", "rollout.etas is 0"),
    ("rollout.eta.grad is 0", "rollout.eta.grad is 0"),
    ("my.rollout.eta is 0", "my.rollout.eta is 0"),
    ("runs/max_log_ratio cannot be read", "runs/max_log_ratio cannot be read"),
    ("the reward mine:max_log_ratio raised", "the reward mine:max_log_ratio raised"),
    ("max_log_ratio:bright is no reward", "max_log_ratio:bright is no reward"),
    ("its max_log_ratios", "its max_log_ratios"),
    ("rollout is a dataclass", "rollout is a dataclass"),
]


@pytest.mark.parametrize(("said", "printed"), TABLE, ids=[said for said, _ in TABLE])
def test_fields_in_a_message_become_flags(said: str, printed: str) -> None:
    assert with_flags(said, NAMES) == printed


def test_the_names_of_all_fields_are_those_of_the_flags() -> None:
    assert NAMES == ["out", "updates", "max_log_ratio", "rewards", "rollout.eta", "rollout.window_low", "objective.clip"]


@pytest.mark.parametrize("kind", [UsageError, RunError, LostProcessError])
def test_an_error_of_a_run_keeps_its_kind(kind: type[Exception]) -> None:
    """The exit code depends on it."""
    with pytest.raises(kind, match=r"^--rollout\.eta is wrong$") as caught, flags_in_errors(Run(Path("x"))):
        raise kind("rollout.eta is wrong")
    assert type(caught.value) is kind


def test_a_bad_value_that_a_command_meets_is_wrong_input() -> None:
    with pytest.raises(UsageError, match=r"^--rollout\.eta is -1"), flags_in_errors(Run(Path("x"))):
        Walk(eta=-1)


def test_an_error_that_names_no_field_passes_as_it_is() -> None:
    error = RunError("the disk is full")
    with pytest.raises(RunError) as caught, flags_in_errors(Run(Path("x"))):
        raise error
    assert caught.value is error


def test_parsing_returns_the_configuration_of_its_own_class() -> None:
    """A field of any type takes its flags from the dataclass that it holds."""
    default = Run(Path("runs"), rewards=("ink",))
    assert parsed(Run, lambda: default, "run", []) == default
    words = ["--objective.clip", "0.5", "--rollout.window-low=3", "--rollout.eta", "1", "--reward", "a", "b=2", "--out", "o"]
    found = parsed(Run, lambda: default, "run", words)
    assert type(found) is Run
    assert found == replace(
        default, out=Path("o"), objective=Loss(0.5), rollout=Walk(eta=1.0, window_low=3), rewards=("a", "b=2")
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--rollout.eta", "-1"], "--rollout.eta is -1, expected at least 0: set --rollout.window-low too (run --help)"),
        (["--updtes", "3"], "unknown flag --updtes; did you mean --updates? (run --help)"),
        (["--updates", "3", "4"], "unknown flag 4 (run --help)"),
        (["--updates", "three"], "--updates is 'three', expected a whole number (run --help)"),
        (["--objective.clp", "3"], "did you mean --objective.clip?"),
        (["--rollout.eta", "much"], "--rollout.eta is 'much', expected a number (run --help)"),
    ],
)
def test_a_wrong_flag_is_one_line(words: list[str], line: str) -> None:
    with pytest.raises(UsageError) as caught:
        parsed(Run, lambda: Run(Path("x")), "run", words)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_help_shows_the_flags_of_a_field_of_any_type(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(HelpPrintedError):
        parsed(Run, lambda: Run(Path("x")), "run", ["--help"], about="About it.")
    shown = " ".join(capsys.readouterr().out.split())
    assert "About it." in shown
    for words in ("--objective.clip FLOAT │ │ Clip range. (default: 0.001)", "Scale of the noise.", "Number of updates."):
        assert words.replace("│ │ ", "") in shown.replace("│ ", "").replace("│", ""), words


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--model", "a", "--out", "b"], ["a"]),
        (["--model=a", "--model", "b"], ["b", "a"]),
        (["--model"], []),
        (["--models", "a"], []),
        (["--max_log_ratio", "1", "--model", "x"], ["x"]),
    ],
)
def test_the_values_typed_after_a_flag(words: list[str], values: list[str]) -> None:
    assert typed(words, "--model") == values
