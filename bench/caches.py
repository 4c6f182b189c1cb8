"""How far samples with a step cache are from those of whole steps, and how many operations it leaves out."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from fluvial.bench import harness
from fluvial.core.random import key
from fluvial.engines.data.records import as_prompts
from fluvial.engines.named_models import MODELS
from fluvial.engines.sampling.generate import Guidance, Requests, Sampling, generate
from fluvial.models import load_adapter
from fluvial.models.flops import FlopCounter
from fluvial.models.step_cache import FirstBlockCache, GuidanceCache, NoCache, StepCacheChoice

CACHES: tuple[StepCacheChoice, ...] = (NoCache(), *map(FirstBlockCache, (0.05, 0.1, 0.2)), *map(GuidanceCache, (2, 3, 5)))


@dataclass(frozen=True)
class CachesConfig:
    """Compare the pixels of guided, deterministic samples with a step cache to those without.

    Args:
        model: built-in model.
        steps: numbers of steps.
    """

    model: Literal["handwriting", "words"] = "handwriting"
    steps: tuple[int, ...] = (10, 20, 40)


def run(config: CachesConfig) -> list[dict[str, str]]:
    """Print a row per number of steps and cache, as a table of Markdown."""
    model: Any = load_adapter(MODELS[config.model].model)
    prompts, module, shape = MODELS[config.model].prompts, model.build().eval(), model.latent_shape()
    requests, rows = Requests(as_prompts(prompts), range(len(prompts)), key(0)), list[dict[str, str]]()
    for steps in config.steps:
        sampling, whole = Sampling(shape, model.schedule(steps, shape), Guidance(4.5)), None
        for cache in CACHES:
            with FlopCounter() as counter:
                (chunk,) = generate(model, module, requests, replace(sampling, step_cache=cache), micro_batch=len(prompts))
            whole = whole or (chunk.images, counter.model)
            far = (chunk.images - whole[0]).abs()
            name = f"{cache.kind} {getattr(cache, 'threshold', getattr(cache, 'every', ''))}"
            found = {"operations": counter.model / whole[1], "mean": far.mean().item(), "most": far.max().item()}
            rows.append({"steps": str(steps), "cache": name} | {each: f"{value:.4f}" for each, value in found.items()})
    print(harness.markdown(rows))
    return rows
