"""Pre-training of the built-in models on random handwriting, or on drawn words: flow matching, or denoising."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, NamedTuple

import optree
import torch
from rich.console import Console
from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.flow_matching import velocity_error
from fluvial.core.random import Key, fold_in, key, normal, uniform
from fluvial.engines.data.records import model_inputs, texts
from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.world import init_world
from fluvial.engines.errors import UsageError, convert_errors
from fluvial.engines.export.model_folder import export
from fluvial.engines.named_models import MODELS
from fluvial.engines.run import job as jobs
from fluvial.engines.run.evaluation.evaluate import evaluate
from fluvial.engines.run.log.progress import RunProgress
from fluvial.engines.run.process.heap import keep_freed_memory
from fluvial.engines.run.process.run_folder import write_json
from fluvial.engines.sampling.generate import assign_slots, move_schedule
from fluvial.engines.sampling.noising import add_noise
from fluvial.engines.streams import Stream
from fluvial.models import Cond, DiffusionModel, Prediction

RECORD = "made-by.json"


@dataclass(frozen=True)
class PretrainConfig:
    """Supervised training of a built-in model's base weights.

    Args:
        out: Folder for the weights.
        model: Model to train: handwriting, words or edit-words (transformers, by flow matching; the last starts from the
            weights of words) or handwriting-unet (a UNet, by denoising).
        seed: Random seed.
        updates: Number of optimizer updates; few, so that there is something left to learn.
        batch: Number of images per update.
        micro_batch: Number of images per forward pass.
        errors: Probability that a character of an image is random instead of the caption's, as captions of web images are
            not always correct. The model then misspells, which is left to learn.
        eval_samples: Number of samples of the evaluation at the end.
        dtype: Dtype of the written weights.
        optimizer: Optimizer and its schedule.
    """

    out: Path
    model: Literal["handwriting", "handwriting-unet", "words", "edit-words"] = "handwriting"
    seed: int = 0
    updates: int = 400
    batch: int = 64
    micro_batch: int = 64
    errors: float = 0.0
    eval_samples: int = 1000
    dtype: Literal["float32", "float16"] = "float32"
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-3, ema_decay=0.9))

    def __post_init__(self) -> None:
        count = (1, 2**31)
        bounds = {"updates": count, "batch": count, "micro_batch": count, "eval_samples": count}
        check_fields(self, "", errors=(0, 1), seed=(0, 2**63 - 1), **bounds)


def handwriting_pretraining(out: Path = Path("runs/handwriting-base")) -> PretrainConfig:
    """Train the transformer by flow matching on images of random training codes, as its shipped weights were."""
    return PretrainConfig(out=out)


def handwriting_unet_pretraining(out: Path = Path("runs/handwriting-unet-base")) -> PretrainConfig:
    """Train the UNet by denoising images of random training codes, as its shipped weights were."""
    return PretrainConfig(out=out, model="handwriting-unet", updates=450)


def words_pretraining(out: Path = Path("runs/words-base")) -> PretrainConfig:
    """Train the transformer by flow matching on drawn training words, as its shipped weights were."""
    optimizer = OptimizerConfig(lr=4e-3, schedule="cosine", warmup=50, min_lr_ratio=0.05, ema_decay=0.99)
    return PretrainConfig(
        out=out, model="words", updates=2200, errors=0.12, eval_samples=350, dtype="float16", optimizer=optimizer
    )


def edit_words_pretraining(out: Path = Path("runs/edit-words-base")) -> PretrainConfig:
    """Train the words transformer to correct a wrong letter of an image, from its weights, as the shipped weights were."""
    config = words_pretraining(out)
    return replace(config, model="edit-words", updates=1000, optimizer=replace(config.optimizer, lr=2e-3))


RECIPES = {
    "handwriting": handwriting_pretraining,
    "handwriting-unet": handwriting_unet_pretraining,
    "words": words_pretraining,
    "edit-words": edit_words_pretraining,
}


class Noised(NamedTuple):
    """Clean images, their noise and conditioning, each field `[P, ...]`."""

    x0: Tensor
    noise: Tensor
    level: Tensor  # sigma, or alpha_bar for an epsilon-prediction model
    cond: Cond


class PretrainInfo(NamedTuple):
    """Diagnostics per image."""

    error: Tensor


def pretrain(config: PretrainConfig, *, console: Console | None = None) -> dict[str, Any]:
    """Train a built-in model from random weights, and write it to a folder with a record of the command.

    The loss is mean |v - target|^2, as in supervised fine-tuning, at levels of `compute_levels`.

    Raises:
        UsageError: the folder already holds a model, or a package that the evaluation needs is not installed.
    """
    keep_freed_memory()
    job = jobs.build_job(config.model)
    assert job.data is not None, "built-in models have data"
    model: DiffusionModel = resolve_name(MODELS[config.model].model)(None, seed=config.seed)  # with its initial weights
    prompts, write, root = job.prompts, job.data, key(config.seed)
    letters = sorted(set("".join(texts(prompts))))
    with init_world() as world:
        with world.agreed():
            if (config.out / "config.json").exists():
                raise UsageError(f"{config.out} already holds a model: set `out` to another folder")
            with convert_errors(UsageError, OSError, says=f"`out` is {config.out}, which cannot be made"):
                config.out.mkdir(parents=True, exist_ok=True)
        console = console if world.is_main else None
        module = model.build()
        engine = Engine(module, model.blocks(module), config.optimizer, world, updates=config.updates)

        def loss(batch: Noised) -> tuple[Tensor, PretrainInfo]:
            x, target = add_noise(batch.x0, batch.noise, batch.level, prediction=model.prediction)
            error = velocity_error(model.predict(module, x, batch.level, batch.cond), target)
            return error, PretrainInfo(error)

        with RunProgress(console, total=config.updates, every=50) as progress:
            progress.begin(0)
            for update in range(config.updates):
                start = time.perf_counter()
                keys = fold_in(root, update)
                indices = (uniform(fold_in(keys, Stream.PRETRAIN_PROMPTS), (config.batch,)) * len(prompts)).long().tolist()
                chosen = [prompts[index] for index in indices]
                drawn = misspell(fold_in(keys, Stream.PRETRAIN_ERRORS), texts(chosen), config.errors, letters)
                shown = [replace(prompt, text=text) for prompt, text in zip(chosen, drawn, strict=True)]
                x0 = write(fold_in(keys, Stream.PRETRAIN_IMAGES), shown)
                u = uniform(fold_in(keys, Stream.PRETRAIN_LEVELS), (config.batch,))
                samples = fold_in(fold_in(keys, Stream.PRETRAIN_NOISE), torch.arange(config.batch))
                cond = model.encode(model_inputs(chosen))
                items = Noised(x0, normal(samples, x0.shape), compute_levels(u, model.prediction), cond)
                ids, real = assign_slots(config.batch, micro_batch=config.micro_batch, world=world)
                mine = torch.tensor(ids)
                info = engine.update(
                    optree.tree_map(lambda tensor, mine=mine: tensor[mine].to(world.device), items),
                    loss,
                    torch.tensor(real, dtype=torch.float32, device=world.device),
                    count=config.batch,
                    micro_batch=config.micro_batch,
                    pad_to=len(ids),
                )
                progress.advance({"error": info.mean["error"]}, {"update": time.perf_counter() - start})
        with engine.inference(average=True) as sampled:
            result = evaluate(
                job,
                sampled,
                schedule=move_schedule(model.schedule(10, job.shape), world.device),
                samples=config.eval_samples,
                micro_batch=config.micro_batch,
                world=world,
            )
        export(engine.module, config.out, average=engine.read_average(), dtype=getattr(torch, config.dtype), world=world)
        record = {
            "command": f"python -P -m fluvial.bench pretrain-{config.model}",
            "updates": config.updates,
            "heldout_exact": result.exact,
            "heldout_score": result.score,
            "eval_samples": result.samples,
        }
        if world.is_main:
            write_json(config.out / RECORD, record)
        progress.say(f"held-out prompts exactly right: {json.dumps(result.exact)}; weights are in {config.out}")
        return record


def misspell(key: Key, prompts: Sequence[str], rate: float, letters: Sequence[str]) -> list[str]:
    """Replace each character of prompts independently, with a probability, by a random letter.

    Args:
        key: key of the draws; those of a prompt depend only on its index.
        rate: probability of a replacement, in [0, 1], possibly by the same letter.
        letters: letters to draw from, uniformly.
    """
    longest = max(map(len, prompts), default=0)
    draws = uniform(fold_in(key, torch.arange(len(prompts))), (len(prompts), longest, 2)).tolist()
    return [
        "".join(
            letters[int(which * len(letters))] if whether < rate else letter
            for letter, (whether, which) in zip(prompt, numbers, strict=False)
        )
        for prompt, numbers in zip(prompts, draws, strict=True)
    ]


def compute_levels(u: Tensor, prediction: Prediction) -> Tensor:
    """Compute noise levels `[B]` from uniform numbers u `[B]` in [0, 1).

    For a flow they are sigma, shifted like the sampling schedule; for an epsilon-prediction model alpha_bar of a uniformly
    drawn timestep.
    """
    from fluvial.models.handwriting.model import compute_alphas_cumprod
    from fluvial.models.pixel_model import SHIFT

    if prediction == "velocity":
        return SHIFT * u / (1 + (SHIFT - 1) * u)
    powers = compute_alphas_cumprod(u.device)
    return powers[(u * len(powers)).long()]
