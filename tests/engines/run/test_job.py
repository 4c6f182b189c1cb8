"""Jobs in Python: a model, prompts and functions are enough; what is wrong is one line."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from torch import Tensor, nn

from fluvial.engines.data.records import as_prompts
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.run import recipes, train
from fluvial.engines.run.config import with_values
from fluvial.engines.run.job import Job
from fluvial.engines.run.trainer import Trainer
from fluvial.models.handwriting import Handwriting
from fluvial.models.tiny.pipelines import save


def bright(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Score images by their brightness."""
    return images.flatten(1).mean(1)


def test_defaults() -> None:
    """Every tenth prompt is held out, a function is a reward by its name, and a model of one size needs no shape."""
    codes = [f"{i:04d}" for i in range(20)]
    job = Job(model=Handwriting(), prompts=codes, rewards=bright)
    assert job.heldout == as_prompts(["0000", "0010"])
    assert len(job.prompts) == 18
    assert dict(job.rewards) == {"bright": bright}
    assert job.evaluators == {}
    assert job.shape == (1, 8, 32)
    assert replace(job, rewards={"it": bright}).heldout == job.heldout
    assert list(Job(Handwriting(), codes, lambda images, prompts: bright(images, prompts)).rewards) == ["reward"]


class Backwards(tiny.Tiny):
    """Its prediction does not take the samples."""

    def predict(self, module: nn.Module, level: Tensor) -> Tensor:  # type: ignore[override]
        """Return the levels."""
        return level


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": 3}, "model is an object of type int, which is not a DiffusionModel: it has no prediction, "),
        ({"model": Handwriting}, "model is the class Handwriting, expected an object of it"),
        ({"model": Backwards()}, r"model.predict has the signature \(module: .*, expected \(module, x, level, cond, "),
        ({"prompts": "0427"}, "prompts is of type str, expected a list of strings"),
        ({"prompts": Path("prompts.txt")}, "prompts is of type .*Path, expected a list of strings"),
        ({"prompts": ["0", {"prompt": "1"}]}, r"prompts\[1\] is of type dict, expected a string"),
        ({"heldout": [3]}, r"heldout\[0\] is of type int, expected a string"),
        ({"rewards": 3}, "rewards is of type int, expected a function, or functions by name"),
        ({"evaluators": [bright]}, "evaluators is of type list, expected a function"),
        ({"shape": None}, r"shape is missing: pass shape=model.latent_shape\(height, width\)"),
    ],
)
def test_what_is_wrong_with_an_argument(changes: dict[str, Any], says: str) -> None:
    """One line that names the argument."""
    values: dict[str, Any] = {"model": tiny.Tiny(), "prompts": ["0", "1"], "rewards": bright, "shape": tiny.SHAPE}
    with pytest.raises(UsageError, match=f"job: {says}") as error:
        Job(**{**values, **changes})
    assert "\n" not in str(error.value)


def own(**changes: Any) -> Job:
    """Return a job of the tiny model with a reward of one's own."""
    return replace(Job(tiny.Tiny(), tiny.PROMPTS, bright, heldout=tiny.HELDOUT, shape=tiny.SHAPE), **changes)


def test_a_reward_of_ones_own_trains(tmp_path: Path) -> None:
    """It is the reward, the evaluator too where there is no other, and the weights move."""
    with Trainer(tiny.config(tmp_path, updates=2), own()) as trainer:
        before = {name: tensor.clone() for name, tensor in trainer.engine.sharded.shards().items()}
        records = list(trainer)
        assert list(trainer.evaluate(8).score) == ["bright"]
        after = trainer.engine.sharded.shards()
        assert any(not torch.equal(before[name], after[name]) for name in before)
    assert [record["update"] for record in records] == [1, 2]
    assert all(0 < record["reward"]["mean"] < 1 for record in records)


@pytest.mark.parametrize(
    ("returned", "says"),
    [({"points": 1}, "a dict with the keys 'points'"), (None, "None"), (torch.ones(2, 1), r"shape \[2, 1\] for 2 images")],
)
def test_a_reward_that_returns_something_else_ends_in_one_line(tmp_path: Path, returned: Any, says: str) -> None:
    """In training and in evaluation, if it was right at first."""
    calls: list[int] = []

    def changing(images: torch.Tensor, prompts: Sequence[str]) -> Any:
        calls.append(len(prompts))
        return returned if len(calls) > 1 else [0.0] * len(prompts)

    with Trainer(tiny.config(tmp_path), own(rewards={"it": changing})) as trainer:
        with pytest.raises(RunError, match=f"reward 'it' returned {says}") as error:
            trainer.update()
        assert "\n" not in str(error.value)
        with pytest.raises(RunError, match=f"evaluator 'it' returned {says}"):
            trainer.evaluate(2)


@pytest.mark.long
def test_a_pipeline_trains_by_its_name_with_prompts_and_a_function(tmp_path: Path) -> None:
    """As the README shows it: the run opens the pipeline with its own settings, and evaluates with the reward."""
    save("StableDiffusion3Pipeline", tmp_path / "tiny")
    name = str(tmp_path / "tiny")
    job = Job(name, prompts=["a red fox", "two cats", "an owl"], rewards=lambda images, prompts: images.flatten(1).mean(1))
    small = {"updates": 2, "sampling.prompts": 2, "sampling.group": 2, "sampling.steps": 4, "engine.micro_batch": 2}
    sizes = {"pipeline.height": 32, "pipeline.width": 32, "evaluation.samples": 2, "evaluation.final_samples": 2}
    config = with_values(recipes.grpo(name), {"out": tmp_path / "run", **small, **sizes, "evaluation.every": 0})
    assert train(config, job)["updates"] == 2
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"] == name


def test_what_a_job_should_have_been_given_is_said_in_a_line(tmp_path: Path) -> None:
    """Functions and texts of prompts in the configuration, a name of another model, and one that there is not."""
    config = with_values(recipes.grpo(), {"out": tmp_path / "run"})
    assert with_values(config, {"rewards": "characters", "prompts": ["a.txt"]}).prompts == ("a.txt",)
    for value in ((len,), len, ("characters", len)):
        with pytest.raises(UsageError, match=r"^rewards has .*Job\(model, prompts=\[\.\.\.\]"):
            with_values(config, {"rewards": value})
    with pytest.raises(UsageError, match=r"prompts file a cat cannot be read.*Job\(model, prompts=\[\.\.\.\]\)"):
        train(with_values(config, {"prompts": ("a cat",)}))
    with pytest.raises(UsageError, match=r"job: model is owner/name, and the run is for handwriting: .*recipes\.grpo"):
        train(config, Job("owner/name", prompts=["a", "b"], rewards=len))  # type: ignore[arg-type]
