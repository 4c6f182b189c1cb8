"""Table of the reward models that fluvial ships, and reasons for those that it cannot.

`REWARD_MODELS["pickscore"].make(device="cuda:1")` builds one.
"""

import inspect
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

VIT_L = "openai/clip-vit-large-patch14", "32bd64288804d66eefd0ccbe215aa642df71cc41"  # CLIP, and its commit


@dataclass(frozen=True)
class RewardModel:
    """A row of the table of reward models.

    Args:
        name: name on the command line.
        factory: class of the reward, or the reward function, as `module:name` below `fluvial.models.rewards`, imported on
            first use.
        formula: score of an image x and a prompt p.
        source: paper or repository that the formula comes from.
        licence: licence of the weights.
        weights: id of the default weights on the Hub; empty if there are none.
        revision: commit of the default weights.
        parameters: number of parameters in millions.
        install: argument of pip install beside fluvial, e.g. "fluvial[rewards]"; None if nothing is needed.
        packages: packages that must be importable.
        gradients: whether the score is differentiable in the images, as `alignprop` needs.
        takes: first argument of the reward, "images" (or videos), "videos" or "audio".
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
        reward = getattr(import_module(f"fluvial.models.rewards.{module}"), name)

        def make() -> Any:
            """Return the reward; it has no options."""
            return reward

        return reward if inspect.isclass(reward) else make

    @property
    def gibibytes(self) -> float:
        """Memory of the weights in float32, in GiB; bfloat16 takes half of it."""
        return self.parameters * 1e6 * 4 / 2**30

    def list_missing_packages(self) -> list[str]:
        """Return the packages that are not installed."""
        return [name for name in self.packages if find_spec(name) is None]

    def choose_commit(self, weights: object, revision: str | None) -> str | None:
        """Return the commit to load: `revision`, or the default weights' commit, or None for the newest."""
        return revision or (self.revision if weights == self.weights else None)


def _read_table() -> dict[str, RewardModel]:
    """Return the models of table.yaml by name."""
    text = Path(__file__).with_name("table.yaml").read_text(encoding="utf-8")
    rows: dict[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    packages = {name: tuple(fields.pop("packages", ())) for name, fields in rows.items()}
    return {name: RewardModel(name, packages=packages[name], **fields) for name, fields in rows.items()}


REWARD_MODELS = _read_table()

# Well-known rewards that need a separate server, and why.
ELSEWHERE: dict[str, str] = {
    "geneval": "its detector needs mmdet and Python 3.10; models.rewards.geneval has its rules for any detector",
    "deqa": "needs mPLUG-Owl2, which is code in its repository",
    "unifiedreward": "has 7B parameters and generates text: serve it, and use unified_reward, unified_reward_2 or win_rate",
    "imagebind": "no class of transformers; its package needs torchvision and torchaudio",
}
