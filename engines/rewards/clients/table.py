"""The clients by name, and how one is made from options as text: `flow_factory:url=http://127.0.0.1:8000,batch=8`."""

import inspect
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fluvial.engines.errors import UsageError
from fluvial.engines.plugins import did_you_mean
from fluvial.engines.rewards.clients.flow_factory import FlowFactory
from fluvial.engines.rewards.clients.flow_grpo import FlowGrpo
from fluvial.engines.rewards.clients.http import HttpClient
from fluvial.engines.rewards.clients.unirl import UniRL
from fluvial.engines.rewards.clients.vlm import Questions, Rating, UnifiedReward, YesNo

CLIENTS: dict[str, type] = {
    "flow_factory": FlowFactory,
    "unirl": UniRL,
    "flow_grpo": FlowGrpo,
    "vlm_yes_no": YesNo,
    "vlm_rating": Rating,
    "vlm_questions": Questions,
    "unified_reward": UnifiedReward,
}
SEPARATOR = "+"  # between the values of one option; a comma stands between options
WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def build(name: str, options: Mapping[str, str]) -> Any:
    """Return the reward of a client.

    Args:
        name: name in `CLIENTS`.
        options: arguments of `HttpClient` and of the client's class, as text; several values are joined by "+".

    Raises:
        UsageError: an option is unknown, missing or wrong.
    """
    kind = CLIENTS[name]
    server, own = parameters(HttpClient), parameters(kind)
    known = [*server, *own]
    for option in options:
        if option not in known:
            raise UsageError(
                f"{name} has no option {option!r}, expected one of {', '.join(known)}{did_you_mean(option, known)}"
            )
    for option, parameter in {**server, **own}.items():
        if parameter.default is parameter.empty and not options.get(option):
            raise UsageError(f"{name} needs the option {option}, e.g. {name}:{option}={_example(option)}")
    return kind(HttpClient(**_values(HttpClient, server, options)), **_values(kind, own, options))


def parameters(kind: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the arguments of a class that an option can set, by name."""
    hidden = ("server", "transport", "clock")
    return {name: found for name, found in inspect.signature(kind).parameters.items() if name not in hidden}


def _values(kind: type, names: Mapping[str, inspect.Parameter], options: Mapping[str, str]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind.__init__)  # type: ignore[misc]
    return {name: _value(name, options[name], hints[name]) for name in names if name in options}


def _value(name: str, text: str, hint: Any) -> Any:
    """Return the value of an option."""
    if hint is bool:
        if text.lower() not in WORDS:
            raise UsageError(f"{name} is {text!r}, expected true or false")
        return WORDS[text.lower()]
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            raise UsageError(f"{name} is {text!r}, expected a {'whole ' if hint is int else ''}number") from None
    if hint == tuple[str, ...]:
        return tuple(text.split(SEPARATOR))
    if Path in typing.get_args(hint):
        return Path(text)
    return text  # str, and words that the class checks


def _example(option: str) -> str:
    return "http://127.0.0.1:8000" if option == "url" else "pickscore+ocr"
