"""First ratios: exactly 1 however inputs lie in memory, or corrected where the rollout computes in another precision."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import handwriting_jobs, tiny_token_job
from helpers import tiny_jobs as tiny
from helpers.addresses import misplaced, placed
from helpers.spied_runs import STEPS, Spied
from helpers.tiny_token_job import Toy, ToyCond
from torch import Tensor, nn

from fluvial.core import correction
from fluvial.core.advantages import group_advantages
from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.methods.grpo import Grpo
from fluvial.engines.methods.table import Guard
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.jobs.settings import MachineConfig
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import Mask, Reject, SamplingConfig, Truncate
from fluvial.engines.sampling.samplers import Stochastic


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
def test_the_first_ratio_is_one_however_inputs_lie(one: World, tmp_path: Path, threads: int) -> None:
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
    )
    with Trainer(config, job, one) as trainer:
        assert trainer.update()["first_pass_max_abs_log_ratio"] == 0.0


KINDS = {"truncate": Truncate, "reject": Reject, "mask": Mask}


def corrected(tmp_path: Path, one: World, mode: Any, threshold: float, level: Any = "step") -> tuple[Spied, dict[str, Any]]:
    """Return a run whose rollout computed in bfloat16, and its record."""
    settings = {"correction": KINDS[mode](level, threshold), "optimizer": OptimizerConfig(max_grad_norm=1e9)}
    run = Spied(tiny.config(tmp_path, sampling=STEPS, **settings, **{"rollout.autocast": True}), one)
    return run, run.rollout()


@pytest.mark.parametrize("level", ["step", "trajectory"])
@pytest.mark.parametrize(
    ("mode", "threshold"), [("truncate", 1.0), ("truncate", 1e30), ("reject", 1.0001), ("mask", 1.0001)]
)
def test_the_weights_are_the_corrections(one: World, tmp_path: Path, mode: Any, threshold: float, level: Any) -> None:
    """The first ratio is exactly 1, and each pair has the weight that core/correction.py gives the two log-probs."""
    run, record = corrected(tmp_path, one, mode, threshold, level)
    assert run.infos[0].max_abs["log_ratio"] == 0.0
    assert record["correction"]["gap_mean"] > 1e-6
    assert all(record["correction"][name] > 0 for name in ("gap_mean", "gap_p99", "kl", "effective"))
    items, known = run.updates[0].items, run.trajectories[0].log_prob
    own = items.log_prob_old.unflatten(0, (tiny.STEPS, 8)).T
    weight, info = correction.rollout_weights(own, known, mode=mode, threshold=threshold, level=level)
    assert float((own - known).abs().max()) > 1e-5
    assert torch.equal(run.updates[0].weight, torch.ones(8 * tiny.STEPS))  # a KL term is not corrected
    advantage = group_advantages(run.scores[:, 0], torch.arange(8) // 4)
    torch.testing.assert_close(items.signal, (weight * advantage[:, None]).T.flatten(), rtol=1e-5, atol=1e-6)
    assert record["correction"]["limited"] == pytest.approx(float(info.limited))
    if threshold < 1e30:
        assert 0 < record["correction"]["limited"] < 1


def test_guard_with_a_correction(one: World, tmp_path: Path) -> None:
    """Its old velocity is then the update's own too, so that the first ratio is 1."""
    changes = {"correction": Truncate(), "rollout.autocast": True}
    run = Spied(tiny.config(tmp_path, sampling=STEPS, method=Guard(), **changes), one)
    run.rollout()
    recorded = run.trajectories[0].velocity
    assert recorded is not None
    assert not torch.equal(run.updates[0].items.predictions["old"], recorded.transpose(0, 1).flatten(0, 1))
    assert run.infos[0].max_abs["log_ratio"] == 0.0


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize(
    ("compute", "compiles"),
    [("float32", False), ("bfloat16", False), pytest.param("bfloat16", True, marks=pytest.mark.long)],
)
def test_a_rollout_of_merged_adapters(
    one: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compute: str, compiles: bool
) -> None:
    """In float32 the first ratio stays near 1 without a correction, and in bfloat16 with one it is exactly 1."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    changes: dict[str, Any] = {"train": "lora", "rollout.reuse": "merged", "engine.compute": compute, "updates": 2}
    changes |= {"engine.compile": compiles, "optimizer": OptimizerConfig(lr=0.1)}
    changes |= {} if compute == "float32" else {"correction": Truncate()}
    config = tiny.config(tmp_path, sampling=SamplingConfig(prompts=2, group=2, steps=3), **changes)
    with Trainer(config, handwriting_jobs.job(), one) as trainer:
        trainer.update()  # whose adapters have no effect yet
        record = trainer.update()
    far = record["first_pass_max_abs_log_ratio"]
    assert 0 < far < 1e-4 if compute == "float32" else far == 0.0
    assert compute == "float32" or record["correction"]["gap_mean"] > 1e-6
