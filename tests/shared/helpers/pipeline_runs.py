"""Runs of tiny pipelines from the command line: their flags, their images, and what their records promise."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers import launch, tiny_pipelines, tiny_replayed
from PIL import Image

# Two updates of two samples per pass, without evaluations in between.
TWO_UPDATES = [
    *("--micro-batch", "2", "--update-micro-batch", "rollout", "--updates", "2", "--passes.minibatches", "1"),
    *("--final-samples", "2", "--evaluation.every", "0", "--checkpoint.every", "2"),
]


LEVELS = ("--noising.levels", "schedule", "--noising.each", "2")
RECIPES = {
    **dict.fromkeys(("nft", "raft", "dpo"), ("--noising.each", "2")),
    "ddpo": ("--sampling.window", "random", "--sampling.window.size", "1", "--sampling.window.high", "2"),
}


def save(folder: Path, name: str) -> Path:
    """Return the folder of a tiny pipeline, with an adapter or without, which is written if it is not there."""
    if not (folder / name).exists():
        if name in tiny_pipelines.ROWS:
            tiny_pipelines.save(tiny_pipelines.ROWS[name], folder / name)
        else:
            tiny_replayed.load(name, folder / name)
    return folder / name


def words(folder: Path, name: str, recipe: str, *more: object) -> list[object]:
    """Return the command line of two updates of a recipe on a tiny pipeline of a folder, as small as it gets.

    Recipes that learn from samples have the folder's prompts and the reward jpeg, unless others are named.
    """
    found: list[object] = ["train", recipe, "--model", save(folder, name), *guidance(name), *TWO_UPDATES]
    found += [] if "--pipeline.sizes" in more else size(name)
    found += ["--sampling.prompts", 2, "--sampling.steps", 3, *RECIPES.get(recipe, ())]
    if recipe in ("grpo", "nft", "ddpo", "raft", "distill"):
        found += ["--sampling.group", 2] if recipe != "distill" else ["--sampling.group", 1]
        found += [] if "--prompts" in more or "--data" in more else ["--prompts", folder / "prompts.txt"]
        found += [] if "--rewards" in more or recipe == "distill" else ["--rewards", "jpeg"]
        found += ["--pipeline.text-cache", folder / "texts"]
    elif name in tiny_replayed.ROWS or name == "sdxl":
        found += LEVELS  # the only ones that they know
    return [*found, *more]


def size(name: str, *, is_image: bool = False) -> list[str]:
    """Return the flags that ask a pipeline, with an adapter or replayed, for its samples; images have one frame."""
    if name in tiny_pipelines.ROWS:
        height, width, *frames = tiny_pipelines.ROWS[name].sizes[0]
        more = ["--pipeline.frames", str(frames[0])] if frames and not is_image else []
    else:
        options = dict(tiny_replayed.ROWS[name].options)
        height, width, _ = (options.pop(option) for option in ("height", "width", "guidance_scale"))
        more = ["--pipeline.call", *(f"{option}={json.dumps(value)}" for option, value in options.items())]
    return ["--pipeline.height", str(height), "--pipeline.width", str(width), *more]


def guidance(name: str) -> list[str]:
    """Return the flags of a replayed pipeline's guidance, which is part of its call."""
    scale = None if name in tiny_pipelines.ROWS else tiny_replayed.ROWS[name].options["guidance_scale"]
    return [] if scale is None else ["--sampling.guidance.scale", str(scale)]


def photos(folder: Path, captions: Sequence[str], *sizes: tuple[int, int]) -> Path:
    """Write an image of noise for each caption, of the sizes in turn, with the caption beside it; return the folder."""
    folder.mkdir()
    for number, caption in enumerate(captions):
        Image.effect_noise(sizes[number % len(sizes)], 50 + number).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(caption)
    return folder


def updates(out: Path) -> list[dict[str, Any]]:
    """Return the records of a run's updates."""
    return [record for record in launch.records(out) if "grad_norm" in record]


def expect_on_policy(out: Path) -> None:
    """The updates of a run are on policy to the bit, and the first moves the weights."""
    found = updates(out)
    assert {record["first_pass_max_abs_log_ratio"] for record in found} == {0.0}  # files of equal sizes make no update
    assert found[0]["grad_norm"] > 0
