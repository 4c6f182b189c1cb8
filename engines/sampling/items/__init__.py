"""Items of an update: (sample, noise level) pairs, from recorded steps or noised clean samples.

Given x_t and x_{t+1}, the steps of a trajectory are independent, and so are noised samples. So any slice of the flattened
items can be a micro-batch.
"""

from fluvial.engines.sampling.items.noised import (
    NoisedSamples,
    Pairs,
    RenoisedSamples,
    make_noised_pairs,
    make_noised_samples,
    make_renoised_samples,
)
from fluvial.engines.sampling.items.steps import (
    LastSteps,
    RecordedSteps,
    Share,
    concatenate,
    last_steps,
    make_recorded_steps,
    rebalance,
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
    "make_noised_pairs",
    "make_noised_samples",
    "make_recorded_steps",
    "make_renoised_samples",
    "rebalance",
    "select",
    "transfers",
]
