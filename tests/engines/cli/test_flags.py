"""Fields in the library's errors are printed as flags; parsing returns the very configuration."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from fluvial.core.checks import FieldError
from fluvial.engines.choices import BARE
from fluvial.engines.cli.parse import (
    HelpPrintedError,
    expand_flags,
    find_values,
    flags_in_errors,
    list_fields,
    parse_config,
)
from fluvial.engines.errors import FluvialError, LostProcessError, RunError, UsageError
from fluvial.engines.run import recipes


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
            raise UsageError("rollout.eta", self.eta, "at least 0", "set `rollout.window_low` too")


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
    objective: object = field(default_factory=Loss, metadata=BARE)  # whose flags have no name before them


NAMES = list_fields(Run(Path("x")))

# (what the library says, what is printed)
TABLE = [
    (UsageError("rollout.eta", 0.0), "--rollout.eta is 0"),
    (
        UsageError("rollout.eta", 0.0, "at most `max_log_ratio`", "set `rollout.eta`."),
        "--rollout.eta is 0, expected at most --max-log-ratio: set --rollout.eta.",
    ),
    (UsageError("use `rollout.window_low` 2 or `rollout.eta`=1"), "use --rollout.window-low 2 or --rollout.eta=1"),
    (UsageError("(`rollout.eta`)"), "(--rollout.eta)"),
    (RunError("train: `updates` is 0, and `rewards` 'mine:x' too"), "train: --updates is 0, and --rewards 'mine:x' too"),
    # A word of English, a field of something else, and a dataclass, which has no flag of its own.
    (UsageError("the updates of a rollout; no updates are made"), "the updates of a rollout; no updates are made"),
    (UsageError("batch", 0, "at least 1"), "batch is 0, expected at least 1"),
    (UsageError("`rollout.etas` is 0"), "rollout.etas is 0"),
    (UsageError("`rollout` is a dataclass"), "rollout is a dataclass"),
    (FieldError("max_log_ratio", "is -1"), "--max-log-ratio is -1"),
    (FieldError("beta", "is -1"), "beta is -1"),
    (LostProcessError("`rollout.eta` is wrong"), "--rollout.eta is wrong"),
    (RunError("the disk is full"), "the disk is full"),
    (UsageError("evaluation.rewards", 1), "--rewards is 1"),  # a field of another name in the library
]


@pytest.mark.parametrize(("error", "printed"), TABLE, ids=[printed for _, printed in TABLE])
def test_fields_of_an_error_become_flags(error: Exception, printed: str) -> None:
    """Its kind, on which the exit code depends, stays; a bad value that a command meets is wrong input."""
    also = {"evaluation.rewards": "rewards"}
    with pytest.raises(FluvialError) as caught, flags_in_errors(Run(Path("x")), also):
        raise error
    assert str(caught.value) == printed
    assert type(caught.value) is (UsageError if isinstance(error, FieldError) else type(error))


def test_the_names_of_all_fields_are_those_of_the_flags() -> None:
    assert NAMES == ["out", "updates", "max_log_ratio", "rewards", "rollout.eta", "rollout.window_low", "clip"]


def test_parsing_returns_the_configuration_of_its_own_class() -> None:
    """A field of any type takes its flags from the dataclass that it holds."""
    default = Run(Path("runs"), rewards=("ink",))
    assert parse_config(default, "run", []) == default
    words = ["--clip", "0.5", "--rollout.window-low=3", "--rollout.eta", "1", "--reward", "a", "b=2", "--out", "o"]
    found = parse_config(default, "run", words)
    assert type(found) is Run
    assert found == replace(
        default, out=Path("o"), objective=Loss(0.5), rollout=Walk(eta=1.0, window_low=3), rewards=("a", "b=2")
    )


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--lr=1e-3", "--optimizer.lr=1e-3"),
        ("--resume_from", "--checkpoint.resume-from"),
        ("--sampler", "--sampling.sampler"),
        ("--micro_batch", "--engine.micro-batch"),  # of several the one that is meant
        ("--data", "--data.images"),
        ("--weights=x", "--pipeline.weights=x"),
        ("--transformer", "--pipeline.weights"),
        ("--lora", "--lora.weights"),
        *((word, word) for word in ("--seed", "--every", "--clip-low", "--optimizer.lr", "--novel", "lr", "-x")),
    ],
)
def test_a_flag_without_a_dot_stands_for_the_one_whose_last_part_it_is(typed: str, meant: str) -> None:
    """Unless it is one itself, or several have that last part."""
    assert expand_flags([typed], list_fields(recipes.grpo())) == [meant]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--rollout.eta", "-1"], "--rollout.eta is -1, expected at least 0: set --rollout.window-low too (run --help)"),
        (["--updtes", "3"], "unknown flag --updtes; did you mean '--updates'? (run --help)"),
        (["--updates", "3", "4"], "unexpected word '4': --updates takes one value (run --help)"),
        (["--updates", "3", "--"], "unexpected '--': expected flags and their values (run --help)"),
        (["--updates", "three"], "--updates is 'three', expected a whole number (run --help)"),
        (["--clp", "3"], "did you mean '--clip'?"),
        (["--rollout.eta", "much"], "--rollout.eta is 'much', expected a number (run --help)"),
    ],
)
def test_a_wrong_flag_is_one_line(words: list[str], line: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_config(Run(Path("x")), "run", words)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "words", "line"),
    [
        ("tdm-r1", "--fake.lr -1", "--fake.lr is -1.0, expected"),
        ("tdm-r1", "--surrogate.optimizer.lr -1", "--surrogate.optimizer.lr is -1.0, expected"),
        ("tdm-r1", "--optimizer.lr -1", "--optimizer.lr is -1.0, expected"),
        ("dmd2", "--fake-levels.low 2", "--fake-levels.low is 2.0, expected"),
        ("dmd2", "--gan head --gan.critic-weight -1", "--gan.critic-weight is -1.0, expected"),
        ("d3po", "--sampling.window random --sampling.window.size 0", "--sampling.window.size is 0, expected"),
    ],
)
def test_settings_of_one_kind_are_named_where_they_stand(recipe: str, words: str, line: str) -> None:
    """An optimizer of another network, levels of another draw."""
    with pytest.raises(UsageError, match=re.escape(line)):
        parse_config(recipes.RECIPES[recipe](), "run", words.split())


def test_help_shows_the_flags_of_a_field_of_any_type(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(HelpPrintedError):
        parse_config(Run(Path("x")), "run", ["--help"], about="About it.")
    shown = " ".join(capsys.readouterr().out.split())
    assert "About it." in shown
    for words in ("--clip FLOAT │ │ Clip range. (default: 0.001)", "Scale of the noise.", "Number of updates."):
        assert words.replace("│ │ ", "") in shown.replace("│ ", "").replace("│", ""), words


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--model", "a", "--out", "b"], ["a"]),
        (["--model=a", "--model", "b", "--model=c"], ["a", "b", "c"]),
        (["--model"], []),
        (["--models", "a"], []),
        (["--max_log_ratio", "1", "--model", "x"], ["x"]),
    ],
)
def test_the_values_typed_after_a_flag(words: list[str], values: list[str]) -> None:
    assert find_values(words, "--model") == values
