"""Training methods, one file per family, and the table of all of them; your own derives from `run.method.Method`."""

from fluvial.engines.methods.ac_dmd import AcDmd
from fluvial.engines.methods.adjoint import AdjointMatching
from fluvial.engines.methods.alignprop import AlignProp
from fluvial.engines.methods.awm import Awm
from fluvial.engines.methods.branch import BranchGrpo
from fluvial.engines.methods.chunk import ChunkGrpo
from fluvial.engines.methods.crd import Crd
from fluvial.engines.methods.d3po import D3po
from fluvial.engines.methods.dense import DenseGrpo, TurningPointGrpo
from fluvial.engines.methods.dgpo import Dgpo
from fluvial.engines.methods.distill import Distill
from fluvial.engines.methods.dmd2 import Dmd2
from fluvial.engines.methods.dpo import Dpo
from fluvial.engines.methods.gardo import Gardo
from fluvial.engines.methods.gates import Doubt, Everywhere
from fluvial.engines.methods.grpo import Grpo
from fluvial.engines.methods.kto import Kto
from fluvial.engines.methods.losses import ErrorInfo, HeadGan, KLConfig, NoGan, StepKLConfig
from fluvial.engines.methods.mapo import Mapo
from fluvial.engines.methods.nft import Nft
from fluvial.engines.methods.raft import Raft
from fluvial.engines.methods.refl import Refl
from fluvial.engines.methods.rtdmd import Rtdmd
from fluvial.engines.methods.sft import Sft, SftInfo
from fluvial.engines.methods.spo import ConstantMargin, NoiseMargin, Spo
from fluvial.engines.methods.srpo import Srpo
from fluvial.engines.methods.successors import Dppo, Guard, TempFlow
from fluvial.engines.methods.table import METHODS
from fluvial.engines.methods.tdm import Tdm
from fluvial.engines.methods.tdm_r1 import TdmR1
from fluvial.engines.run.declared import Base, Before, BySource, Follower, SameNetwork, Start, Teacher, Trained
from fluvial.engines.run.method import (
    EpochsConfig,
    Images,
    Method,
    Needs,
    NoisedRows,
    PassesConfig,
    Preferences,
    RecordedRows,
)
from fluvial.engines.sampling.config import (
    CleanSamplingConfig,
    Mask,
    NoCorrection,
    ReadingConfig,
    Reject,
    SamplingConfig,
    Truncate,
)
from fluvial.engines.sampling.noising import NoisingConfig
from fluvial.engines.scoring.advantages import AdvantageConfig

__all__ = [
    "METHODS",
    "AcDmd",
    "AdjointMatching",
    "AdvantageConfig",
    "AlignProp",
    "Awm",
    "Base",
    "Before",
    "BranchGrpo",
    "BySource",
    "ChunkGrpo",
    "CleanSamplingConfig",
    "ConstantMargin",
    "Crd",
    "D3po",
    "DenseGrpo",
    "Dgpo",
    "Distill",
    "Dmd2",
    "Doubt",
    "Dpo",
    "Dppo",
    "EpochsConfig",
    "ErrorInfo",
    "Everywhere",
    "Follower",
    "Gardo",
    "Grpo",
    "Guard",
    "HeadGan",
    "Images",
    "KLConfig",
    "Kto",
    "Mapo",
    "Mask",
    "Method",
    "Needs",
    "Nft",
    "NoCorrection",
    "NoGan",
    "NoiseMargin",
    "NoisedRows",
    "NoisingConfig",
    "PassesConfig",
    "Preferences",
    "Raft",
    "ReadingConfig",
    "RecordedRows",
    "Refl",
    "Reject",
    "Rtdmd",
    "SameNetwork",
    "SamplingConfig",
    "Sft",
    "SftInfo",
    "Spo",
    "Srpo",
    "Start",
    "StepKLConfig",
    "Tdm",
    "TdmR1",
    "Teacher",
    "TempFlow",
    "Trained",
    "Truncate",
    "TurningPointGrpo",
]
