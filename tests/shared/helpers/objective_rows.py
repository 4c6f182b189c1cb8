"""A row for every objective, in each of its forms."""

from pathlib import Path

from fluvial.engines.methods import ConstantMargin, SamplingConfig
from fluvial.engines.methods.table import (
    AdjointMatching,
    AlignProp,
    Awm,
    BranchGrpo,
    Crd,
    D3po,
    DenseGrpo,
    Dgpo,
    Distill,
    Dmd2,
    Dpo,
    Dppo,
    Grpo,
    Guard,
    Nft,
    Raft,
    Sft,
    Spo,
    Tdm,
    TempFlow,
    TurningPointGrpo,
)
from fluvial.engines.run.declared import LinearOld, NoOld
from fluvial.engines.run.method import Method
from fluvial.engines.sampling.window import Candidates, Splits

TEACHER, GIVEN = Path("teacher"), Path("given")
OBJECTIVE_ROWS: dict[str, Method] = {
    "clipped": Grpo(),
    "guard": Guard(),
    "dppo": Dppo(),
    "distill, mean_kl": Distill(teacher=TEACHER),
    "distill, velocity_mse": Distill(teacher=TEACHER, match="velocity_mse"),
    "nft, none": Nft(old=NoOld()),
    "nft, linear": Nft(),
    "nft, delayed": Nft(old=LinearOld(delay=1)),
    "awm": Awm(),
    "raft": Raft(),
    "sft": Sft(),
    "dpo, online": Dpo(),
    "dpo, offline": Dpo(preferences=GIVEN),
    "dgpo": Dgpo(),
    "crd": Crd(),
    "tempflow": TempFlow(),
    "densegrpo": DenseGrpo(),
    "tpgrpo": TurningPointGrpo(),
    "branchgrpo": BranchGrpo(clip_low=0.1, clip_high=0.1, sampling=SamplingConfig(group=2, window=Splits((0,)))),
    "d3po": D3po(),
    "spo": Spo(sampling=SamplingConfig(group=2, window=Candidates(2)), margin=ConstantMargin(0.0)),
    "alignprop": AlignProp(last=2),
    "adjoint": AdjointMatching(),
    "dmd2": Dmd2(fake_updates=2),
    "tdm": Tdm(),
}
