"""A run that is resumed is the run that was left alone: one property over what a run keeps between its rollouts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import handwriting_jobs
from helpers import tiny_jobs as tiny
from helpers.marks import long
from helpers.resumed import expect_resumed
from helpers.spied_runs import ODE, STEPS

from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.errors import FluvialError
from fluvial.engines.methods import Doubt
from fluvial.engines.methods.table import Gardo, Nft
from fluvial.engines.run.config import with_values
from fluvial.engines.run.declared import LinearOld
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.window import MovingWindow, RandomRecorded, RandomWindow
from fluvial.engines.scoring.advantages import AdvantageConfig
from fluvial.models.lora import Dora, Lokr, LoraConfig

TWO = ("brightness", "contrast")
HISTORY = AdvantageConfig(history=8, history_min=4, eps=1e-6, ddof=0, clip=5.0)
# What is kept: the changes of a run of three rollouts, two of which are made before it is saved.
KEPT: dict[str, dict[str, Any]] = {
    "followers": {"method": Nft(old=LinearOld(0.3)), "sampling": ODE, "train": "lora", "kl.coef": 0.1},
    "order": {
        **{"sampling": replace(STEPS, window=RandomWindow(2)), "trained": RandomRecorded(0.5), "kl.coef": 0.1},
        **{"passes.minibatches": 2, "updates": 6},
    },
    "statistics": {"sampling": replace(STEPS, prompts=6, group=1), "advantage": HISTORY},
    "multipliers": {"rewards": TWO, "advantage": AdvantageConfig(floors=("contrast=40",), floor_lr=0.05)},
    "window": {"sampling": replace(STEPS, window=MovingWindow(2, every=2, stride=1)), "passes.minibatches": 2, "updates": 6},
    "prefix": {"sampling": replace(STEPS, steps=6, window=RandomWindow(2, low=2, share_prefix=True))},
    "gate": {
        **{"method": Gardo(gate=Doubt(window=2), reset_after=1), "sampling": STEPS, "rewards": TWO, "train": "lora"},
    },
}


@pytest.mark.parametrize("kept", [long(name) if name == "gate" else name for name in KEPT])
def test_a_resumed_run_is_the_same(one: World, tmp_path: Path, kept: str) -> None:
    """In all of its state and records; prompts come in the order in which they would have come."""
    average = {"optimizer": OptimizerConfig(lr=0.05, ema_decay=0.9), "data.order": "epochs"}
    job = tiny.job(prompts=("0", "1", "2")) if kept == "statistics" else tiny.job()
    expect_resumed(tiny.config(tmp_path, **{"updates": 3, **average, **KEPT[kept]}), job, one, after=2)


# Ways to keep weights and adapters, of the built-in model.
WEIGHTS: dict[str, dict[str, Any]] = {
    "nf4": {"train": "lora", "engine.base": "nf4", "engine.checkpointing": "host"},
    **{base: {"train": "lora", "engine.base": base} for base in ("int8", "int4", "fp8", "fp8_dynamic", "bfloat16")},
    "dora": {"train": "lora", "lora": LoraConfig(rank=4, form=Dora()), "engine.base": "int8"},
    "lokr": {"train": "lora", "lora": LoraConfig(rank=4, form=Lokr()), "engine.compute": "bfloat16"},
    "masters": {"train": "full", "engine.masters": "bfloat16"},
}


@pytest.mark.long
@pytest.mark.parametrize("way", WEIGHTS)
def test_a_resumed_run_has_the_same_weights(one: World, tmp_path: Path, way: str) -> None:
    """However they are kept; other ones are another run."""
    average = OptimizerConfig(lr=1e-3, ema_decay=0.9, schedule="constant")
    config = handwriting_jobs.config(tmp_path, optimizer=average, **WEIGHTS[way])
    expect_resumed(config, handwriting_jobs.job(), one)
    if way == "nf4":
        other = with_values(config, {"engine.base": "int8"})
        with pytest.raises(FluvialError, match="base_weights"):
            Trainer(other, handwriting_jobs.job(), one, resume_from=tmp_path / "checkpoints" / "000001")
