"""Runs one rollout and its updates with every kind of objective, for test_learner.py."""

from pathlib import Path
from typing import Any

import torch
from helpers import tiny_jobs as tiny
from helpers.settings import settings_of

from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.gathered import gather
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.samplers import Stochastic

# 12 samples: with 2 ranks 4 slots are repeats
STEPS = SamplingConfig(prompts=3, group=4, steps=tiny.STEPS, sampler=Stochastic(eta=0.5))
SINGLE, TWO = "sampling.prompts=12 sampling.group=1", "passes.minibatches=2 updates=2"
LIGHT, GAN = "rewards=('brightness','contrast=0.1')", "fake_updates=2 gan=head gan.weight=0.5 gan.critic_weight=0.1"
LINES = {
    "nft": "nft dpm lora kl.coef=0.1",
    "awm": "awm ode passes.epochs=2 updates=2",
    "dpo": "dpo ode noising.each=3",
    "dpo, lora": "dpo ode lora",
    "mapo": "mapo ode temperature=10.0 noising.each=3",
    "kto": f"kto ode labels=reward utility=log_sigmoid {TWO}",
    "raft": "raft ode kl.coef=0.1",
    "sft": f"sft reading sampling.prompts=12 sampling.steps={tiny.STEPS} noising.each=2 noising.levels=continuous",
    "distill": "distill teacher=('teacher',)",
    "distill by source": "distill teacher=('even=teacher','odd=other')",
    "dmd2": f"dmd2 cps sampling.sampler.eta=1.0 {SINGLE} fake_updates=2",
    "dmd2, gan": f"dmd2 cps sampling.sampler.eta=1.0 {SINGLE} {GAN} engine.comm=reshard",
    "dmd2, gan, lora": f"dmd2 cps sampling.sampler.eta=1.0 {SINGLE} {GAN} lora",
    "ac-dmd": f"ac-dmd cps sampling.sampler.eta=0.9 {SINGLE} fake_updates=2",
    "tdm, lora": f"tdm ode {SINGLE} trained=all lora",
    "tdm-r1": "tdm-r1 ode lora",
    "rtdmd": "rtdmd cps sampling.sampler.eta=0.9 first=2",
    "refl": f"refl ode {SINGLE} sampling.window.low=1",
    "srpo": f"srpo ode {SINGLE} margin=9.0",
    "minibatches": f"grpo {TWO}",
    "fraction": "grpo sampling.shared_noise=True trained=random trained.fraction=0.5",
    "correction": "grpo rollout.autocast=True correction=truncate correction.level=trajectory",
    "chunk": "chunk",
    "densegrpo": "densegrpo",
    "tpgrpo": f"tpgrpo {LIGHT}",
    "adjoint": f"adjoint sampling.sampler.eta={2**0.5} scale=1.0 lora",
    "branchgrpo": "branchgrpo sampling.window=splits sampling.window.splits=(0,2)",
    "spo": "spo sampling.window=candidates sampling.window.samples=4 sampling.window.low=1 margin.size=0.0 lora",
    "flash": f"grpo sampling.window=random sampling.window.size=1 sampling.window.draw=group weighting=std_over_b {TWO}",
    "gardo": "gardo lora gate=doubt gate.share=0.2 rewards=('brightness','contrast') passes.epochs=2 updates=2",
    "refilled": "grpo refilled sampling.prompts=2 sampling.group=6 sampling.groups.rounds=2 sampling.groups.floor=0.1",
    "scouted": "nft ode lora sampling.groups=scouted sampling.groups.scouts=9 sampling.groups.steps=2",
    "guard": f"guard {LIGHT}",
}
RUNS: dict[str, dict[str, Any]] = {name: {"sampling": STEPS, **settings_of(line)} for name, line in LINES.items()}


def rollouts(world: World, folder: str) -> dict[str, Any]:
    """Return {run: {reward, pairs, correction, gradients: AdamW's first moments after each update, and those of others}}."""
    result: dict[str, Any] = {}
    for name, changes in RUNS.items():
        run = tiny.config(Path(folder), optimizer=OptimizerConfig(weight_decay=0.0), **changes, **{"engine.micro_batch": 4})
        trained = tiny.Run(run, world, tiny.job_of_sources() if "source" in name else None)
        gradients: list[list[float]] = []
        optimize = trained.trainer.engine.update

        def noted(*args: Any, trained: Any = trained, found: Any = gradients, optimize: Any = optimize, **more: Any) -> Any:
            info = optimize(*args, **more)
            found.append(torch.cat([g.flatten() for g in trained.gradient().values()]).tolist())
            return info

        trained.trainer.engine.update = noted  # type: ignore[method-assign]
        record = trained.rollout()
        for engine in trained.trainer.run.networks.trained.values():  # after its last update
            moments = [gather(t).flatten() for name, t in engine.state().items() if name.startswith("exp_avg.")]
            gradients.append(torch.cat(moments).tolist())
        result[name] = {
            "reward": record.get("reward"),
            "refill": record.get("refill"),
            "pairs": record["pairs"],
            "correction": record.get("correction", {}),
            "gradients": gradients,
        }
    return result
