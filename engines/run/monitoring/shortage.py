"""The line of a run that is out of memory: in which phase, what holds the most, and which settings lower it."""

from collections.abc import Iterable

from torch import Tensor

from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.shards import local
from fluvial.engines.errors import RunError, out_of_memory

ACTIVATIONS = "activations"
OF_PHASE = {
    "rollout": "`engine.micro_batch`, `pipeline.vae_tile` or `pipeline.vae_offload`",
    "reward": "the rewards' option device=cpu, `engine.micro_batch` or `engine.offload` phases",
    "update": "`engine.update_micro_batch`, `engine.micro_batch` or `engine.checkpointing` block",
    "evaluation": "`evaluation.micro_batch`, `engine.micro_batch` or `pipeline.vae_tile`",
}
OF_PART = {
    "weights": "`engine.base` int8 or nf4 with `train` lora, `engine.offload` always, or more ranks",
    "gradients": "`train` lora, `engine.offload` always, or more ranks",
    "optimizer state": "`optimizer.name` adamw8bit, `train` lora, `engine.offload` phases, or more ranks",
    "moving average": "`optimizer.ema_decay` 0, `train` lora, `engine.offload` phases, or more ranks",
}


def explain(error: BaseException, phase: str, engine: Engine) -> RunError:
    """Return the error of a run whose device, or host, is out of memory in a phase."""
    peak = engine.world.peak_memory()[0]
    held = hold(engine)
    held[ACTIVATIONS] = max(peak - sum(held.values()), 0.0)  # and what else has no name here
    largest = max(held, key=lambda name: held[name])
    lower = OF_PHASE.get(phase, OF_PHASE["rollout"]) if largest == ACTIVATIONS else OF_PART[largest]
    share = f"{held[largest] / 2**30:.2f} of {peak / 2**30:.2f} GiB"
    return RunError(f"{out_of_memory(error)} in the phase {phase}: {largest} hold the most ({share}); lower it by {lower}")


def hold(engine: Engine) -> dict[str, float]:
    """Return the bytes that this rank holds of each part of the engine."""
    parameters = [*engine.module.parameters()]
    states = engine.optimizer.state.values()
    return {
        "weights": _bytes(parameters),
        "gradients": _bytes(p.grad for p in parameters if p.grad is not None),
        "optimizer state": _bytes(value for state in states for value in state.values() if isinstance(value, Tensor)),
        "moving average": _bytes(engine.average.values()),
    }


def _bytes(tensors: Iterable[Tensor]) -> float:
    return float(sum(local(tensor).nbytes for tensor in tensors))
