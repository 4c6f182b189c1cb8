"""Jobs in Python: a model, prompts or their records, and functions are enough; what is wrong is one line."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers.refusals import fails, refuses
from torch import Tensor, nn

from fluvial.engines.data.records import Prompt, as_prompts, split_scores, texts
from fluvial.engines.engine.world import init_world
from fluvial.engines.errors import UsageError
from fluvial.engines.run import recipes, train
from fluvial.engines.run.config import with_values
from fluvial.engines.run.evaluation.evaluate import evaluate
from fluvial.engines.run.job import Job, build_job
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.generate import NO_GUIDANCE, Guidance
from fluvial.engines.sampling.samplers import Stochastic
from fluvial.engines.scoring.runner import RewardRunners
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
    refuses(f"job: {says}", Job, **{**values, **changes})


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
        fails(f"reward 'it' returned {says}", trainer.update)
        fails(f"evaluator 'it' returned {says}", trainer.evaluate, 2)


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
        refuses(r"^rewards has .*Job\(model, prompts=\[\.\.\.\]", with_values, config, {"rewards": value})
    refuses(
        r"prompts file a cat cannot be read.*Job\(model, prompts=\[\.\.\.\]\)",
        train,
        with_values(config, {"prompts": ("a cat",)}),
    )
    with pytest.raises(UsageError, match=r"job: model is owner/name, and the run is for handwriting: .*recipes\.grpo"):
        train(config, Job("owner/name", prompts=["a", "b"], rewards=len))  # type: ignore[arg-type]


PROMPTS = [
    Prompt("0", tag="even", source="a", metadata={"goal": 3}),
    Prompt("1", tag="odd", source="a", metadata={"goal": 5}),
    Prompt("2", source="b"),
]
ODE = SamplingConfig(prompts=4, group=2, steps=tiny.STEPS, sampler=Stochastic(eta=0.5))


def goals(images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
    """Return the number in the record of each image's prompt."""
    return torch.tensor([float(record.get("goal", 0)) for record in metadata]) + 1e-3 * images.mean((1, 2, 3)).cpu()


def job(**changes: Any) -> Job:
    return tiny.job(**{"prompts": PROMPTS, "rewards": goals, "source_weights": {"a": 3.0}, **changes})


def test_metadata_reaches_the_reward_and_metrics_are_split(tmp_path: Path) -> None:
    """Each image is scored with the record of its own prompt; means are per source and per tag."""
    with Trainer(tiny.config(tmp_path, sampling=ODE), job()) as trainer:
        record = trainer.update()
    sources, tags = record["sources"], record["tags"]
    assert {name: part["samples"] for name, part in sources.items()} == {"a": 6, "b": 2}
    assert tags["even"]["reward"] == pytest.approx(3, abs=0.01)
    assert tags["odd"]["reward"] == pytest.approx(5, abs=0.01)
    assert sources["b"]["reward"] == pytest.approx(0, abs=0.01)
    whole = sum(part["reward"] * part["samples"] for part in sources.values()) / 8
    assert record["reward"]["mean"] == pytest.approx(whole, rel=1e-5)


def test_an_evaluation_is_split_too() -> None:
    """By the held-out prompts' own tags, with the records for evaluators."""
    held = [Prompt("4", tag="even", metadata={"goal": 2}), Prompt("5", tag="odd", metadata={"goal": 7})]
    made = job(heldout=held, evaluators={"goal": goals})
    options: dict[str, Any] = {"schedule": made.model.schedule(2, tiny.SHAPE), "samples": 16, "micro_batch": 4}
    with init_world() as world:
        result = evaluate(made, made.model.build(), world=world, **options)
    assert set(result.split) == {"tags"}
    assert result.split["tags"]["odd"]["goal"] == pytest.approx(7, abs=0.01)
    assert result.split["tags"]["even"]["goal"] == pytest.approx(2, abs=0.01)
    assert sum(part["samples"] for part in result.split["tags"].values()) == 16


def test_a_mean_is_over_the_samples_of_its_label() -> None:
    """A single source and missing tags say nothing."""
    scores = torch.tensor([[1.0, 10.0], [3.0, 30.0], [8.0, 80.0]])
    prompts = [Prompt("x", tag="t"), Prompt("y", tag="t"), Prompt("z")]
    assert split_scores(scores, prompts, ["s", "l"]) == {"tags": {"t": {"s": 2.0, "l": 20.0, "samples": 2}}}
    assert split_scores(scores, as_prompts(["x", "y", "z"]), ["s", "l"]) == {}


def test_prompts_come_in_epochs(tmp_path: Path) -> None:
    """However many are asked for at once."""
    config, seen = tiny.config(tmp_path, sampling=replace(ODE, prompts=2), updates=6), []
    plain = tiny.job(prompts=("0", "1", "2", "3"))
    with Trainer(config, plain) as trainer:
        for _ in range(6):
            seen.append(trainer.sampler.choose_prompts(torch.empty(0), trainer.engine.updates))  # type: ignore[arg-type]
            trainer.update()
    for epoch in (0, 2, 4):
        assert sorted(texts(seen[epoch] + seen[epoch + 1])) == ["0", "1", "2", "3"]


def test_negative_prompts_of_records_take_part_in_guidance() -> None:
    """Each sample is guided away from its own, or else from the run's."""
    guided = Guidance(scale=2.0, negative="3").encode(tiny.Tiny(), [Prompt("0", negative="2"), Prompt("1")])
    assert torch.equal(guided.uncond.rows, tiny.Tiny().encode(["2", "3"]).rows)
    assert torch.equal(NO_GUIDANCE.encode(tiny.Tiny(), [Prompt("1")]).rows, tiny.Tiny().encode(["1"]).rows)


def test_a_signature_is_read_once_and_metadata_may_be_optional() -> None:
    """As flow_grpo's rewards take it; a reward that keeps all arguments in one is called with two."""
    seen = []

    def optional(images: Tensor, prompts: Sequence[str], metadata: Any = None, only_strict: bool = True) -> list[float]:
        seen.append(metadata)
        return [0.0] * len(prompts)

    def any_arguments(*args: Any, **kwargs: Any) -> list[float]:
        seen.append((len(args), kwargs))
        return [0.0] * len(args[1])

    runners = RewardRunners({"optional": (optional, 1.0), "any": (any_arguments, 1.0)})
    runners.submit(torch.zeros(2, 1, 2, 2), [PROMPTS[0], Prompt("text")])
    runners.collect()
    runners.close()
    assert [{"goal": 3}, {}] in seen
    assert (2, {}) in seen


def test_records_of_codes_train_the_built_in_model(tmp_path: Path) -> None:
    """A .jsonl is never text: its prompts are those of the column."""
    (tmp_path / "codes.jsonl").write_text(
        "".join(json.dumps({"prompt": code, "goal": 1}) + "\n" for code in ("1234", "5678"))
    )
    found = build_job("handwriting", prompts=(f"{tmp_path / 'codes.jsonl'}=2",))
    assert texts(found.prompts) == ["1234", "5678"]
    assert found.source_weights == {"codes": 2.0}
    assert isinstance(found.prompts[0], Prompt)
    assert found.prompts[0].metadata == {"goal": 1}
