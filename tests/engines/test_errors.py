"""Errors are values: a field, its value, what was expected and a hint, formatted in one place."""

import pickle
from pathlib import Path

import pytest

from fluvial.engines.errors import FluvialError, RunError, UsageError, convert_errors, no_effect

FLAG = "--{}".format
# (arguments, message of the library)
TABLE = [
    (("seed", -1, "an integer from 0"), "seed is -1, expected an integer from 0"),
    (
        ("rollout.eta", 0.0, "a number above 0", "no step has a density"),
        "rollout.eta is 0, expected a number above 0: no step has a density",
    ),
    (("model", "x", "", "it is a run"), "model is 'x': it is a run"),
    (("out", Path("runs")), "out is runs"),
    (("rewards", ("a", "b")), "rewards is ('a', 'b')"),
    (("weights", None, "a folder"), "weights is None, expected a folder"),
    (("the prompt is empty",), "the prompt is empty"),
]


@pytest.mark.parametrize(("arguments", "message"), TABLE, ids=[message for _, message in TABLE])
def test_an_error_is_one_sentence(arguments: tuple[str, ...], message: str) -> None:
    """And it is the same after a pickle, by which it reaches another process."""
    error = UsageError(*arguments)
    assert str(error) == message
    assert str(pickle.loads(pickle.dumps(error))) == message
    assert isinstance(error, ValueError)


def test_the_command_line_names_flags_where_the_library_names_fields() -> None:
    """The field of the error, and those marked within its texts; other words stay."""
    hint = "the sampler of `sampling.sampler` needs it, seed or not"
    error = UsageError("rollout.eta", 0.0, "more than `least`", hint)
    assert error.field == "rollout.eta"
    assert error.name_fields(FLAG) == (
        "--rollout.eta is 0, expected more than --least: the sampler of --sampling.sampler needs it, seed or not"
    )
    assert str(error) == "rollout.eta is 0, expected more than least: the sampler of sampling.sampler needs it, seed or not"


@pytest.mark.parametrize("kind", [FluvialError, RunError, UsageError])
def test_a_sentence_may_mark_fields(kind: type[FluvialError]) -> None:
    error = kind("`a` and `b.c` are both set")
    assert str(error) == "a and b.c are both set"
    assert error.name_fields(FLAG) == "--a and --b.c are both set"


def test_other_backticks_stay() -> None:
    """Those of other libraries' messages, for example."""
    said = "a ` alone, `two words`, ``"
    assert str(UsageError(said)) == said


def test_a_field_without_effect_is_to_be_removed() -> None:
    error = no_effect("merge", "with `as` lora")
    assert str(error) == "merge has no effect with as lora; remove it"
    assert error.name_fields(FLAG) == "--merge has no effect with --as lora; remove it"


def test_an_error_of_another_kind_is_converted_in_one_line(tmp_path: Path) -> None:
    """With the system's own words where it has some, and none but the kinds that are named."""
    conversion = convert_errors(RunError, OSError, says="x cannot be read")
    with pytest.raises(RunError, match=r"^x cannot be read: No such file or directory$") as caught, conversion:
        (tmp_path / "x").read_text()
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    with pytest.raises(UsageError, match=r"^a b$"), convert_errors(UsageError, ValueError, KeyError):
        raise ValueError("a\n  b")
    with pytest.raises(TypeError, match="other"), convert_errors(UsageError, ValueError, says="x"):
        raise TypeError("other")
