"""Table of the clients by name, with factories that take the options of the server and of the client together."""

import inspect
import typing
from collections.abc import Callable
from typing import Any

from fluvial.engines.extensions.judges.formats import FlowFactory, FlowGrpo, UniRL
from fluvial.engines.extensions.judges.vlm import Questions, Rating, UnifiedReward, UnifiedReward2, WinRate, YesNo
from fluvial.engines.extensions.judges.votes import Votes
from fluvial.engines.extensions.wire.client import HttpClient

CLIENTS: dict[str, type] = {
    "flow_factory": FlowFactory,
    "unirl": UniRL,
    "flow_grpo": FlowGrpo,
    "vlm_yes_no": YesNo,
    "vlm_rating": Rating,
    "vlm_questions": Questions,
    "unified_reward": UnifiedReward,
    "unified_reward_2": UnifiedReward2,
    "win_rate": WinRate,
    "votes": Votes,
}
HIDDEN = ("self", "server", "transport", "clock")  # arguments that are not options


def build_maker(name: str) -> Callable[..., Any]:
    """Return a factory of a client, whose arguments are those of `HttpClient` and of the client's class."""
    kind = CLIENTS[name]
    of_server, of_client = _list_parameters(HttpClient), _list_parameters(kind)

    def make(**values: Any) -> Any:
        server = HttpClient(**{key: value for key, value in values.items() if key in of_server})
        return kind(server, **{key: value for key, value in values.items() if key in of_client})

    parameters = [each.replace(kind=each.KEYWORD_ONLY) for each in {**of_server, **of_client}.values()]
    make.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    hints = typing.get_type_hints(HttpClient.__init__) | typing.get_type_hints(kind.__init__)  # type: ignore[misc]
    make.__annotations__ = {key: hint for key, hint in hints.items() if key not in HIDDEN}
    return make


def _list_parameters(kind: type) -> dict[str, inspect.Parameter]:
    return {name: parameter for name, parameter in inspect.signature(kind).parameters.items() if name not in HIDDEN}


MAKERS = {name: build_maker(name) for name in CLIENTS}  # an entry point of `fluvial.reward_makers`
