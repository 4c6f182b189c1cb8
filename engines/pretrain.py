"""Supervised training of the built-in model's base weights: flow matching on random handwriting."""

import json
import time
from typing import Any, NamedTuple

import optree
import torch
from rich.console import Console
from torch import Tensor

from fluvial.core.flow_matching import interpolate, velocity_error
from fluvial.core.random import fold_in, key, normal, uniform
from fluvial.engines import jobs
from fluvial.engines.distributed import world
from fluvial.engines.errors import UsageError
from fluvial.engines.evaluate import evaluate
from fluvial.engines.export import export
from fluvial.engines.fsdp import Engine
from fluvial.engines.generate import sampling_grid, slots
from fluvial.engines.progress import RunProgress
from fluvial.engines.recipes import PretrainConfig
from fluvial.engines.runfolder import write_json
from fluvial.models import Cond
from fluvial.models.handwriting import Handwriting, codes, write
from fluvial.models.handwriting.model import SHIFT

PROMPTS, PICTURES, NOISE, LEVEL = range(4)  # streams of an update's randomness
RECORD = "made-by.json"


class Noised(NamedTuple):
    """Clean pictures and what they are noised with, each field `[P, ...]`."""

    x0: Tensor
    noise: Tensor
    sigma: Tensor
    cond: Cond


class ErrorInfo(NamedTuple):
    """Diagnostics of flow matching."""

    error: Tensor


def pretrain(config: PretrainConfig, *, console: Console | None = None) -> dict[str, Any]:
    """Train the handwriting model from random weights and write it to a folder, with a record of how it was made.

    Loss: mean |v(x_sigma, sigma) - (noise - x0)|^2 with x_sigma = (1 - sigma) x0 + sigma noise (arXiv 2210.02747), sigma
    uniform and then shifted as the sampling schedule is.

    Raises:
        UsageError: the folder already holds a model.
    """
    model = Handwriting(None, seed=config.seed)
    prompts, root = codes("train"), key(config.seed)
    with world() as processes:
        with processes.agreed():
            if (config.out / "config.json").exists():
                raise UsageError(f"{config.out} already holds a model: choose another folder with --out")
            try:
                config.out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"--out {config.out} cannot be made: {error.strerror}") from error
        console = console if processes.is_main else None
        module = model.build()
        engine = Engine(module, model.blocks(module), config.optimizer, processes, updates=config.updates)

        def loss(batch: Noised) -> tuple[Tensor, ErrorInfo]:
            x = interpolate(batch.x0, batch.noise, batch.sigma)
            error = velocity_error(model.velocity(module, x, batch.sigma, batch.cond), batch.noise - batch.x0)
            return error, ErrorInfo(error)

        with RunProgress(console, total=config.updates, every=50) as progress:
            for update in range(config.updates):
                start = time.perf_counter()
                keys = fold_in(root, update)
                places = (uniform(fold_in(keys, PROMPTS), (config.batch,)) * len(prompts)).long().tolist()
                chosen = [prompts[place] for place in places]
                x0 = write(fold_in(keys, PICTURES), chosen)
                u = uniform(fold_in(keys, LEVEL), (config.batch,))
                samples = fold_in(fold_in(keys, NOISE), torch.arange(config.batch))
                items = Noised(x0, normal(samples, x0.shape), SHIFT * u / (1 + (SHIFT - 1) * u), model.encode(chosen))
                ids, real = slots(config.batch, micro_batch=config.micro_batch, world=processes)
                mine = torch.tensor(ids)
                info = engine.update(
                    optree.tree_map(lambda tensor, mine=mine: tensor[mine].to(processes.device), items),
                    torch.tensor(real, dtype=torch.float32, device=processes.device),
                    loss,
                    count=config.batch,
                    micro_batch=config.micro_batch,
                    pad_to=len(ids),
                )
                progress.advance({"error": info.mean["error"]}, {"update": time.perf_counter() - start})
        with engine.inference(average=True) as sampled:
            result = evaluate(
                jobs.handwriting(),
                sampled,
                grid=sampling_grid(model, 10, device=processes.device),
                samples=1000,
                micro_batch=config.micro_batch,
                world=processes,
            )
        export(engine.module, config.out, average=engine.averaged(), world=processes)
        record = {
            "command": "fluvial pretrain handwriting",
            "updates": config.updates,
            "heldout_exact": result.exact,
            "heldout_score": result.score,
            "eval_samples": result.samples,
        }
        if processes.is_main:
            write_json(config.out / RECORD, record)
        progress.say(f"held-out codes exactly right: {json.dumps(result.exact)}; weights are in {config.out}")
        return record
