"""A row for every objective, in each of its forms."""

from pathlib import Path

from fluvial.engines.methods.table import (
    AlignProp,
    Awm,
    Crd,
    D3po,
    Dgpo,
    Distill,
    Dmd2,
    Dpo,
    Dppo,
    Gardo,
    Grpo,
    Guard,
    Nft,
    Raft,
    Sft,
    Tdm,
    TempFlow,
)
from fluvial.engines.run.declared import LinearOld, NoOld
from fluvial.engines.run.method import Method

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
    "gardo": Gardo(),
    "d3po": D3po(),
    "alignprop": AlignProp(last=2),
    "dmd2": Dmd2(fake_updates=2),
    "tdm": Tdm(),
}
