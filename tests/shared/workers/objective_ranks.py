"""Runs one rollout and its updates with every kind of objective, for test_learner.py."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from helpers import tiny_jobs as tiny

from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.gathered import gather
from fluvial.engines.methods import ConstantMargin, Doubt, HeadGan
from fluvial.engines.methods.table import (
    AcDmd,
    AdjointMatching,
    Awm,
    BranchGrpo,
    ChunkGrpo,
    DenseGrpo,
    Distill,
    Dmd2,
    Dpo,
    Gardo,
    Grpo,
    Guard,
    Kto,
    Mapo,
    Nft,
    Raft,
    Refl,
    Rtdmd,
    Sft,
    Spo,
    Srpo,
    Tdm,
    TdmR1,
    TurningPointGrpo,
)
from fluvial.engines.sampling.config import RefilledGroups, SamplingConfig, ScoutedGroups, Truncate
from fluvial.engines.sampling.noising import ContinuousLevels, NoisingConfig
from fluvial.engines.sampling.samplers import Ode, Stochastic
from fluvial.engines.sampling.window import AllRecorded, AllSteps, Candidates, RandomRecorded, RandomWindow, Splits

# 12 samples: with 2 ranks 4 slots are repeats
STEPS = SamplingConfig(prompts=3, group=4, steps=tiny.STEPS, sampler=Stochastic(eta=0.5))
ODE = replace(STEPS, sampler=Ode())
FEW = replace(ODE, prompts=12, group=1)
RUNS: dict[str, dict[str, Any]] = {
    "nft": {"method": Nft(), "sampling": replace(ODE, sampler=Ode("dpmpp_2m")), "train": "lora", "kl.coef": 0.1},
    "awm": {"method": Awm(), "sampling": ODE, "passes.epochs": 2, "updates": 2},
    "dpo": {"method": Dpo(), "sampling": ODE, "noising": NoisingConfig(3)},
    "dpo, lora": {"method": Dpo(), "sampling": ODE, "train": "lora"},
    "mapo": {"method": Mapo(temperature=10.0), "sampling": ODE, "noising": NoisingConfig(3)},
    "kto": {"method": Kto(labels="reward", utility="log_sigmoid"), "sampling": ODE, "passes.minibatches": 2, "updates": 2},
    "raft": {"method": Raft(), "sampling": ODE, "kl.coef": 0.1},
    "sft": {"method": Sft(), "sampling": ODE, "noising": NoisingConfig(2, ContinuousLevels())},
    "distill": {"method": Distill(teacher=("teacher",)), "sampling": STEPS},
    "distill by source": {"method": Distill(teacher=("even=teacher", "odd=other")), "sampling": STEPS},
    "dmd2": {"method": Dmd2(fake_updates=2), "sampling": replace(FEW, sampler=Stochastic("cps", 1.0))},
    "dmd2, gan": {
        "method": Dmd2(fake_updates=2, gan=HeadGan(0.5, 0.1)),
        "sampling": replace(FEW, sampler=Stochastic("cps", 1.0)),
        "engine.comm": "reshard",
    },
    "dmd2, gan, lora": {
        "method": Dmd2(fake_updates=2, gan=HeadGan(0.5, 0.1)),
        "sampling": replace(FEW, sampler=Stochastic("cps", 1.0)),
        "train": "lora",
    },
    "ac-dmd": {"method": AcDmd(fake_updates=2), "sampling": replace(FEW, sampler=Stochastic("cps", 0.9))},
    "tdm, lora": {"method": Tdm(trained=AllRecorded()), "sampling": FEW, "train": "lora"},
    "tdm-r1": {"method": TdmR1(), "sampling": replace(STEPS, sampler=Ode()), "train": "lora"},
    "rtdmd": {"method": Rtdmd(first=2), "sampling": replace(STEPS, sampler=Stochastic("cps", 0.9))},
    "refl": {"method": Refl(), "sampling": replace(FEW, window=AllSteps(low=1))},
    "srpo": {"method": Srpo(margin=9.0), "sampling": FEW},
    "minibatches": {"sampling": STEPS, "passes.minibatches": 2, "updates": 2},
    "fraction": {"sampling": replace(STEPS, shared_noise=True), "trained": RandomRecorded(0.5)},
    "correction": {"sampling": STEPS, "rollout.autocast": True, "correction": Truncate("trajectory")},
    "chunk": {"method": ChunkGrpo(), "sampling": STEPS},
    "densegrpo": {"method": DenseGrpo(), "sampling": STEPS},
    "tpgrpo": {"method": TurningPointGrpo(), "sampling": STEPS, "rewards": ("brightness", "contrast=0.1")},
    "adjoint": {
        "method": AdjointMatching(scale=1.0),
        "sampling": replace(STEPS, sampler=Stochastic(eta=2**0.5)),
        "train": "lora",
    },
    "branchgrpo": {"method": BranchGrpo(), "sampling": replace(STEPS, window=Splits((0, 2)))},
    "spo": {
        "method": Spo(margin=ConstantMargin(0.0)),
        "sampling": replace(STEPS, window=Candidates(4, low=1)),
        "train": "lora",
    },
    "flash": {
        "sampling": replace(STEPS, window=RandomWindow(1, draw="group")),
        "method": Grpo(weighting="std_over_b"),
        "passes.minibatches": 2,
        "updates": 2,
    },
    "gardo": {
        "sampling": STEPS,
        "method": Gardo(gate=Doubt(share=0.2)),
        "rewards": ("brightness", "contrast"),
        "train": "lora",
        "passes.epochs": 2,
        "updates": 2,
    },
    "refilled": {"sampling": replace(STEPS, prompts=2, group=6, groups=RefilledGroups(2, 0.1))},
    "scouted": {"method": Nft(), "sampling": replace(ODE, groups=ScoutedGroups(9, 2)), "train": "lora"},
    "guard": {"method": Guard(), "sampling": STEPS, "rewards": ("brightness", "contrast=0.1")},
}


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
