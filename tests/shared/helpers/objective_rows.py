"""A row for every objective, in each of its forms."""

from pathlib import Path

from fluvial.engines.methods import ConstantMargin
from fluvial.engines.methods.table import (
    AcDmd,
    AdjointMatching,
    AlignProp,
    Awm,
    BranchGrpo,
    ChunkGrpo,
    Crd,
    D3po,
    DenseGrpo,
    Dgpo,
    Distill,
    Dmd2,
    Dpo,
    Dppo,
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
    TempFlow,
    TurningPointGrpo,
)
from fluvial.engines.run.declared import LinearOld, NoOld
from fluvial.engines.run.method import Method
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.samplers import Ode, Stochastic
from fluvial.engines.sampling.window import AllSteps, Candidates, Splits

TEACHER, GIVEN = "teacher", Path("given")
OBJECTIVE_ROWS: dict[str, Method] = {
    "clipped": Grpo(),
    "guard": Guard(),
    "dppo": Dppo(),
    "distill, mean_kl": Distill(teacher=(TEACHER,)),
    "distill, velocity_mse": Distill(teacher=(TEACHER,), match="velocity_mse"),
    "distill, clean": Distill(teacher=(TEACHER,), match="clean_relative"),
    "nft, none": Nft(old=NoOld()),
    "nft, linear": Nft(),
    "nft, delayed": Nft(old=LinearOld(delay=1)),
    "awm": Awm(),
    "raft": Raft(),
    "sft": Sft(),
    "dpo, online": Dpo(),
    "dpo, offline": Dpo(preferences=GIVEN),
    "mapo": Mapo(),
    "kto": Kto(labels="reward"),
    "dgpo": Dgpo(),
    "crd": Crd(),
    "tempflow": TempFlow(),
    "chunk": ChunkGrpo(chunk=2),
    "densegrpo": DenseGrpo(),
    "tpgrpo": TurningPointGrpo(),
    "branchgrpo": BranchGrpo(clip_low=0.1, clip_high=0.1, sampling=SamplingConfig(group=2, window=Splits((0,)))),
    "gardo": Gardo(),
    "d3po": D3po(),
    "spo": Spo(sampling=SamplingConfig(group=2, window=Candidates(2)), margin=ConstantMargin(0.0)),
    "alignprop": AlignProp(last=2),
    "adjoint": AdjointMatching(),
    "dmd2": Dmd2(fake_updates=2),
    "ac-dmd": AcDmd(sampling=SamplingConfig(prompts=4, group=1, steps=4, sampler=Stochastic("cps", 0.9)), fake_updates=2),
    "tdm": Tdm(),
    "tdm-r1": TdmR1(),
    "rtdmd": Rtdmd(),
    "refl": Refl(sampling=SamplingConfig(prompts=4, group=1, steps=4, sampler=Ode(), window=AllSteps(low=2))),
    "srpo": Srpo(wanted=("",), unwanted=("",)),
}
