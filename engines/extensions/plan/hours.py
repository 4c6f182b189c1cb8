"""GPU hours of a run, computed from the operations of its network at an assumed share of a GPU's peak.

Text encoders, the VAE, rewards, evaluations and waits are not counted.
"""

from functools import cache
from typing import NamedTuple

import torch

from fluvial.engines.errors import UsageError, convert_errors
from fluvial.engines.extensions.plan.plan import build_on_meta, build_pass_shape, choose_size, find_transformer
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.declared import Trained
from fluvial.engines.run.method import RecordedRows
from fluvial.models.flops import FlopCounter
from fluvial.models.lora import LoraConfig
from fluvial.models.shapes import ModularShape, PassShape

PEAK = 989e12  # FLOP/s of an H100 SXM in dense bfloat16, by NVIDIA's data sheet
SHARE = 0.4  # assumed fraction of the peak


class RunFlops(NamedTuple):
    """Floating-point operations of a whole run."""

    rollouts: float
    updates: float

    @property
    def hours(self) -> float:
        """GPU hours at `SHARE` of `PEAK`."""
        return sum(self) / (PEAK * SHARE) / 3600

    def __str__(self) -> str:
        rollouts, updates = (f"{each / 1e18:.3g}" for each in self)
        total = f"rollouts {rollouts} EFLOP, updates {updates} EFLOP: about {self.hours:,.0f} GPU hours"
        return f"{total} at {SHARE:.0%} of an H100's {PEAK / 1e12:.0f} TFLOP/s (assumed)"


def count_run(config: TrainConfig, name: str) -> RunFlops:
    """Return the operations of a run of a model in the catalogue or in a folder.

    With f for a forward pass of a sample, b for a forward and backward pass, both including the two halves of guidance, and
    N other networks, L of them trained:

        rollouts = samples * steps * f    updates = pairs * (b + N f + L b)

    Raises:
        UsageError: the network's inputs are unknown.
    """
    method, model = config.method, find_transformer(name)
    sampling, rows, guided = method.sampling, method.rows, method.sampling.guidance.scale != 1
    shape = build_pass_shape(model, choose_size(model, config.pipeline), sampling.steps, guided=guided)
    with convert_errors(UsageError, ValueError, says=f"the operations of {name} cannot be counted"):
        forward, both = count_pass(name, config.train == "lora", config.lora, shape)
    halves = 2 if guided and not isinstance(model, ModularShape) else 1
    recorded = sampling.window.count(sampling.steps)
    each = rows.trained.count(recorded) if isinstance(rows, RecordedRows) else rows.noising.each
    samples = sampling.batch * config.updates / config.updates_per_rollout
    passes = samples * each * method.passes.updates / method.passes.minibatches * (2 if method.is_paired else 1)
    learners = sum(isinstance(network, Trained) for network in config.networks.values())
    rollouts = samples * sampling.steps * forward * halves if config.makes_samples else 0.0
    return RunFlops(rollouts, passes * halves * (both * (1 + learners) + forward * len(config.networks)))


@cache
def count_pass(name: str, adapts: bool, lora: LoraConfig, shape: PassShape) -> tuple[int, int]:
    """Return the operations of a forward pass of one sample, and of a forward and backward pass, on the meta device."""
    model, module = find_transformer(name), build_on_meta(name, "lora" if adapts else "full", lora)
    counted = []
    for grad in (False, True):
        with FlopCounter() as counter, torch.set_grad_enabled(grad):
            out = model.predict(module, 1, shape)
            if grad:
                trained = [p for p in module.parameters() if p.requires_grad]
                torch.autograd.grad(out.float().square().sum(), trained, allow_unused=True)
        counted.append(counter.model)
    return counted[0], counted[1]
