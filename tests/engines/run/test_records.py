"""Prompt records in a run: what reaches the rewards, how metrics are split, which prompts come when."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from torch import Tensor

from fluvial.engines.data.records import Prompt, as_prompts, split_scores, texts
from fluvial.engines.engine.world import World
from fluvial.engines.run.evaluation.evaluate import evaluate
from fluvial.engines.run.job import Job, handwriting
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.generate import NO_GUIDANCE, Guidance
from fluvial.engines.sampling.samplers import Stochastic
from fluvial.engines.scoring.runner import RewardRunners

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


def test_metadata_reaches_the_reward_and_metrics_are_split(tmp_path: Path, one: World) -> None:
    """Each image is scored with the record of its own prompt; means are per source and per tag."""
    with Trainer(tiny.config(tmp_path, sampling=ODE), job(), one) as trainer:
        record = trainer.update()
    sources, tags = record["sources"], record["tags"]
    assert {name: part["samples"] for name, part in sources.items()} == {"a": 6, "b": 2}
    assert tags["even"]["reward"] == pytest.approx(3, abs=0.01)
    assert tags["odd"]["reward"] == pytest.approx(5, abs=0.01)
    assert sources["b"]["reward"] == pytest.approx(0, abs=0.01)
    whole = sum(part["reward"] * part["samples"] for part in sources.values()) / 8
    assert record["reward"]["mean"] == pytest.approx(whole, rel=1e-5)


def test_an_evaluation_is_split_too(one: World) -> None:
    """By the held-out prompts' own tags, with the records for evaluators."""
    held = [Prompt("4", tag="even", metadata={"goal": 2}), Prompt("5", tag="odd", metadata={"goal": 7})]
    made = job(heldout=held, evaluators={"goal": goals})
    result = evaluate(
        made, made.model.build(), schedule=made.model.schedule(2, tiny.SHAPE), samples=16, micro_batch=4, world=one
    )
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


def test_prompts_come_in_epochs(tmp_path: Path, one: World) -> None:
    """However many are asked for at once."""
    config, seen = tiny.config(tmp_path, sampling=replace(ODE, prompts=2), updates=6), []
    plain = tiny.job(prompts=("0", "1", "2", "3"))
    with Trainer(config, plain, one) as trainer:
        for _ in range(6):
            seen.append(trainer.sampler.prompts(torch.empty(0), trainer.engine.updates))  # type: ignore[arg-type]
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
    found = handwriting(prompts=(f"{tmp_path / 'codes.jsonl'}=2",))
    assert texts(found.prompts) == ["1234", "5678"]
    assert found.source_weights == {"codes": 2.0}
    assert isinstance(found.prompts[0], Prompt)
    assert found.prompts[0].metadata == {"goal": 1}
