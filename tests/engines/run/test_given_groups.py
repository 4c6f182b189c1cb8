"""Learning from given images: RAFT on groups of one caption or of any, and KTO on labels."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers.refusals import refuses
from helpers.spied_runs import FAST, ODE, Spied
from torch import Tensor

from fluvial.core.random import Key, key
from fluvial.engines.data.order import Captions
from fluvial.engines.data.records import Prompt, as_prompts, texts
from fluvial.engines.engine.world import World
from fluvial.engines.methods import Kto
from fluvial.engines.methods.raft import Raft
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.job import Job
from fluvial.engines.run.method import NoisedRows
from fluvial.engines.sampling.noising import NoisingConfig


def given(*counts: int) -> list[Prompt]:
    """Return images, so many of each caption; the file of one names its number."""
    return [Prompt(str(caption), image=Path(f"{caption}{n}")) for caption, count in enumerate(counts) for n in range(count)]


def grey(key: Key, prompts: Sequence[Prompt]) -> Tensor:
    """Return an image of one grey per file, which its name says."""
    return torch.stack([torch.full(tiny.SHAPE, int(str(prompt.image)) / 50 - 0.5) for prompt in prompts])


def run(folder: Path, one: World, compare: Any, prompts: list[Prompt], **changes: Any) -> Spied:
    """Return a run of RAFT on given images, whose groups are of four."""
    job: Job = replace(tiny.job(), prompts=tuple(prompts), data=grey)
    rollout = replace(ODE, prompts=2, group=4)
    config: TrainConfig = tiny.config(
        folder,
        method=Raft(best=0.5, compare=compare),
        sampling=rollout,
        **changes,
        **{"engine.micro_batch": 4, "data.order": "epochs"},
    )
    return Spied(config, one, job)


@pytest.mark.parametrize("compare", ["caption", "data"])
def test_the_best_of_each_group_are_fitted(tmp_path: Path, one: World, compare: Any) -> None:
    """By the reward of their own images; a group is of one caption, or of different images in the order of the epoch."""
    spied = run(tmp_path, one, compare, given(4, 4))
    record = spied.rollout()
    images = [str(prompt.image) for prompt in spied.records]
    brightness = torch.tensor([int(image) / 100 + 0.25 for image in images])
    torch.testing.assert_close(spied.scores[:, 0], brightness)
    assert record["reward"]["mean"] == pytest.approx(float(brightness.mean()))
    for group in (images[:4], images[4:]):
        assert len(set(group)) == 4
        assert (len({image[0] for image in group}) == 1) == (compare == "caption")
    best = {image for group in (images[:4], images[4:]) for image in sorted(group, key=int)[2:]}
    update = spied.updates[0]
    assert {images[int(i)] for i in update.items.sample[update.weight != 0]} == best
    assert record["pairs"] == 4 * cast(NoisedRows, spied.trainer.config.method.rows).noising.each
    assert len(set(images)) == 8  # an epoch has each image once


def test_images_of_a_caption_are_drawn_alike() -> None:
    """Each as often as the others; captions of a single image are left out, and with none left that is said."""
    prompts = given(3, 1, 2)
    captions = Captions(prompts)
    assert texts(captions.firsts) == ["0", "2"]
    drawn = [captions.draw(0, key(number), 4) for number in range(60)]
    assert all(sorted(Counter(places).values()) == [1, 1, 2] for places in drawn)
    assert set(Counter(place for places in drawn for place in places)) == {0, 1, 2}
    assert len({tuple(places) for places in drawn}) == 6
    assert Captions(as_prompts(["a", "b"])).draw(1, key(0), 2) == [1, 1]
    refuses(r"compare is caption, and no caption of data has two images", Captions, given(1, 1))


LABELS = {"0": 1, "1": 0, "2": True, "3": False}
GOOD = dict.fromkeys(LABELS, 1)


def labelled(one: World, tmp_path: Path, given: dict[str, Any], **changes: Any) -> Spied:
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
    spied = labelled(one, tmp_path, labels, good_weight=good, bad_weight=bad)
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
    spied = labelled(one, tmp_path, LABELS, sampling=replace(ODE, prompts=3, group=4), labels="reward")
    spied.rollout()
    scores = spied.scores[:, 0].view(3, 4)
    expected = (scores - scores.mean(1, keepdim=True)).sign().flatten()
    assert torch.equal(spied.updates[0].items.signal, expected)
