"""KTO on labels: of given images and of rewards, against the mean gain, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers.spied_runs import FAST, ODE, Spied

from fluvial.engines.data.records import Prompt
from fluvial.engines.engine.world import World
from fluvial.engines.methods import Kto
from fluvial.engines.sampling.noising import NoisingConfig

LABELS = {"0": 1, "1": 0, "2": True, "3": False}
GOOD = dict.fromkeys(LABELS, 1)


def run(one: World, tmp_path: Path, given: dict[str, Any], **changes: Any) -> Spied:
    prompts = tuple(Prompt(text, metadata={"label": label}) for text, label in given.items())
    settings = {"sampling": replace(ODE, prompts=4, group=1), "noising": NoisingConfig(1), "optimizer": FAST}
    settings |= {"method": Kto(beta=5.0), "train": "lora"}
    return Spied(tiny.config(tmp_path, updates=2, **{**settings, **changes}), one, tiny.job(prompts=prompts))


@pytest.mark.parametrize(("labels", "weights"), [(LABELS, (1.0, 1.0)), (LABELS, (1.0, 0.25)), (GOOD, (1.0, 1.0))])
def test_images_are_fitted_by_their_labels(
    one: World, tmp_path: Path, labels: dict[str, Any], weights: tuple[float, float]
) -> None:
    """Against the mean gain of the batch if it is above 0; the first update finds the policy to be the reference."""
    good, bad = weights
    spied = run(one, tmp_path, labels, good_weight=good, bad_weight=bad)
    assert spied.rollout()["loss"] == pytest.approx(sum(good if label else bad for label in labels.values()) / 8)
    items = spied.updates[0].items
    assert sorted(items.signal.tolist()) == sorted(1.0 if label else -1.0 for label in labels.values())
    assert items.context.eq(0).all()
    batches = list[Any]()
    read = spied.trainer.sampler.read_data
    spied.trainer.sampler.read_data = lambda *given: batches.append(read(*given)) or batches[-1]  # type: ignore
    spied.rollout()
    spied.prompts = [prompt.text for prompt in batches[0].prompts]
    items, policy = spied.updates[1].items, spied.updates[1].policy
    for name, tensor in spied.trainer.engine.sharded.shards().items():
        tensor.copy_(policy[name])
    with torch.no_grad():
        v = spied.velocity(items)
    gain = ((items.predictions["ref"] - items.target) ** 2 - (v - items.target) ** 2).mean((1, 2, 3))
    baseline = gain.mean().clamp(min=0)
    assert (baseline > 0) == (labels is GOOD)
    torch.testing.assert_close(items.context, baseline.expand(len(gain)))
    losses = torch.sigmoid(-items.signal * 5 * (gain - baseline)) * torch.where(items.signal > 0, good, bad)
    assert spied.infos[1].loss == pytest.approx(float(losses.mean()), rel=1e-4)


def test_rewards_are_labels(one: World, tmp_path: Path) -> None:
    """Those above the mean of their group are good; a group of equal rewards has none."""
    spied = run(one, tmp_path, LABELS, sampling=replace(ODE, prompts=3, group=4), labels="reward")
    spied.rollout()
    scores = spied.scores[:, 0].view(3, 4)
    expected = (scores - scores.mean(1, keepdim=True)).sign().flatten()
    assert torch.equal(spied.updates[0].items.signal, expected)
