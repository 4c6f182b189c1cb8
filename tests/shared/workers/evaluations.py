"""Evaluates the tiny job on each rank, for tests/engines/run/evaluation/test_evaluate.py."""

from typing import Any

from helpers import tiny_jobs as tiny

from fluvial.engines.data.records import Prompt, texts
from fluvial.engines.engine.world import World
from fluvial.engines.run.evaluation.evaluate import evaluate
from fluvial.engines.run.evaluation.table import rows

TAGGED = [Prompt("0", tag="even", source="a"), Prompt("1", tag="odd", source="a"), Prompt("2", tag="even", source="b")]


def two(world: World) -> dict[str, Any]:
    """Return the scores, the rows, the first images and the names of the images that this rank kept."""
    kept: list[str] = []
    evaluators = {"bright": tiny.brightness, "passes": lambda images, prompts: [float(p == "0") for p in prompts]}
    job = tiny.job(heldout=TAGGED, evaluators=evaluators)
    found = evaluate(
        job,
        job.model.build(),
        samples=None,
        seeds=3,
        micro_batch=2,
        world=world,
        schedule=job.model.schedule(2, tiny.SHAPE),
        keep=lambda names, images: kept.extend(names),
    )
    return {
        "values": found.scores.values.tolist(),
        "score": found.score,
        "split": found.split,
        "kept": kept,
        "rows": [vars(row) for row in rows(found.scores)],
        "images": (found.images * 255).round().tolist(),
        "prompts": texts(found.prompts),
    }
