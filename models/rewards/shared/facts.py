"""Facts about a reward model that need no loading: its formula, weights, size and licence."""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True)
class RewardModel:
    """A row of the table of reward models.

    Args:
        name: name on the command line.
        factory: class or function that builds the reward, as `module:name` below `fluvial.models.rewards`. It is imported
            when it is needed.
        formula: score of an image x and a prompt p.
        source: paper or repository that the formula comes from.
        licence: licence of the weights.
        weights: id of the default weights on the Hub; empty if there are none.
        revision: commit of the default weights.
        parameters: number of parameters in millions.
        install: what to install beside fluvial, e.g. "fluvial[rewards]"; None if nothing.
        packages: names that must be importable for it.
        gradients: whether the score is differentiable in the images, as `alignprop` needs it.
        takes: first argument of the reward, "images" (or videos) or "audio".
    """

    name: str
    factory: str
    formula: str
    source: str
    licence: str
    weights: str = ""
    revision: str | None = None
    parameters: float = 0.0
    install: str | None = None
    packages: tuple[str, ...] = ()
    gradients: bool = False
    takes: str = "images"

    @property
    def make(self) -> Any:
        """Class or function that builds the reward. Its arguments are the options, e.g. of `pickscore:device=cuda:1`.

        It raises ValueError, in one line, if the reward cannot be built.
        """
        module, _, name = self.factory.partition(":")
        return getattr(import_module(f"fluvial.models.rewards.{module}"), name)

    @property
    def gibibytes(self) -> float:
        """Memory of the weights in float32, in GiB; half of it in bfloat16."""
        return self.parameters * 1e6 * 4 / 2**30

    def missing(self) -> list[str]:
        """Return the packages that are not installed."""
        return [name for name in self.packages if find_spec(name) is None]

    def commit(self, weights: object, revision: str | None) -> str | None:
        """Return the commit to load: the one asked for, or that of the default weights, or None for the newest."""
        return revision or (self.revision if weights == self.weights else None)
