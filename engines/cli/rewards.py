"""`fluvial rewards`: list the reward models, describe one and its options, or collect the votes of people."""

import inspect
import json
from collections.abc import Callable
from typing import Any

from fluvial.engines.cli.listing import JSON, drop_flag, find_installed, find_width, format_paragraphs, wrap
from fluvial.engines.errors import UsageError
from fluvial.engines.plugins import suggest
from fluvial.models.rewards.table import ELSEWHERE, REWARD_MODELS, RewardModel

USAGE = """usage: fluvial rewards [NAME] [--json]
       fluvial rewards vote [--field value ...]

List the reward models: their inputs, memory, score, weights and licence. With a NAME, which may also be a client of a
reward server, describe it and its options. --json prints the same for programs.
fluvial rewards vote serves a page on which people compare images; their votes are the reward votes (vote --help).
"""
VOTE = "vote"
INDENT = 24  # columns before the second line of a reward
FOOT = """
Memory is that of the weights in float32; dtype=bfloat16, the default of hpsv3, editreward and videoreward, halves it.
"gradient": differentiable in the images, as required by the recipe alignprop. Weights are downloaded from the Hub at the
commit shown, or read from a folder (weights=FOLDER). fluvial rewards NAME lists the options of one. Your own functions
are named as module:name. The reward votes asks people (fluvial rewards vote --help).
"""


def run(args: list[str]) -> None:
    """Print the table or one reward, or serve the page of votes."""
    if args[:1] == [VOTE]:
        from fluvial.engines.cli.serve_rewards import run_vote  # its imports take a second

        run_vote(args[1:])
        return
    args, as_json = drop_flag(args, JSON)
    if not args:
        print(json.dumps([_list_facts(model) for model in REWARD_MODELS.values()], indent=1)) if as_json else _print_table()
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
        make = REWARD_MODELS[name].make if name in REWARD_MODELS else clients.build_maker(name)
        facts = _list_facts(REWARD_MODELS[name]) if name in REWARD_MODELS else {"name": name}
        print(json.dumps({**facts, "options": _list_defaults(make)}, indent=1))
    elif name in REWARD_MODELS:
        _print_reward(name)
    elif name in clients.CLIENTS:
        print(f"{name}: client of a reward server\n\n{inspect.getdoc(clients.CLIENTS[name])}\n")
        _print_options(name, clients.build_maker(name))
    else:
        raise UsageError(f"unknown reward {name!r}, expected one of {', '.join(known)}{suggest(name, known)}")


def _print_table() -> None:
    """Print one entry per reward model."""
    print(f"{'--rewards':<23} {'takes':<7} {'memory':<9} {'gradient':<9} score")
    for model in REWARD_MODELS.values():
        memory = f"{model.gibibytes:.1f} GiB" if model.parameters else "-"
        row = f"{model.name:<23} {model.takes:<7} {memory:<9} {'yes' if model.gradients else 'no':<9} {model.formula}"
        print(*wrap_row(row), sep="\n")
        commit = f" @ {model.revision[:8]}" if model.revision else ""
        weights = f"{model.weights}{commit}, licence: {model.licence}; " if model.weights else ""
        print(*wrap(f"{weights}{model.source}{_describe_missing(model)}", indent=INDENT), sep="\n")
    print("", format_paragraphs(FOOT), sep="\n", end="")
    print(format_paragraphs("Not here, because no class of transformers loads them (run them in a server):"), end="")
    for name, reason in ELSEWHERE.items():
        print(*wrap_row(f"  {name:<21} {reason}"), sep="\n")
    for name, source in find_installed("rewards").items():
        print(f"An installed package has the reward {name}: {source}")


def wrap_row(row: str) -> list[str]:
    """Return the lines of a row; on a narrow terminal it continues under its second column."""
    return [row] if len(row) <= find_width() else wrap(row, later=INDENT)


def _describe_missing(model: RewardModel) -> str:
    """Describe the packages to install for a reward; empty if none is missing."""
    missing = model.list_missing_packages()
    return f"; needs pip install '{model.install}' ({', '.join(missing)})" if missing else ""


def _print_reward(name: str) -> None:
    """Print the description of a reward, and its options with their defaults."""
    model = REWARD_MODELS[name]
    print(f"{name}: {model.formula}  ({model.source}){_describe_missing(model)}\n")
    for described in (model.make,) if inspect.isfunction(model.make) else inspect.getmro(model.make):
        if described.__module__.startswith("fluvial."):
            print(f"{inspect.getdoc(described)}\n")
    _print_options(name, model.make)


def _list_defaults(make: Callable[..., Any]) -> dict[str, str]:
    """Return the default of each option of a reward; VALUE for required options."""
    options = inspect.signature(make).parameters.values()
    return {option.name: "VALUE" if option.default is option.empty else str(option.default) for option in options}


def _list_facts(model: RewardModel) -> dict[str, Any]:
    """Return the facts of a reward model for programs."""
    names = ("name", "takes", "formula", "source", "weights", "revision", "licence", "gradients", "gibibytes")
    return {name: getattr(model, name) for name in names}


def _print_options(name: str, make: Callable[..., Any]) -> None:
    """Print the options of a reward and their defaults; VALUE for required options."""
    options = [f"{option}={value}" for option, value in _list_defaults(make).items()]
    if options:
        print(f"Options and defaults, as in --rewards {name}:{options[-1]}\n  {', '.join(options)}")
