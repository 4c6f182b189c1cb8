"""Which rewards a run uses: names of the job's rewards, of installed packages, or `module:name`, each with a weight."""

from collections.abc import Mapping, Sequence
from typing import Any

from fluvial.engines import plugins
from fluvial.engines.data.records import as_prompt
from fluvial.engines.errors import UsageError
from fluvial.engines.rewards.protocol import Reward
from fluvial.engines.rewards.scores import weight_of
from fluvial.engines.rewards.signature import reward_problem, signature_of


def select(
    rewards: Mapping[str, Reward], names: Sequence[str], *, field: str = "rewards"
) -> dict[str, tuple[Reward, float]]:
    """Return the rewards that a run asks for and their weights, by name; the first of the job if it asks for none.

    Args:
        rewards: rewards of the job, by name.
        names: `name` or `name=weight` each. A name is a key of `rewards`, an entry point of `fluvial.rewards`, or
            `module:name`.
        field: setting that names them, for messages.

    Raises:
        UsageError: a name is unknown, cannot be imported, stands twice, or is not a reward, or a weight is no number.
    """
    found: dict[str, tuple[Reward, float]] = {}
    for text in names or list(rewards)[:1]:
        name, separator, weight = text.partition("=")
        if name in found:
            raise UsageError(f"{field} is {list(names)}, which names {name!r} twice: name each reward once")
        value = weight_of(weight) if separator else 1.0
        if value is None:
            raise UsageError(
                f"{field} is {text!r}, whose weight {weight!r} is not a number other than 0: give one, e.g. {name}=0.5"
            )
        found[name] = plugins.load(name, "rewards", reward_problem, table=rewards, field=field), value
    return found


def check_rewards(rewards: Mapping[str, Any], *, label: str = "reward") -> None:
    """Raise UsageError, in one line, if one of the objects cannot be called as a reward."""
    for name, reward in rewards.items():
        if (problem := reward_problem(reward)) is not None:
            raise UsageError(f"{label} {name!r} {problem}")


def check_records(rewards: Mapping[str, Any], prompts: Sequence[str], *, label: str = "reward") -> None:
    """Raise UsageError, in one line, if a reward asks for something that the records of the prompts have not."""
    for name, reward in rewards.items():
        if signature_of(reward).takes("condition_images"):
            without = next((prompt for prompt in prompts if as_prompt(prompt).image is None), None)
            if without is not None:
                raise UsageError(
                    f"{label} {name!r} takes condition_images, and prompt {without!r} has none: give its record a column "
                    "image"
                )
