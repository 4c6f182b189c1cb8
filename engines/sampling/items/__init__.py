"""Items of an update: (sample, noise level) pairs, from recorded steps or noised clean samples.

Given x_t and x_{t+1}, the steps of a trajectory are independent, and so are noised samples. So any slice of the flattened
items can be a micro-batch.
"""

from fluvial.engines.sampling.items.noised import (
    NoisedSamples,
    Pairs,
    RenoisedSamples,
    noised_pairs,
    noised_samples,
    renoised_samples,
)
from fluvial.engines.sampling.items.steps import (
    LastSteps,
    RecordedSteps,
    Share,
    concatenate,
    last_steps,
    rebalance,
    recorded_steps,
    select,
    transfers,
)

Rows = RecordedSteps | LastSteps | NoisedSamples | RenoisedSamples | Pairs

__all__ = [
    "LastSteps",
    "NoisedSamples",
    "Pairs",
    "RecordedSteps",
    "RenoisedSamples",
    "Rows",
    "Share",
    "concatenate",
    "last_steps",
    "noised_pairs",
    "noised_samples",
    "rebalance",
    "recorded_steps",
    "renoised_samples",
    "select",
    "transfers",
]
