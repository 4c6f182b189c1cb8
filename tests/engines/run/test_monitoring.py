"""Measurements of a run while it trains: groups, advantages, diagnostics by step, gamed rewards, diversity and drift."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers.refusals import fails, refuses
from safetensors.torch import save_file
from torch import Tensor, nn

from fluvial.engines.data.records import Prompt
from fluvial.engines.engine.items import Diagnostics, PartNumbers
from fluvial.engines.engine.world import World
from fluvial.engines.methods.table import Nft
from fluvial.engines.run import metrics as mfu
from fluvial.engines.run.config import with_values
from fluvial.engines.run.evaluation.evaluate import Scores
from fluvial.engines.run.metrics import EDGES, summarize_advantages, summarize_groups, summarize_parts
from fluvial.engines.run.monitoring import diagnostics
from fluvial.engines.run.monitoring.diagnostics import (
    EvaluationPoint,
    KeptImages,
    Probe,
    choose_watched,
    describe_gaming,
    find_best,
    find_gaming,
)
from fluvial.engines.run.training import Training
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.generate import measure_diversity, move_schedule, shrink_images
from fluvial.engines.sampling.samplers import Ode, Stochastic
from fluvial.engines.sampling.window import RandomWindow
from fluvial.models import Schedule


class Info(NamedTuple):
    """Diagnostics of items."""

    first: Tensor
    second: Tensor


def test_groups_without_signal_are_those_of_equal_rewards() -> None:
    """In every reward: two that cancel out in the sum still have a signal. The spread is that of the weighted sum."""
    rewards = torch.tensor([[1.0, 0.0], [1.0, 0.0], [2.0, 0.0], [0.0, 2.0], [3.0, 1.0], [1.0, 1.0], [0.5, 0.5], [0.5, 0.5]])
    record = summarize_groups(rewards, torch.ones(2), 2)["groups"]
    assert record["without_signal"] == 0.5
    assert record["reward_std"] == pytest.approx(math.sqrt(2) / 4)  # 2 and 4 in the third group alone
    assert summarize_groups(rewards, torch.ones(2), 1) == {}
    assert summarize_groups(torch.empty(0, 0), torch.empty(0), 2) == {}


def test_the_histogram_of_advantages_has_fixed_bins() -> None:
    """An edge belongs to the bin above it; what is below the first edge has a bin of its own."""
    record = summarize_advantages(torch.tensor([-3.5, -3.0, -0.25, 0.0, 0.0, 0.49, 0.5, 100.0]))["advantage"]
    assert list(record["histogram"]) == ["below", *(f"{edge:g}" for edge in EDGES)]
    counts = {edge: share * 8 for edge, share in record["histogram"].items() if share}
    assert counts == {"below": 1, "-3": 1, "-0.5": 1, "0": 3, "0.5": 1, "3": 1}
    assert (record["zero"], record["max_abs"]) == (0.25, 100.0)
    assert summarize_advantages(None) == summarize_advantages(torch.empty(0)) == {}


def row(values: Tensor, parts: Tensor | None, *, pad: int = 0, micro_batch: int = 2) -> tuple[Diagnostics, list[float]]:
    """Return the diagnostics of a rank's items, and their row; filled-up rows hold garbage."""
    held = values.shape[1]
    real = torch.cat([torch.ones(held), torch.zeros(pad)])
    filled = torch.cat([values, torch.full((2, pad), 7.0)], dim=1)
    found = Diagnostics(real, parts)
    for start in range(0, held + pad, micro_batch):
        rows = slice(start, start + micro_batch)
        found.add(Info(*filled[:, rows]), rows, torch.tensor(0.5 * (start == 0)), 0)
    return found, found.pack([100.0, 200.0]).tolist()


def test_diagnostics_by_part_are_those_of_the_loop_one_would_write() -> None:
    """Over two ranks of unequal numbers of items; rows that only fill up count nowhere; a part may be empty."""
    values = torch.randn(2, 7, generator=torch.Generator().manual_seed(0))
    part = torch.tensor([0, 2, 2, 0, 3, 2, 0])
    masks = part[:, None] == torch.arange(4)
    first, one = row(values[:, :4], masks[:4])
    second, two = row(values[:, 4:], masks[4:], pad=1)
    numbers = first.read([one, two])
    assert numbers.items == 7
    assert numbers.memory == (100.0, 200.0)
    assert numbers.parts is not None
    assert numbers.parts.items == [3, 0, 3, 1]
    for i, name in enumerate(Info._fields):
        for k in range(4):
            chosen = values[i, part == k]
            expected = chosen.mean().item() if len(chosen) else 0.0
            assert numbers.parts.mean[name][k] == pytest.approx(expected, abs=1e-6)
            expected = chosen.abs().sum().item() / max(len(chosen), 1)
            assert numbers.parts.mean_abs[name][k] == pytest.approx(expected, abs=1e-6)
    whole, alone = row(values[:, :4], None)
    assert whole.read([alone]).parts is None
    assert whole.read([alone])[:4] == first.read([one])[:4], "the other numbers do not depend on the split"
    assert second.read([one, two]).memory == (100.0, 200.0)


def test_a_nan_is_the_nan_of_its_part_alone() -> None:
    values = torch.tensor([[1.0, math.nan, 3.0], [1.0, 1.0, 1.0]])
    found, numbers = row(values, torch.eye(3, dtype=torch.bool), pad=1)
    parts = found.read([numbers]).parts
    assert parts is not None
    assert parts.mean["first"][::2] == [1.0, 3.0]
    assert math.isnan(parts.mean["first"][1])
    assert parts.mean["second"] == [1.0, 1.0, 1.0]


def test_parts_are_named_by_their_step_or_level() -> None:
    """Parts without items are left out, and so is what the log-ratio says again."""
    parts = PartNumbers(
        [2, 0, 1], {"kl_ref": [0.1, 0.0, 0.3], "log_ratio": [-1.0, 0.0, 1.0]}, {"kl_ref": [1.0] * 3, "log_ratio": [2.0] * 3}
    )
    found = {"kl_ref": {"0": 0.1, "2": 0.3}, "abs_log_ratio": {"0": 2.0, "2": 2.0}}
    assert summarize_parts(parts, steps=True) == {"by_step": found}
    assert set(summarize_parts(parts, steps=False)["by_level"]["kl_ref"]) == {"0", "0.2"}
    assert summarize_parts(None, steps=True) == {}


def test_the_record_of_an_update_has_what_a_run_is_followed_by(tmp_path: Path, one: World) -> None:
    """Numbers by step average to those of the whole, where every step has as many items."""
    rollout = SamplingConfig(prompts=2, group=2, steps=4, sampler=Stochastic(eta=0.5), window=RandomWindow(2, low=1))
    run = tiny.Run(tiny.config(tmp_path, sampling=rollout, updates=2, **{"passes.epochs": 2}), one)
    record = run.rollout()
    run.trainer.close()
    by_step = record["by_step"]
    assert set(by_step) == {"clipped", "kl_old", "kl_ref", "abs_log_ratio"}
    steps = [int(step) for step in by_step["kl_old"]]
    assert len(steps) == 2
    assert 1 <= steps[0] < steps[1] <= 3
    assert sum(by_step["kl_old"].values()) / 2 == pytest.approx(record["objective"]["kl_old"], rel=1e-5)
    assert min(by_step["abs_log_ratio"].values()) > 0  # the second pass is another policy
    assert record["groups"]["without_signal"] == 0.0
    assert record["groups"]["reward_std"] > 0
    assert sum(record["advantage"]["histogram"].values()) == pytest.approx(1.0)
    assert record["speed"]["samples_per_second"] > 0
    assert 0.05 < record["memory"]["resident"] < 100  # GiB
    assert "by_level" not in record


def test_noised_samples_are_split_by_level(tmp_path: Path, one: World) -> None:
    rollout = SamplingConfig(prompts=2, group=2, steps=4, sampler=Ode())
    config = tiny.config(tmp_path, sampling=rollout, method=Nft(), train="lora")
    run = tiny.Run(with_values(config, {"noising.each": 4}), one)
    record = run.rollout()
    run.trainer.close()
    assert "by_step" not in record
    tenths = next(iter(record["by_level"].values()))
    assert set(tenths) <= {f"{i / 10:g}" for i in range(10)}
    assert len(tenths) > 1


def scores(*values: float) -> Scores:
    """Return the scores of as many samples by two evaluators, of which the last counts."""
    names = [f"{i:05d}" for i in range(len(values))]
    table = torch.tensor([[-value, value] for value in values])
    return Scores(("other", "last"), names, [Prompt(f"prompt {i}") for i in range(len(values))], table)


def test_the_best_and_the_worst_are_in_order(one: World) -> None:
    """By score, then by number; no sample is both, and none has the image of another."""
    kept = KeptImages()
    found = scores(0.5, 1.0, 0.0, 1.0, 0.25)
    images = torch.arange(5)[:, None, None, None].expand(5, 1, 4, 4) / 5
    kept(found.names[:2], images[:2])
    kept(found.names[2:], images[2:])
    best, worst = kept.select_extremes(found, one, count=2)
    assert (best.prompts, best.scores) == (["prompt 1", "prompt 3"], [1.0, 1.0])
    assert (worst.prompts, worst.scores) == (["prompt 2", "prompt 4"], [0.0, 0.25])
    assert [image.getpixel((0, 0)) for image in worst.images] == [(102,) * 3, (204,) * 3]
    assert worst.images[0].size == (256, 256)
    assert [shown.prompts for shown in kept.select_extremes(scores(0.5, 1.0, 0.0), one, count=8)] == [
        ["prompt 1"],
        ["prompt 2"],
    ]


def test_the_best_samples_of_other_ranks_are_found(one: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank sends those of its own that are wanted, and no others. Large images are compressed and made smaller."""
    found, sent = scores(0.5, 1.0, 0.0, 0.75), list[dict[int, bytes]]()

    def gathered(self: World, item: dict[int, bytes]) -> list[dict[int, bytes]]:
        sent.append(item)
        return list(sent)

    monkeypatch.setattr(World, "gather_items", gathered)
    first, second = KeptImages(), KeptImages()
    first(found.names[:2], torch.full((2, 3, 8, 600), 0.5))
    second(found.names[2:], torch.zeros(2, 3, 8, 600))
    with pytest.raises(KeyError):  # the first rank alone lacks the worst
        first.select_extremes(found, one, count=1)
    best, worst = second.select_extremes(found, one, count=1)
    assert [sorted(item) for item in sent] == [[1], [2]]
    assert (best.prompts, worst.prompts) == (["prompt 1"], ["prompt 2"])
    assert best.images[0].width == 512


# Peaks in bfloat16, in TFLOP/s; a name that only looks alike has none.
KNOWN = {
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H200": 989.4,
    "NVIDIA L40S": 362.05,
    "NVIDIA L4": 121,
    "NVIDIA GeForce RTX 4090": 165.2,
    "AMD Instinct MI300X": 1307.4,
    **dict.fromkeys(("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A10G", "Tesla T4")),
}


def test_peaks_and_the_part_of_them_that_is_used() -> None:
    """They go by the device's name and dtype, and the part is over all ranks; a wrong number is refused."""
    for name, peak in KNOWN.items():
        assert mfu.look_up_peak(name, torch.bfloat16) == (None if peak is None else pytest.approx(peak * 1e12)), name
    for name, row in mfu.PEAKS.items():
        assert row.float32 < row.bfloat16, name
        assert mfu.look_up_peak(name, torch.float32) == row.float32
        assert mfu.look_up_peak(name, torch.float64) is None
    assert mfu.find_peak(torch.device("cpu"), torch.float32) is None
    assert mfu.compute_mfu(6e12, 2.0, peak=1e12, ranks=4) == pytest.approx(0.75)
    for wrong in ({"seconds": 0.0}, {"peak": -1.0}, {"ranks": 0}, {"peak": float("nan")}):
        numbers: dict[str, Any] = {"seconds": 1.0, "peak": 1.0, "ranks": 1, **wrong}
        refuses(f"compute_mfu: {next(iter(wrong))} is", mfu.compute_mfu, 1.0, **numbers)


@pytest.mark.parametrize(
    ("scores", "rewards", "count", "is_gamed"),
    [
        ([5, 4, 3], [1, 2, 3], 2, True),
        ([5, 4, 3], [1, 2, 3], 3, False),  # not that often
        ([5, 4, 3], [3, 2, 1], 2, False),  # the reward fell, too
        ([5, 4, 3], [2, 9, 2], 2, False),  # it is where it was
        ([5, 4, 4], [1, 2, 3], 2, False),  # the score stayed
        ([4, 5, 3], [1, 2, 3], 2, False),  # it had risen
        ([1, 5, 4, 3], [0, 1, 0, 2], 2, True),
        ([5, 4], [1, 2], 1, True),
        ([5], [1], 1, False),
        ([5, 4, 3], [1, 2, 3], 0, False),
    ],
)
def test_what_counts_as_gamed(scores: list[float], rewards: list[float], count: int, is_gamed: bool) -> None:
    """The score falls at each of the last evaluations, and the reward is higher than before."""
    points = [
        EvaluationPoint(10 * number, *point) for number, point in enumerate(zip(scores, rewards, strict=True), start=1)
    ]
    found, best = find_gaming(points, count), find_best(points)
    assert bool(found) == is_gamed
    assert best is not None
    assert best.update == 10 * (scores.index(max(scores)) + 1)
    if is_gamed:
        assert [point.score for point in found] == scores[-count - 1 :]
        assert f"fell at {count} evaluations in a row" in describe_gaming(found, "heldout")


def test_the_evaluator_that_is_watched() -> None:
    """The one of that name, or the last."""
    assert choose_watched(("reward", "heldout", "other")) == "heldout"
    assert choose_watched(("a", "b")) == "b"


CPU = torch.device("cpu")


def images(count: int, *shape: int) -> Tensor:
    """Return images of noise."""
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(0))


def schedule(job: Any) -> Schedule:
    """Return the job's schedule."""
    return move_schedule(job.model.schedule(tiny.STEPS, job.shape), CPU)


@pytest.mark.parametrize(("groups", "group"), [(1, 2), (3, 4), (5, 7)])
def test_diversity_is_a_mean_over_pairs(groups: int, group: int) -> None:
    """Against a loop over all pairs of a group, each counted once."""
    flat = images(groups * group, 6).unflatten(0, (groups, group))
    distances = [((each[i] - each[j]) ** 2).mean().sqrt() for each in flat for i in range(group) for j in range(i)]
    assert measure_diversity(flat.flatten(0, 1), group) == pytest.approx(float(torch.stack(distances).mean()), rel=1e-6)


def test_diversity_of_a_collapsed_group() -> None:
    """0 where samples are the same, however far groups lie apart; half where one of two is. Black and white are 1 apart."""
    same = torch.arange(3.0).repeat_interleave(4)[:, None].expand(12, 5)
    assert measure_diversity(same, 4) == 0.0
    apart = images(4, 5)
    assert measure_diversity(torch.cat([apart, apart[:1].expand(4, 5)]), 4) == pytest.approx(measure_diversity(apart, 4) / 2)
    for size in (1, 100):
        assert measure_diversity(torch.stack([torch.zeros(size), torch.ones(size)]), 2) == pytest.approx(1.0)


def test_thumbnails() -> None:
    """At most 32 pixels a side, and what is smaller stays as it is; the mean is kept where pixels divide."""
    for shape, height, width in (((3, 64, 96), 32, 32), ((1, 8, 32), 8, 32), ((3, 40, 16), 32, 16)):
        assert shrink_images(images(2, *shape)).shape == (2, shape[0] * height * width)
    assert torch.equal(shrink_images(images(2, 1, 8, 32)), images(2, 1, 8, 32).flatten(1))
    torch.testing.assert_close(shrink_images(images(2, 3, 64, 96)).mean(1), images(2, 3, 64, 96).flatten(1).mean(1))


def test_diversity_is_in_the_record(one: World, tmp_path: Path) -> None:
    """Of the images that the reward saw, group by group; a rollout that takes no noise and begins alike would have 0."""
    rollout, seen = SamplingConfig(prompts=2, group=4, steps=tiny.STEPS, sampler=Stochastic(eta=0.5)), []

    def scored(drawn: Tensor, prompts: Any) -> Tensor:
        if drawn.unique().numel() > 1:  # not the blank images that a reward is tried on
            seen.append(drawn)
        return tiny.brightness(drawn, prompts)

    run = tiny.Run(tiny.config(tmp_path, sampling=rollout), one, tiny.job(rewards={"scored": scored}))
    record = run.rollout()
    assert record["diversity"] == pytest.approx(measure_diversity(torch.cat(seen).flatten(1), 4))
    assert record["diversity"] > 0.01


@pytest.mark.parametrize("prediction", ["velocity", "epsilon"])
def test_drift(tmp_path: Path, prediction: Any) -> None:
    """0 for the model itself, the squared distance over the squared size for another.

    The probe is kept in a file to the bit, and depends on the model and on nothing else, so that runs compare.
    """
    job = tiny.job(prediction)
    module = job.model.build()
    with torch.no_grad():
        probe, same, other = (
            Probe.take(job, net, schedule(job), micro_batch=4) for net in (module, job.model.build(), tiny.Net(1))
        )
        assert len(probe.x) == len(probe.level) == diagnostics.SAMPLES
        assert len(torch.unique(probe.level)) == tiny.STEPS
        assert probe.measure_drift(job, module, micro_batch=4) == 0.0
        assert probe.measure_drift(job, module, micro_batch=16) < 1e-10
        probe.save(tmp_path / "probe.safetensors")
        again = Probe.load(tmp_path / "probe.safetensors", CPU)
        for each in (again, same):
            assert all(torch.equal(a, b) for a, b in zip(probe, each, strict=True))
        assert not torch.equal(probe.x, other.x)

        drifts = []
        for scale in (0.01, 0.1):
            for parameter in module.parameters():
                parameter.add_(scale)
            drifts.append(again.measure_drift(job, module, micro_batch=4))
        assert 0 < drifts[0] < drifts[1]

        twice = job.model.build()
        assert isinstance(twice.out, nn.Linear)
        for parameter in twice.out.parameters():
            parameter.mul_(2)
        assert probe.measure_drift(job, twice, micro_batch=4) == pytest.approx(1.0, rel=1e-5)  # |2v - v|^2 / |v|^2


def test_a_probe_that_cannot_be_read(tmp_path: Path) -> None:
    """Missing, cut or of another content: one line that names the file."""
    path = tmp_path / "probe.safetensors"
    for damage in (lambda: None, lambda: path.write_bytes(b"nothing"), lambda: save_file({"y": torch.zeros(1)}, path)):
        damage()
        fails(r"probe\.safetensors, the probe that drift is measured with, cannot be", Probe.load, path, CPU)


def test_a_run_goes_on_without_a_probe(one: World, tmp_path: Path) -> None:
    """Drift is not measured any more, as a line says."""
    lines: list[str] = []
    trainer = SimpleNamespace(progress=SimpleNamespace(before={}), world=one)
    resumed: Any = SimpleNamespace(
        trainer=trainer, config=SimpleNamespace(out=tmp_path), progress=SimpleNamespace(say=lines.append)
    )
    assert Training._open_probe(resumed) is None
    assert "probe.safetensors" in lines[0]
    assert lines[0].endswith("drift is no longer measured")
