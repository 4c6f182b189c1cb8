"""Evaluates the tiny job, in the test process or on each rank, for tests/engines/run/evaluation/test_evaluate.py."""

from typing import Any

from helpers import tiny_jobs as tiny
from torch import Tensor

from fluvial.engines.data.records import Prompt, texts
from fluvial.engines.engine.world import World
from fluvial.engines.run.evaluation.evaluate import Evaluation, evaluate
from fluvial.engines.run.evaluation.table import list_rows

TAGGED = [Prompt("0", tag="even", source="a"), Prompt("1", tag="odd", source="a"), Prompt("2", tag="even", source="b")]


def found(world: World, prompts: Any = TAGGED, **options: Any) -> Evaluation:
    """Return an evaluation of the tiny job with two evaluators, one of which passes or fails."""
    job = tiny.job(heldout=prompts, evaluators={"bright": tiny.brightness, "passes": passes})
    values: dict[str, Any] = {"samples": None, "seeds": 2, "micro_batch": 2, "schedule": job.model.schedule(2, tiny.SHAPE)}
    return evaluate(job, options.pop("module", job.model.build()), world=world, **{**values, **options})


def passes(images: Tensor, prompts: Any) -> list[float]:
    """Pass every image of the prompt 0, and no other."""
    return [float(prompt == "0") for prompt in prompts]


def three_seeds(world: World) -> dict[str, Any]:
    """Return the scores, the rows, the first images and the names of the images that this rank kept."""
    kept: list[str] = []
    result = found(world, seeds=3, keep=lambda names, images: kept.extend(names))
    return {
        "values": result.scores.values.tolist(),
        "score": result.score,
        "split": result.split,
        "rows": [vars(row) for row in list_rows(result.scores)],
        "images": (result.images * 255).round().tolist(),
        "prompts": texts(result.prompts),
        "kept": kept,
    }
