"""Every flag's help is a sentence that stands alone, and a recipe's help says where the recipe comes from."""

import dataclasses
import json
import re
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from fluvial.engines.choices import describe_fields, is_bare, list_kinds, list_unused, list_variants
from fluvial.engines.cli import brief
from fluvial.engines.cli.eval import EvalConfig
from fluvial.engines.cli.parse import list_fields
from fluvial.engines.cli.preferences import PreferencesConfig
from fluvial.engines.cli.sample import SampleConfig
from fluvial.engines.errors import UsageError
from fluvial.engines.extensions.plan.plan import PlanConfig
from fluvial.engines.run.config import TrainConfig, with_values
from fluvial.engines.run.job import open_configured
from fluvial.engines.run.recipes import RECIPES

CONFIGS: dict[str, Any] = {
    **{f"train {name}": recipe() for name, recipe in RECIPES.items()},
    "eval handwriting": EvalConfig(),
    "sample handwriting": SampleConfig(),
    "preferences handwriting": PreferencesConfig(Path("x")),
    "plan handwriting": PlanConfig(),
}


def explained(config: Any) -> dict[str, str]:
    """Return the help of each field of a config and of those in it, as the class's docstring has it, by dotted name."""
    texts = {}
    written = describe_fields(type(config))
    for field in dataclasses.fields(config):
        texts[field.name] = " ".join((written.get(field.name) or "").split())
        if dataclasses.is_dataclass(value := getattr(config, field.name)):
            before = "" if is_bare(field) else f"{field.name}."
            texts.update({f"{before}{name}": text for name, text in explained(value).items()})
    return texts


@pytest.mark.parametrize("command", CONFIGS)
def test_the_help_of_every_flag_is_a_sentence(command: str) -> None:
    """It begins with a capital letter, a number or a quoted value, ends with a period, and says more than the name."""
    texts = explained(CONFIGS[command])
    assert set(list_fields(CONFIGS[command])) <= set(texts)
    wrong = {
        name: text for name, text in texts.items() if not re.fullmatch(r"[A-Z0-9\"].*[.]", text) or len(text.split()) < 3
    }
    assert not wrong


def is_hidden(name: str, hidden: set[str]) -> bool:
    """Return whether a flag is one of those without effect, or in a group of them."""
    return any(name == each or name.startswith(f"{each}.") for each in hidden)


@pytest.mark.parametrize("command", CONFIGS)
def test_the_help_of_a_command_shows_every_flag(command: str, fluvial: Any) -> None:
    """That has an effect."""
    config = CONFIGS[command]
    hidden = set(config.list_fixed() if isinstance(config, TrainConfig) else list_unused(config))
    shown = fluvial(*command.split(), "--help-all")
    for name in list_fields(config):
        found = re.search(rf"--(no-)?{re.escape(name.replace('_', '-'))}\b(?!\.)", shown) is not None
        assert found is not is_hidden(name, hidden), name
    assert "Args:" not in shown, "the docstring's list of arguments repeats the flags"


VALUES: dict[Any, list[Any]] = {
    Path: [Path("x")],
    str: ["http://x"],
    float: [0.37],
    int: [64],
    bool: [True, False],
    tuple[str, ...]: [("x=1",), ("64x64",)],
}
VALUES |= {tuple[float, float]: [(0.5, 0.5)]}


def list_values(declared: Any) -> list[Any]:
    """Return values of a type, all of a Literal's."""
    if get_origin(declared) is Literal:
        return list(get_args(declared))
    if list_variants(declared):
        return [kind for kind in list_kinds(declared) if kind in ("first_block", "guidance")]
    if get_origin(declared) in (Union, UnionType):
        return [value for each in get_args(declared) for value in list_values(each)]
    return list[Any](VALUES.get(declared, ()))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_flag_that_a_help_leaves_out_is_refused(recipe: str) -> None:
    """Whatever value but its default it has, and in one line that says why; those of pipelines once the model is opened."""
    config = RECIPES[recipe]()
    hidden = set(config.list_fixed())
    names = [name for name in list_fields(config) if is_hidden(name, hidden)]
    assert len(names) > 20
    for name in names:
        owner: Any = config if hasattr(config, name.partition(".")[0]) else config.method
        *parents, last = name.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        values = [value for value in list_values(get_type_hints(type(owner))[last]) if value != getattr(owner, last)]
        assert values, name
        said = list[str]()
        for value in values:
            with pytest.raises(UsageError) as error:
                open_configured(with_values(config, {name: value}))
            said.append(str(error.value))
        # A value of another form is refused as such; one of the right form as one without effect.
        assert re.search(r"has no effect .*; remove it|autocast is True, expected False", "\n".join(said)), said


@pytest.mark.parametrize(
    "command", [*(f"train {name}" for name in RECIPES), "eval", "sample", "preferences", "export", "plan"]
)
def test_a_help_is_short_and_fits_the_terminal(command: str, monkeypatch: pytest.MonkeyPatch, fluvial: Any) -> None:
    """Under 60 lines of 80 columns, with three examples whose flags exist; plan has no short one."""
    monkeypatch.setenv("COLUMNS", "80")
    shown = fluvial(*command.split(), "--help").splitlines()
    assert shown[0].startswith(f"usage: fluvial {command}")
    if command == "plan":
        return
    assert len(shown) < 60
    assert max(map(len, shown)) <= 80
    assert "--help-all" in " ".join(shown)
    short = getattr(brief, command.split()[0].upper())
    assert len(short.examples) == 3
    assert " ".join(shown).count(f"  fluvial {command} ") == 3
    flags = [line.split()[0] for line in shown if line.startswith("  --")]
    if command == "train grpo":
        assert len(flags) == len(short.fields.split()) == 20
    assert not {line for line in shown if re.fullmatch(r"  --\S+ *", line)}, "a flag without a text"


@pytest.mark.parametrize("command", ["runs", "runs flow_grpo/sd3.5-medium/ocr", "rewards", "models"])
def test_a_table_fits_the_terminal_and_programs_read_it(command: str, monkeypatch: pytest.MonkeyPatch, fluvial: Any) -> None:
    """No row is lost on the way: a narrow table holds the words of a wide one. The command has a help of its own."""
    wide = fluvial(*command.split())
    monkeypatch.setenv("COLUMNS", "72")
    narrow = fluvial(*command.split())
    assert max(map(len, narrow.splitlines())) <= 72
    names = {line.split()[0] for line in wide.splitlines()[1:] if line[:1].isalnum() and not line.startswith("setting ")}
    assert names <= set(narrow.split())
    assert json.loads(fluvial(*command.split(), "--json"))
    name = command.split()[0]
    assert fluvial(name, "--help").startswith(f"usage: fluvial {name}")
