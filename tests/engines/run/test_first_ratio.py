"""The first ratio of a run is exactly 1 where a network tells how its inputs lie in memory, on any number of threads."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import handwriting_jobs, tiny_token_job
from helpers.addresses import misplaced, placed
from helpers.tiny_token_job import Toy, ToyCond
from rich.console import Console
from torch import Tensor, nn

from fluvial.engines.engine.engine import OptimizerConfig
from fluvial.engines.methods.grpo import Grpo
from fluvial.engines.run import train
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.evaluation.config import EvaluationConfig
from fluvial.engines.run.jobs.settings import MachineConfig
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.samplers import Stochastic
from fluvial.models import LoraConfig
from fluvial.models.lora import LowRank


class Telling(Toy):
    """A model whose prompt embeddings lie anywhere, and whose prediction tells on every processor how its inputs lie."""

    def encode(self, prompts: Sequence[str]) -> ToyCond:
        """Return the embeddings at odd addresses, one of them turned."""
        text, pooled = super().encode(prompts)
        return ToyCond(placed(text.mT.contiguous(), 1).mT, placed(pooled, 3))

    def predict(
        self, module: nn.Module, x: Tensor, sigma: Tensor, cond: ToyCond, *, timestep: Tensor | None = None
    ) -> Tensor:
        """Return the transformer's output, plus what tells how the inputs lie."""
        return super().predict(module, x, sigma, cond, timestep=timestep) + 1e-3 * misplaced(x, *cond)


@pytest.mark.bits
def test_the_first_ratio_is_one_however_inputs_lie(tmp_path: Path, threads: int) -> None:
    """Samples of an odd number of values, so that a micro-batch of an update begins at an odd address of all of them."""
    job = tiny_token_job.job()
    job = replace(job, model=Telling(), shape=(7, job.shape[1]))
    config = TrainConfig(
        out=tmp_path / "run",
        updates=1,
        train="full",
        optimizer=OptimizerConfig(lr=1e-3),
        method=Grpo(sampling=SamplingConfig(prompts=2, group=2, steps=4, sampler=Stochastic(eta=0.5))),
        engine=MachineConfig(micro_batch=1),
        evaluation=EvaluationConfig(final_samples=2),
    )
    summary = train(config, job, console=Console(quiet=True))
    assert summary["first_pass_max_abs_log_ratio"] == 0.0


@pytest.mark.bits
def test_the_first_ratio_is_one_with_a_merged_product_of_lora(tmp_path: Path) -> None:
    """In the second update, too, where the adapters add something."""
    lora = LoraConfig(rank=4, form=LowRank(product="merged"))
    config = handwriting_jobs.config(tmp_path, train="lora", lora=lora, optimizer=OptimizerConfig(lr=1e-2))
    first, second = handwriting_jobs.updates(config, count=2)
    assert first["first_pass_max_abs_log_ratio"] == second["first_pass_max_abs_log_ratio"] == 0.0


@pytest.mark.bits
@pytest.mark.parametrize(
    "base", ["nf4", *(pytest.param(base, marks=pytest.mark.long) for base in ("int8", "int4", "fp8", "fp8_dynamic"))]
)
def test_the_first_ratio_is_one_with_a_quantised_base(tmp_path: Path, base: Any) -> None:
    """With checkpointing in the update, and in the second update too."""
    engine = {"engine.base": base, "engine.checkpointing": "block"}
    config = handwriting_jobs.config(tmp_path, train="lora", optimizer=OptimizerConfig(lr=1e-2), **engine)
    first, second = handwriting_jobs.updates(config, count=2)
    assert first["first_pass_max_abs_log_ratio"] == second["first_pass_max_abs_log_ratio"] == 0.0
