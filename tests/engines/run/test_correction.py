"""Correction of a rollout that computed in another precision than the update."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from helpers import handwriting_jobs
from helpers import tiny_jobs as tiny
from helpers.spied_runs import STEPS, Spied

from fluvial.core import correction, gaussian, transitions
from fluvial.core.advantages import group_advantages
from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.methods.losses import StepKLConfig, correct
from fluvial.engines.methods.table import Grpo, Guard
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.batch import Batch, Items
from fluvial.engines.sampling.config import Mask, Reject, SamplingConfig, Truncate
from fluvial.engines.sampling.items import RecordedSteps

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


def test_the_weights_scale_the_gradient(one: World, tmp_path: Path) -> None:
    """A gradient of untruncated weights is not that of truncated ones; where all pairs are masked there is none."""
    free, held = (corrected(tmp_path, one, "truncate", threshold)[0] for threshold in (1e30, 1.0))
    masked, _ = corrected(tmp_path, one, "mask", 1.0)
    apart = torch.cat([(a - held.gradient()[name]).flatten() for name, a in free.gradient().items()])
    assert float(apart.norm()) > 1e-7
    assert free.infos[0].grad_norm != held.infos[0].grad_norm
    assert masked.infos[0].grad_norm == 0.0 < held.infos[0].grad_norm


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


def test_the_kl_has_no_weight() -> None:
    """The correction scales the target weight alone, so that pairs which it masks keep their whole KL (verl-omni)."""
    generator = torch.Generator().manual_seed(0)
    x, v, x_next, v_ref = torch.randn(4, 6, 5, generator=generator)
    level = torch.linspace(0.3, 0.9, 6)
    transition = transitions.dance_sde(level, level / 2, eta=0.5)
    known = gaussian.log_prob(transition, x, v, x_next)
    known_then, ones, number = known + 5 * (torch.arange(6) % 2), torch.ones(6), torch.arange(6)
    rows = RecordedSteps(
        x, level, level, number, ones, ones, level / 2, x_next, known_then, transition, {"ref": v_ref}, place=number
    )
    found = dict[str, Any]()
    run: Any = SimpleNamespace(
        measure=lambda steps, function: function(v, steps.rows),
        gather=lambda steps, values: values[:, None],
        log=found.update,
    )
    steps = Items(rows, (), torch.ones(6, 1), 6, cast(Batch, None), 6, 6)
    method = Grpo(kl=StepKLConfig(0.5, weight="exact"))
    corrected = correct(run, steps, Mask(threshold=1.5), method.log_prob).rows
    assert torch.equal(corrected.log_prob_old, known)
    assert corrected.signal.tolist() == [1, 0, 1, 0, 1, 0]
    assert float(found["correction"].limited) == 0.5
    loss, info = method.loss(v, corrected)
    kl = gaussian.kl(transition, v, v_ref)
    torch.testing.assert_close(info.kl_ref, kl)
    torch.testing.assert_close(loss, 0.5 * kl - corrected.signal)
