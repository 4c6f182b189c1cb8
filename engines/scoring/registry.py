"""Selection of a run's rewards: those of the job, reward models, rewards of extensions, or `module:name`."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from fluvial.engines import plugins
from fluvial.engines.data.records import Prompt
from fluvial.engines.errors import UsageError
from fluvial.engines.scoring.options import from_factory, make_reward, parse
from fluvial.engines.scoring.pairwise import Pairwise
from fluvial.engines.scoring.protocol import Reward
from fluvial.engines.scoring.scores import parse_weight
from fluvial.engines.scoring.signature import CONDITIONS, find_condition, reward_problem, signature_of
from fluvial.models.rewards.table import REWARD_MODELS


def select(
    rewards: Mapping[str, Reward], names: Sequence[str], *, field: str = "rewards", videos: bool = True
) -> dict[str, tuple[Reward, float]]:
    """Return the requested rewards and their weights, by name; by default the first reward of the job.

    Args:
        rewards: rewards of the job, by name; they take precedence over others.
        names: `name`, with options after a colon and a weight after an equals sign, see `options`. A name is a key of
            `rewards`, a reward model, a client of a server, an entry point of `fluvial.rewards`, or `module:name`.
        field: setting that names them, for messages.
        videos: whether samples may be videos; otherwise a video reward model raises before its weights are fetched.

    Raises:
        UsageError: a name is unknown, repeated, cannot be imported or is not a reward, or an option or a weight is invalid.
    """
    selected: dict[str, tuple[Reward, float]] = {}
    makers = built_in(rewards)
    for text in names or list(rewards)[:1]:
        name, options, weight = parse(text, {*plugins.list_names("rewards", makers), *rewards}, field=field)
        if name in selected:
            raise UsageError(f"`{field}` is {list(names)}, which names {name!r} twice: name each reward once")
        value = 1.0 if weight is None else parse_weight(weight)
        if value is None:
            raise UsageError(
                f"`{field}` is {text!r}, whose weight {weight!r} is not a number other than 0: give one, e.g. {name}=0.5"
            )
        label = f"`{field}` {name!r}"
        if not videos and name not in rewards and name in REWARD_MODELS and REWARD_MODELS[name].takes == "videos":
            raise UsageError(f"{label} scores videos, and samples are images: use a reward of these (fluvial rewards)")
        if name in makers and name not in rewards:
            reward = makers[name](label, options)
        else:
            loaded = plugins.load(name, "rewards", table={**rewards, **makers, **rewards}, field=field)
            reward = make_reward(label, loaded, options)
        if (problem := reward_problem(reward)) is not None:
            raise UsageError(f"{label} {problem}")
        selected[name] = reward, value
    return selected


def built_in(rewards: Mapping[str, Reward] = MappingProxyType({})) -> dict[str, Callable[[str, Mapping[str, str]], Any]]:
    """Return the factories of rewards with options, `(label, options) -> reward`, by name.

    A reward model is imported when it is created. Other factories come from the tables of the entry points
    `fluvial.reward_makers`, such as the clients of servers.

    Args:
        rewards: rewards of the job, from which others may be built.
    """

    def other(make: Callable[..., Any], label: str, options: Mapping[str, str]) -> Any:
        return from_factory(label, make, options)

    def model(name: str, label: str, options: Mapping[str, str]) -> Any:
        model = REWARD_MODELS[name]
        if missing := model.list_missing_packages():
            raise UsageError(f"{label} needs {', '.join(missing)}: pip install '{model.install}'")
        return from_factory(label, model.make, options)

    def pairwise(label: str, options: Mapping[str, str]) -> Any:
        def make(judge: str) -> Pairwise:
            return Pairwise(judge, rewards)

        return from_factory(label, make, options)

    return {
        "pairwise": pairwise,
        **{name: partial(model, name) for name in REWARD_MODELS},
        **{name: partial(other, make) for table in plugins.load_all("reward_makers") for name, make in table.items()},
    }


def strip_weight(text: str) -> str:
    """Return the text of a reward without its weight."""
    weight = parse(text, plugins.list_names("rewards", built_in()), field="rewards").weight
    return text if weight is None else text.removesuffix(f"={weight}")


def check_rewards(rewards: Mapping[str, Any], *, label: str = "reward") -> None:
    """Raise UsageError, in one line, if one of the objects cannot be called as a reward."""
    for name, reward in rewards.items():
        if (problem := reward_problem(reward)) is not None:
            raise UsageError(f"{label} {name!r} {problem}")


def check_records(rewards: Mapping[str, Any], prompts: Sequence[Prompt], *, label: str = "reward") -> None:
    """Raise UsageError, in one line, if a reward needs a column that a prompt's record lacks."""
    for name, reward in rewards.items():
        for condition in filter(signature_of(reward).takes, CONDITIONS):
            lacking = next((prompt for prompt in prompts if find_condition(prompt, condition) is None), None)
            if lacking is not None:
                raise UsageError(
                    f"{label} {name!r} takes {condition}, and prompt {lacking.text!r} has none: give its record a "
                    f"column {CONDITIONS[condition]}"
                )
