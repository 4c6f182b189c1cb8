"""A job as it is evaluated: with prompts, evaluators and a size of its own, and what cannot be had."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from helpers import tiny_jobs as tiny
from helpers.refusals import refuses

from fluvial.engines.data.records import Prompt, texts
from fluvial.engines.run import job as jobs
from fluvial.engines.run.evaluation.config import EvaluationConfig
from fluvial.engines.run.jobs.evaluated import build_evaluated, check_negatives, list_texts
from fluvial.engines.run.jobs.settings import PipelineConfig
from fluvial.engines.sampling.generate import NO_GUIDANCE, Guidance


class Recorded(tiny.Tiny):
    """A model without an adapter."""

    recorded = True


def asked(job: jobs.Job, **settings: Any) -> jobs.Job:
    """Return the job as it is evaluated."""
    return build_evaluated(job, EvaluationConfig(**settings), PipelineConfig())


def test_what_is_trained_on_stays(tmp_path: Path) -> None:
    """Prompts of the evaluation may even be trained on; they are encoded with the job's, and so are negative prompts."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "0", "tag": "even"}\n{"prompt": "5", "negative_prompt": ""}\n')
    job = replace(tiny.job(), heldout=(Prompt("4"),))
    found = asked(job, prompts=(str(tmp_path / "a.jsonl"),), rewards=("contrast", "heldout"))
    assert texts(found.heldout) == ["0", "5"]
    assert found.prompts == job.prompts
    assert dict(found.evaluators) == {"contrast": tiny.contrast, "heldout": tiny.brightness}
    own = texts([*job.prompts, *job.heldout])
    assert [*list_texts(job, found, NO_GUIDANCE)] == [*own, "5"]
    assert [*list_texts(job, found, Guidance(2.0, "dull"))] == [*own, "5", "dull", ""]
    assert asked(job) is job


def test_an_image_has_the_size_of_the_evaluation() -> None:
    """The side that is not given is the rollout's."""

    class Sized(tiny.Tiny):
        def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
            if height % 8:
                raise ValueError(f"the height is {height}, expected a multiple of 8")
            return (1, height, width)

    job = tiny.job(model=Sized())
    assert asked(job, height=64).shape == (1, 64, 512)
    assert asked(job, width=32, height=64).shape == (1, 64, 32)
    refuses(r"evaluation.height is 63 and evaluation.width is 512: the height is 63", asked, job, height=63)
    refuses("a model without adapter, which has only the size of the rollout", asked, tiny.job(model=Recorded()), width=64)
    refuses("has images of one size only", asked, jobs.handwriting(), height=64)


def test_what_is_not_there_is_named() -> None:
    """With the field, in one line."""
    for settings, says in (
        ({"rewards": ("nice",)}, "evaluation.rewards is 'nice', expected one of brightness, contrast, heldout"),
        ({"rewards": ("contrast", "contrast")}, "which names 'contrast' twice"),
        ({"prompts": ("nowhere.txt",)}, "nowhere.txt cannot be read"),
        ({"prompts": ("a.txt=2",)}, "evaluation.prompts gives a.txt a weight"),
        ({"rewards": ("jpeg=2",)}, "evaluation.rewards holds 'jpeg=2', and evaluators have no weights"),
        ({"seeds": 0}, "evaluation.seeds is 0"),
        ({"height": 0}, "evaluation.height is 0"),
        ({"solver": "heun"}, "evaluation.solver is 'heun'"),
    ):
        refuses(says, asked, tiny.job(), **settings)
    assert EvaluationConfig().count_samples(10, 1000) == 1000
    assert EvaluationConfig(seeds=4).count_samples(10, 1000) == 40


def test_a_negative_prompt_needs_guidance() -> None:
    check_negatives([Prompt("a", negative="b")], guided=True, field="guidance")
    check_negatives([Prompt("a")], guided=False, field="guidance")
    refuses(
        "no effect without guidance: set guidance, or remove the column",
        check_negatives,
        [Prompt("a", negative="b")],
        guided=False,
        field="guidance",
    )
