"""Presets of a number of GPUs: a run with the published hyper-parameters of each sample, and fewer groups per rollout."""

import re
from dataclasses import replace

from fluvial.engines.errors import UsageError, no_effect
from fluvial.engines.named_models import MODELS
from fluvial.engines.run.config import TrainConfig, with_values

# Groups per GPU and rollout, as in flow_grpo's own runs of 4 GPUs (sd3.5-medium/ocr-4gpu: 16 groups) and of one
# (wan2.1-t2v-1.3b/ocr: 4).
GROUPS = 4


def on_gpus(config: TrainConfig, preset: str) -> tuple[TrainConfig, str]:
    """Return a run with at most `GROUPS` groups per GPU, whose micro-batch is found by trial, and what changes, in words.

    Args:
        config: run as a recipe or a published run describes it.
        preset: number of GPUs, as in 1gpu or 8gpu.

    Raises:
        UsageError: the preset is no such number, or the run has no published rollout.
    """
    found = re.fullmatch(r"([1-9][0-9]{0,4})gpus?", preset)
    if found is None:
        raise UsageError("preset", preset, "a number of GPUs, such as 1gpu or 8gpu")
    if config.model in MODELS:
        raise no_effect("preset", f"with {config.model}, whose settings were found on a CPU")
    if not config.makes_samples:
        raise no_effect("preset", "with a method that makes no samples")
    published = config.method.sampling
    groups = min(published.prompts, max(GROUPS * int(found[1]), config.method.passes.minibatches))
    changes = [f"sampling.prompts {groups} in place of {published.prompts}"] if groups != published.prompts else []
    changes += [] if config.micro_batch == "auto" else [f"micro_batch auto in place of {config.micro_batch}"]
    said = f"--preset {preset}: {', '.join(changes) or 'nothing changes'}; a rollout has {groups * published.group} samples"
    if groups != published.prompts:
        said += f", published {published.batch}; every other setting stays"
    return replace(with_values(config, {"sampling.prompts": groups}), micro_batch="auto"), said
