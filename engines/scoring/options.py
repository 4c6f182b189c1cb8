"""Text of a reward in settings: its name, its options and its weight.

    NAME[:OPTION=VALUE,OPTION=VALUE...][=WEIGHT]

    jpeg=0.5                                        weight 0.5
    pickscore:device=cuda:1,weights=models/pick     options
    pickscore:device=cuda:1,weights=models/pick=2   options, and the weight 2
    mine:score=0.5                                  the function `score` of the module `mine`, weight 0.5
    mine:Score:scale=2,sharp=true=0.5               the class `Score` of the module `mine`, created with two options

A name known to fluvial, the job or an installed package takes options after its colon; any other word before a colon is a
module. A value cannot contain a comma; several values of one option are joined by "+". A number after the last `=` is the
weight, so an option whose value ends in `=` and a number needs a weight after it.
"""

import inspect
import json
import types
import typing
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union

from fluvial.engines.errors import FluvialError, UsageError
from fluvial.engines.plugins import suggest
from fluvial.engines.scoring.scores import one_line, parse_weight
from fluvial.engines.scoring.signature import KNOWN

SEPARATOR = "+"  # between the values of one option
WORDS: dict[str, bool] = {"true": True, "false": False}


class RewardText(NamedTuple):
    """The parts of a reward's text."""

    name: str
    options: dict[str, str]
    weight: str | None  # as written; None without a weight


def parse(text: str, known: Collection[str], *, field: str) -> RewardText:
    """Parse a reward's text, see the docstring of this module.

    Args:
        known: names that are not modules.
        field: name of the setting, for messages.

    Raises:
        UsageError: an option is not name=value, or is repeated.
    """
    head, separator, tail = text.partition("=")
    words = head.split(":")
    places = 1 if words[0] in known else 2
    if len(words) <= places:
        return RewardText(head, {}, tail if separator else None)
    name, first = ":".join(words[:places]), ":".join(words[places:])
    *others, last = (f"{first}={tail}" if separator else first).split(",")
    option, value = _split_option(last)
    value, separator, weight = (value or "").rpartition("=")
    if not separator or parse_weight(weight) is None:
        value, weight, separator = f"{value}{separator}{weight}", "", ""
    stated = [*map(_split_option, others), (option, value if "=" in last else None)]
    for option, value in stated:
        if value is None or not option.isidentifier():
            raise UsageError(
                f"`{field}` is {text!r}, whose option {option!r} is not name=value: write {name}:option=value,option=value"
            )
    if len({option for option, _ in stated}) < len(stated):
        raise UsageError(f"`{field}` is {text!r}, which names an option twice: name each once")
    return RewardText(name, {option: value or "" for option, value in stated}, weight if separator else None)


def make_reward(label: str, reward: Any, options: Mapping[str, str]) -> Any:
    """Create a reward from a class or a function and options; a function without options is returned unchanged.

    Args:
        label: start of messages, e.g. "rewards 'mine:Score'".

    Raises:
        UsageError: an option is unknown, missing or of another type, or the class raises.
    """
    if not callable(reward) or not (options or inspect.isclass(reward)):
        return reward
    values = _convert_options(label, reward, options, factory=False)
    return build_object(label, reward, values) if inspect.isclass(reward) else partial(reward, **values)


def build_object(label: str, make: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call a class or a factory with options; UsageError if it raises."""
    try:
        return make(**values)
    except (FluvialError, ValueError, OSError, ImportError) as error:
        raise UsageError(f"{label}: {_strip_name(one_line(error), label)}") from error
    except Exception as error:
        raise UsageError(f"{label} raised {type(error).__name__} ({one_line(error)})") from error


def _strip_name(message: str, label: str) -> str:
    """Remove the leading name of a message if its label already ends with that name."""
    name, colon, text = message.partition(": ")
    return text if colon and label.endswith(repr(name)) else message


def from_factory(label: str, make: Callable[..., Any], options: Mapping[str, str]) -> Any:
    """Create a reward with a class or a factory, see `make_reward`."""
    return build_object(label, make, _convert_options(label, make, options, factory=True))


def _split_option(word: str) -> tuple[str, str | None]:
    """Return the name and the value of name=value; None without a value."""
    name, separator, value = word.partition("=")
    return name.strip(), value if separator else None


def _convert_options(label: str, make: Callable[..., Any], options: Mapping[str, str], *, factory: bool) -> dict[str, Any]:
    """Convert options to the types that a class or a function declares."""
    is_factory = inspect.isclass(make) or factory
    parameters = dict(inspect.signature(make).parameters)
    hints: dict[str, Any] = {}
    with suppress(TypeError, NameError):  # a callable object, or types that exist only for type checkers
        hints = typing.get_type_hints(make.__init__ if inspect.isclass(make) else make)
    samples = () if is_factory else (*list(parameters)[:2], *KNOWN)
    fixed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    accepted = {
        name: possible for name, possible in parameters.items() if possible.kind not in fixed and name not in samples
    }
    for option in options:
        if option not in accepted:
            expected = f"expected {', '.join(accepted)}" if accepted else "it takes none"
            raise UsageError(f"{label} has no option {option!r}, {expected}{suggest(option, accepted)}")
    for name, parameter in accepted.items():
        if parameter.default is parameter.empty and name not in options:
            raise UsageError(f"{label} needs the option {name}: write {name}=value after its name and a colon")
    return {name: _convert_option(f"{label}: {name}", text, hints.get(name, Any)) for name, text in options.items()}


def _convert_option(label: str, text: str, hint: Any) -> Any:
    """Convert an option's text to a type."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    choices = [choice for kind in kinds if typing.get_origin(kind) is Literal for choice in typing.get_args(kind)]
    plain = [str(choice) for choice in choices]
    if text in plain:
        return choices[plain.index(text)]
    if type(None) in kinds and text.lower() == "none":
        return None
    if bool in kinds and text.lower() in WORDS:
        return WORDS[text.lower()]
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    if Path in kinds and str not in kinds:
        return Path(text)
    if tuple[str, ...] in kinds:
        return tuple(text.split(SEPARATOR))
    if str in kinds:
        return text
    named = {bool: "true or false", int: "a whole number", float: "a number"}
    expected = [*plain, *(words for kind, words in named.items() if kind in kinds)]
    if expected:
        raise UsageError(f"{label} is {text!r}, expected {' or '.join(expected)}")
    try:
        return json.loads(text)
    except ValueError:
        return text
