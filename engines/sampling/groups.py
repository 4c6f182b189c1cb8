"""Which groups of a rollout are learnt from: all, those that are sampled until they differ, or the extremes of more."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from fluvial.core.checks import BATCH, STEPS, check_fields
from fluvial.core.random import Key
from fluvial.engines.errors import UsageError


@dataclass(frozen=True)
class AllGroups:
    """Every sample of every group, as it is made."""

    kind: ClassVar[str] = "all"

    def problems(self, sampling: Any) -> Iterator[UsageError]:
        """Yield what has no meaning with the other settings of the samples."""
        yield from ()

    def collect(self, run: Any, key: Key) -> Any:
        """Return the next batch of a run."""
        return run.sample(key)


@dataclass(frozen=True)
class RefilledGroups:
    """Flat groups, whose samples have equal rewards, are sampled again with other prompts (DAPO, arXiv 2503.14476).

    Groups that are flat after the last round add nothing to the loss, whose denominator stays.

    Args:
        rounds: Largest number of rounds; each samples as many groups as are flat.
        floor: A group is flat if the standard deviation of its weighted reward is no larger.
    """

    kind: ClassVar[str] = "refilled"
    rounds: int = 3
    floor: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "sampling.groups", rounds=(1, 1024), floor=(0, 1e30))

    def problems(self, sampling: Any) -> Iterator[UsageError]:
        """Yield what has no meaning with the other settings of the samples."""
        if sampling.group < 2:
            yield UsageError("sampling.group", sampling.group, "at least 2", "a single sample is always flat")
        if sampling.window.draw == "call":
            hint = "samples that are made again are generated with others, which would change their window"
            yield UsageError("sampling.window.draw", "call", "rollout, group, sample or run", hint)

    def collect(self, run: Any, key: Key) -> Any:
        """Return the next batch of a run, with other groups in place of flat ones."""
        return run.fill(run.sample(key), key, rounds=self.rounds, floor=self.floor)


@dataclass(frozen=True)
class ScoutedGroups:
    """The best and the worst of many initial noises per prompt, by samples of fewer steps (Sol-RL, arXiv 2604.06916).

    Half of a group starts from the best noises, half from the worst. Its samples take all steps, and are scored again.

    Args:
        scouts: Number of initial noises per prompt.
        steps: Number of steps of the samples that choose among them.
    """

    kind: ClassVar[str] = "scouted"
    scouts: int = 96
    steps: int = 6

    def __post_init__(self) -> None:
        check_fields(self, "sampling.groups", scouts=(2, BATCH[1]), steps=STEPS)

    def problems(self, sampling: Any) -> Iterator[UsageError]:
        """Yield what has no meaning with the other settings of the samples."""
        if sampling.group % 2 or sampling.group > self.scouts:
            expected = f"an even number, at most the {self.scouts} of `sampling.groups.scouts`"
            yield UsageError("sampling.group", sampling.group, expected, "half of it are the best, half the worst")
        if sampling.sampler.eta or not sampling.sampler.is_deterministic:
            hint = "the initial noise of a scout says little of a sample with noise in its steps"
            yield UsageError("sampling.sampler", sampling.sampler.kind, "ode", hint)
        if self.steps > sampling.steps:
            yield UsageError("sampling.groups.steps", self.steps, f"at most the {sampling.steps} of `sampling.steps`")

    def collect(self, run: Any, key: Key) -> Any:
        """Return the next batch of a run, from those initial noises whose scouts are the best and the worst."""
        count = run.config.method.sampling.group // 2
        starts = run.find_extremes(run.score(run.sample(key, group=self.scouts, steps=self.steps)), count)
        return run.sample(key, starts=starts)  # the scouts, and what they hold, are gone


# `groups.collect(run, key)` returns the next batch of a run.
Groups = AllGroups | RefilledGroups | ScoutedGroups
