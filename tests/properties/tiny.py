"""A job over a net of two thousand parameters that predicts a velocity or epsilon, for tests that train many runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fluvial.core.guidance import classifier_free
from fluvial.core.random import Key, normal
from fluvial.core.sigmas import shifted
from fluvial.engines.data.records import Prompt
from fluvial.engines.engine.engine import UpdateInfo
from fluvial.engines.engine.world import World
from fluvial.engines.gathered import gather
from fluvial.engines.methods.grpo import Grpo
from fluvial.engines.run.config import TrainConfig, with_values
from fluvial.engines.run.job import Job
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.samplers import Stochastic
from fluvial.models import LoraConfig, Prediction, Schedule

SHAPE, STEPS = (1, 4, 4), 4
PROMPTS, HELDOUT = ("0", "1", "2", "3"), ("4", "5")


class TinyCond(NamedTuple):
    """Conditioning: a row per prompt."""

    rows: Tensor  # [B, 6]


class Block(nn.Module):
    """A repeated block, which can be sharded, checkpointed and swapped."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        """Return tanh of a linear layer, `[B, 24]`."""
        return torch.tanh(self.inner(x))


class Net(nn.Module):
    """Two blocks and a head over pixels, prompt and time.

    Rows have multiples of 4 numbers, so that a sample has the same bits at every place of a batch (tests/README.md, "Bits").
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.into = nn.Linear(16 + 6 + 2, 24)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.out = nn.Linear(24, 16)

    def forward(self, x: Tensor, rows: Tensor, time: Tensor) -> Tensor:
        """Return the prediction at x, `[B, 1, 4, 4]`."""
        hidden = self.into(torch.cat([x.flatten(1), rows, time[:, None], 1 - time[:, None]], dim=1))
        for block in self.blocks:
            hidden = block(hidden)
        return self.out(hidden).unflatten(1, x.shape[1:])


@dataclass(frozen=True)
class Tiny:
    """The velocity-model protocol over `Net`; a prompt is a digit."""

    prediction: Prediction = "velocity"
    seed: int = 0
    lora_targets: Sequence[str] = ("into", "inner", "out")
    weights: Path | None = None

    def build(self, *, empty: bool = False) -> nn.Module:
        """Return the net."""
        return Net(self.seed)

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """Return the repeated blocks."""
        blocks = module.get_submodule("blocks")
        return [*blocks.children()]

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Return the only shape of a sample."""
        return SHAPE

    def schedule(self, steps: int, shape: tuple[int, ...]) -> Schedule:
        """Return noise levels that fall (sigma), or rise (alpha_bar)."""
        if self.prediction == "velocity":
            levels = shifted(steps, 3.0)
            return Schedule(levels, 1000 * levels[:-1])
        return Schedule(torch.linspace(0.02, 0.99, steps + 1), torch.linspace(900, 100, steps))

    def check_prompt(self, prompt: str) -> None:
        """Raise ValueError unless a prompt is a digit below 6, or empty."""
        if prompt not in ("", *PROMPTS, *HELDOUT):
            raise ValueError(f"prompt {prompt!r} is no digit")

    def encode(self, prompts: Sequence[str]) -> TinyCond:
        """Return a one-hot row per prompt."""
        return TinyCond(torch.stack([torch.eye(7)[int(prompt or "6")][:6] for prompt in prompts]))

    def predict(
        self, module: nn.Module, x: Tensor, sigma: Tensor, cond: TinyCond, *, timestep: Tensor | None = None
    ) -> Tensor:
        """Return the prediction of the net."""
        return module(x, cond.rows, sigma)

    def decode(self, latents: Tensor) -> Tensor:
        """Return images `[B, 1, 4, 4]` in [0, 1]."""
        return (latents.float() / 2 + 0.5).clamp(0, 1)

    def guide(self, v: Tensor, v_uncond: Tensor, guidance: Tensor | float, /) -> Tensor:
        """Return the guided prediction."""
        return classifier_free(v, v_uncond, guidance)


def brightness(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Return the mean of each image, `[B]`."""
    return images.mean((1, 2, 3)).cpu()


def contrast(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Return 100 times the standard deviation within each image, `[B]`."""
    return 100 * images.flatten(1).std(1).cpu()


def drawn(key: Key, prompts: Sequence[Prompt]) -> Tensor:
    """Return given images: noise."""
    return normal(key, (len(prompts), *SHAPE)).clamp(-1, 1)


def job(prediction: Prediction = "velocity", **changes: Any) -> Job:
    """Return the job of making bright images; a folder named `teacher` holds other weights."""
    made = Job(
        Tiny(prediction),
        PROMPTS,
        {"brightness": brightness, "contrast": contrast},
        heldout=HELDOUT,
        shape=SHAPE,
        evaluators={"heldout": brightness},
        load=lambda folder: Tiny(prediction, seed=1),
        data=drawn,
        encode=lambda images: images * 2 - 1,
    )
    return replace(made, **changes)


def job_of_sources(**changes: Any) -> Job:
    """Return a job whose prompts are of two sources; folders of other names than `teacher` hold other weights."""
    prompts = tuple(Prompt(text, source="even" if int(text) % 2 == 0 else "odd") for text in PROMPTS)
    seeds = {"student": 0, "teacher": 1, "other": 2}
    return job(**{"prompts": prompts, "load": lambda folder: Tiny(seed=seeds[folder.name]), **changes})


def config(out: Path, /, **changes: Any) -> TrainConfig:
    """Return a run of one update of four samples, with changes by dotted names."""
    values: dict[str, Any] = {
        "engine.micro_batch": 2,
        "engine.update_micro_batch": "rollout",
        "updates": 1,
        "lora": LoraConfig(rank=4),
        "sampling": SamplingConfig(prompts=2, group=2, steps=STEPS, sampler=Stochastic(eta=0.5)),
    }
    return with_values(TrainConfig(out, Grpo()), {**values, **changes})


@dataclass(eq=False)
class TinyRun:
    """A trainer in this process, a rollout at a time; `infos` are those of every update so far."""

    config: TrainConfig
    world: World | None = None
    job_of: Job | None = None

    def __post_init__(self) -> None:
        self.trainer = Trainer(self.config, job() if self.job_of is None else self.job_of, self.world)
        self.infos: list[UpdateInfo] = []
        optimize = self.trainer.engine.update

        def noted(*args: Any, **kwargs: Any) -> UpdateInfo:
            self.infos.append(optimize(*args, **kwargs))
            return self.infos[-1]

        self.trainer.engine.update = noted  # type: ignore[method-assign]

    def rollout(self) -> dict[str, Any]:
        """Make a batch and its updates, and return their record."""
        return self.trainer.update()

    def weights(self) -> dict[str, Tensor]:
        """Return copies of this rank's shards of the weights."""
        return {name: tensor.clone() for name, tensor in self.trainer.engine.sharded.shards().items()}

    def gradient(self) -> dict[str, Tensor]:
        """Return the first moments of AdamW, which after one update are the gradient times 1 - beta."""
        state = self.trainer.engine.state()
        return {name: gather(t).clone() for name, t in state.items() if name.startswith("exp_avg.")}
