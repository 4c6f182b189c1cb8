"""Distance of samples with a rollout's cache from samples without, and the operations that the cache saves."""

import time
from contextlib import nullcontext
from dataclasses import astuple, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fluvial.bench import harness
from fluvial.core.random import key
from fluvial.engines.data.records import as_prompts
from fluvial.engines.errors import no_effect
from fluvial.engines.named_models import MODELS
from fluvial.engines.sampling.generate import Guidance, Requests, Sampling, generate
from fluvial.models import load_adapter
from fluvial.models.flops import FlopCounter
from fluvial.models.prompt_layers import PromptKeys
from fluvial.models.step_cache import FirstBlockCache, GuidanceCache, NoCache, StepCacheChoice

FIRST_BLOCK = (FirstBlockCache(threshold, order) for order in (0, 1, 2) for threshold in (0.05, 0.1, 0.2))
CACHES: tuple[StepCacheChoice, ...] = (NoCache(), *FIRST_BLOCK, *map(GuidanceCache, (2, 3, 5)))
# An edit of a random network of the class: width, layers, and tokens of the text and on each side of image and sample.
WIDTH, LAYERS, TEXT, SIDE, LATENT, SAMPLES = 128, 4, 64, 16, 4, 2


@dataclass(frozen=True)
class CachesConfig:
    """Compare guided, deterministic samples with a cache to those without.

    Args:
        model: built-in model, for the pixels of step caches; or edits: a random network of Qwen-Image 2.1, for latents, and
            CPU seconds in turn, with the prompt's keys and values kept.
        steps: numbers of steps.
        runs: number of timed runs of edits.
    """

    model: Literal["handwriting", "words", "edits"] = "handwriting"
    steps: tuple[int, ...] = (10, 20, 40)
    runs: int = 9

    def __post_init__(self) -> None:
        if self.model != "edits" and self.runs != CachesConfig.runs:
            raise no_effect("runs", f"with `model` {self.model}, which is not timed")


def run(config: CachesConfig) -> list[dict[str, str]]:
    """Print a Markdown table with a row per number of steps and cache."""
    if config.model == "edits":
        rows = [row for steps in config.steps for row in _measure_edit(steps, config.runs)]
    else:
        rows = _measure_step_caches(config)
    print(harness.format_markdown(rows))
    return rows


def _measure_step_caches(config: CachesConfig) -> list[dict[str, str]]:
    """Return the rows of step caches of a built-in model."""
    model: Any = load_adapter(MODELS[config.model].model)
    prompts, module, shape = MODELS[config.model].prompts, model.build().eval(), model.latent_shape()
    requests, rows = Requests(as_prompts(prompts), range(len(prompts)), key(0)), list[dict[str, str]]()
    for steps in config.steps:
        sampling, whole = Sampling(shape, model.schedule(steps, shape), Guidance(4.5)), None
        for cache in CACHES:
            with FlopCounter() as counter:
                (chunk,) = generate(model, module, requests, replace(sampling, step_cache=cache), micro_batch=len(prompts))
            whole = whole or (chunk.images, counter.model)
            difference = (chunk.images - whole[0]).abs()
            name = " ".join([cache.kind, *map(str, astuple(cache))])
            numbers = {"operations": counter.model / whole[1], "mean": difference.mean().item()}
            numbers["most"] = difference.max().item()
            rows.append({"steps": str(steps), "cache": name} | {each: f"{value:.4f}" for each, value in numbers.items()})
    return rows


@torch.no_grad()
def _measure_edit(steps: int, runs: int) -> list[dict[str, str]]:
    """Return the rows of an edit, whose prompt is a text and an image with as many tokens as the sample."""
    from fluvial.models.tiny.pipelines import build_network

    torch.manual_seed(0)
    settings = {"num_attention_heads": WIDTH // 32, "attention_head_dim": 32, "axes_dims_rope": (8, 12, 12)}
    network: Any = build_network("QwenImage21Transformer2DModel", num_layers=LAYERS, **settings).eval()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.1)
    image, start = torch.randn(2, SAMPLES, SIDE**2, LATENT).unbind()
    slots = torch.tensor([[False] * TEXT + [True] * (2 * SIDE**2 // 4)] * SAMPLES)  # each stands for four tokens
    prompt = torch.randn(SAMPLES, TEXT + SIDE**2 // 4, network.config.context_in_dim)
    inputs: dict[str, Any] = {"encoder_hidden_states": prompt, "img_shapes": [[(1, SIDE, SIDE)] * 2] * SAMPLES}

    def sample(*, keep: bool) -> Tensor:
        x, keys = start, PromptKeys(network) if keep else None
        for step in range(steps):
            level = torch.full((SAMPLES,), 1 - step / steps)
            with nullcontext() if keys is None else keys.prediction():
                both = torch.cat([image, x], dim=1)
                out = network(hidden_states=both, timestep=level, img_mask=slots, return_dict=False, **inputs)[0]
            x = x - out[:, -x.shape[1] :] / steps
        return x

    seconds: dict[bool, list[float]] = {False: [], True: []}
    for run in range(runs + 1):  # the first is the warm-up
        for keep in (False, True)[:: 1 if run % 2 else -1]:
            begun = time.process_time()
            sample(keep=keep)
            seconds[keep].append(time.process_time() - begun)
    rows, whole = list[dict[str, str]](), None
    for keep, name in ((False, "none"), (True, "keys")):
        with FlopCounter() as counter:
            samples = sample(keep=keep)
        whole = whole or (samples, counter.model)
        difference = (samples - whole[0]).abs()
        low, middle, high = harness.compute_spread(torch.tensor(seconds[keep][1:], dtype=torch.float64))
        numbers = {"operations": counter.model / whole[1], "mean": difference.mean().item()}
        numbers["most"] = difference.max().item()
        shown = {each: f"{value:.4f}" for each, value in numbers.items()}
        rows.append({"steps": str(steps), "cache": name, **shown, "CPU seconds": f"{middle:.2f} ({low:.2f} to {high:.2f})"})
    return rows
