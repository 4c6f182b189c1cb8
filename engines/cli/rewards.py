"""`fluvial rewards`: list the reward models, describe one and its options, or collect the votes of people."""

import inspect
import json
from collections.abc import Callable
from typing import Any

from fluvial.engines.cli.listing import JSON, find_installed, paragraphs, width, without, wrap
from fluvial.engines.errors import UsageError
from fluvial.engines.plugins import suggest
from fluvial.models.rewards.table import ELSEWHERE, REWARD_MODELS, RewardModel

USAGE = """usage: fluvial rewards [NAME] [--json]
       fluvial rewards vote [--field value ...]

List the reward models: what they take, their memory, their score, weights and licence. With a NAME, which may also be a
client of a reward server, describe it and its options. --json prints the same for programs.
fluvial rewards vote serves a page on which people compare images; their votes are the reward votes (vote --help).
"""
VOTE = "vote"
INDENT = 24  # of a reward's second line
FOOT = """
Memory is that of the weights in float32; dtype=bfloat16, the default of hpsv3, editreward and videoreward, halves it.
"gradient": differentiable in the images, as the recipe alignprop needs it. Weights are downloaded from the Hub at the
commit shown, or read from a folder (weights=FOLDER). fluvial rewards NAME lists the options of one. Functions of your
own are named as module:name. People are asked by the reward votes (fluvial rewards vote --help).
"""


def run(args: list[str]) -> None:
    """Print the table or one reward, or serve the page of votes."""
    if args[:1] == [VOTE]:
        from fluvial.engines.cli.serve_rewards import run_vote  # whose imports take a second

        run_vote(args[1:])
        return
    args, as_json = without(args, JSON)
    if not args:
        print(json.dumps([_facts(model) for model in REWARD_MODELS.values()], indent=1)) if as_json else _table()
        return
    name = args[0]
    if len(args) > 1:
        raise UsageError(f"rewards takes one name at most, got {args[1]!r} after {name!r} (fluvial rewards)")
    if name in ELSEWHERE:
        raise UsageError(
            f"{name} is not a reward model of fluvial: {ELSEWHERE[name]}; run it in a server, and give its address"
        )
    from fluvial.engines.extensions.judges import table as clients

    known = [*REWARD_MODELS, *clients.CLIENTS]
    if as_json and name in known:
        make = REWARD_MODELS[name].make if name in REWARD_MODELS else clients.maker(name)
        facts = _facts(REWARD_MODELS[name]) if name in REWARD_MODELS else {"name": name}
        print(json.dumps({**facts, "options": _defaults(make)}, indent=1))
    elif name in REWARD_MODELS:
        _describe(name)
    elif name in clients.CLIENTS:
        print(f"{name}: client of a reward server\n\n{inspect.getdoc(clients.CLIENTS[name])}\n")
        _options(name, clients.maker(name))
    else:
        raise UsageError(f"unknown reward {name!r}, expected one of {', '.join(known)}{suggest(name, known)}")


def _table() -> None:
    """Print one entry per reward model."""
    print(f"{'--rewards':<23} {'takes':<7} {'memory':<9} {'gradient':<9} score")
    for model in REWARD_MODELS.values():
        memory = f"{model.gibibytes:.1f} GiB" if model.parameters else "-"
        row = f"{model.name:<23} {model.takes:<7} {memory:<9} {'yes' if model.gradients else 'no':<9} {model.formula}"
        print(*wrap_row(row), sep="\n")
        commit = f" @ {model.revision[:8]}" if model.revision else ""
        weights = f"{model.weights}{commit}, licence: {model.licence}; " if model.weights else ""
        print(*wrap(f"{weights}{model.source}{_to_install(model)}", indent=INDENT), sep="\n")
    print("", paragraphs(FOOT), sep="\n", end="")
    print(paragraphs("Not here, because no class of transformers loads them (run them in a server):"), end="")
    for name, reason in ELSEWHERE.items():
        print(*wrap_row(f"  {name:<21} {reason}"), sep="\n")
    for name, source in find_installed("rewards").items():
        print(f"An installed package has the reward {name}: {source}")


def wrap_row(row: str) -> list[str]:
    """Return the lines of a row that is continued under its second column, where the terminal is narrow."""
    return [row] if len(row) <= width() else wrap(row, later=INDENT)


def _to_install(model: RewardModel) -> str:
    """Return what has to be installed for a reward, or nothing."""
    missing = model.missing()
    return f"; needs pip install '{model.install}' ({', '.join(missing)})" if missing else ""


def _describe(name: str) -> None:
    """Print what a reward computes, and its options with their defaults."""
    model = REWARD_MODELS[name]
    print(f"{name}: {model.formula}  ({model.source}){_to_install(model)}\n")
    for described in (model.make,) if inspect.isfunction(model.make) else inspect.getmro(model.make):
        if described.__module__.startswith("fluvial."):
            print(f"{inspect.getdoc(described)}\n")
    _options(name, model.make)


def _defaults(make: Callable[..., Any]) -> dict[str, str]:
    """Return the default of each option that a reward is made with; VALUE where one has to be given."""
    options = inspect.signature(make).parameters.values()
    return {option.name: "VALUE" if option.default is option.empty else str(option.default) for option in options}


def _facts(model: RewardModel) -> dict[str, Any]:
    """Return a reward model for programs."""
    names = ("name", "takes", "formula", "source", "weights", "revision", "licence", "gradients", "gibibytes")
    return {name: getattr(model, name) for name in names}


def _options(name: str, make: Callable[..., Any]) -> None:
    """Print the options that a reward is made with, and their defaults; VALUE where one has to be given."""
    options = [f"{option}={value}" for option, value in _defaults(make).items()]
    if options:
        print(f"Options and defaults, as in --rewards {name}:{options[-1]}\n  {', '.join(options)}")
