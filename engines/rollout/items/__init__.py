"""Items of an update: (sample, noise level) pairs, one file per kind.

Given x_t and x_{t+1}, the steps of a trajectory are independent, and so are samples that noise is put on. Flattened, any
slice of them is a micro-batch.
"""

from fluvial.engines.rollout.items.last import LastSteps, last_steps
from fluvial.engines.rollout.items.noised import NoisedSamples, noised_samples
from fluvial.engines.rollout.items.pairs import Pairs, noised_pairs
from fluvial.engines.rollout.items.share import Share, rebalance, select, transfers
from fluvial.engines.rollout.items.steps import RecordedSteps, concatenate, recorded_steps

Items = RecordedSteps | LastSteps | NoisedSamples | Pairs

__all__ = [
    "Items",
    "LastSteps",
    "NoisedSamples",
    "Pairs",
    "RecordedSteps",
    "Share",
    "concatenate",
    "last_steps",
    "noised_pairs",
    "noised_samples",
    "rebalance",
    "recorded_steps",
    "select",
    "transfers",
]
