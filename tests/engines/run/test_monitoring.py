"""Measurements of a run while it trains: groups, advantages, diagnostics by step, memory, best and worst samples."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import tiny_jobs as tiny
from torch import Tensor

from fluvial.engines.data.records import Prompt
from fluvial.engines.engine.items import Diagnostics, PartNumbers
from fluvial.engines.engine.world import World
from fluvial.engines.methods.table import Nft
from fluvial.engines.run import metrics as mfu
from fluvial.engines.run.config import with_values
from fluvial.engines.run.evaluation.evaluate import Scores
from fluvial.engines.run.metrics import EDGES, advantage_record, group_record, parts_record
from fluvial.engines.run.monitoring.diagnostics import KeptImages
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.samplers import Ode, Stochastic
from fluvial.engines.sampling.window import RandomWindow


class Info(NamedTuple):
    """Diagnostics of items."""

    first: Tensor
    second: Tensor


def test_groups_without_signal_are_those_of_equal_rewards() -> None:
    """In every reward: two that cancel out in the sum still have a signal. The spread is that of the weighted sum."""
    rewards = torch.tensor([[1.0, 0.0], [1.0, 0.0], [2.0, 0.0], [0.0, 2.0], [3.0, 1.0], [1.0, 1.0], [0.5, 0.5], [0.5, 0.5]])
    record = group_record(rewards, torch.ones(2), 2)["groups"]
    assert record["without_signal"] == 0.5
    assert record["reward_std"] == pytest.approx(math.sqrt(2) / 4)  # 2 and 4 in the third group alone
    assert group_record(rewards, torch.ones(2), 1) == {}
    assert group_record(torch.empty(0, 0), torch.empty(0), 2) == {}


def test_the_histogram_of_advantages_has_fixed_bins() -> None:
    """An edge belongs to the bin above it; what is below the first edge has a bin of its own."""
    record = advantage_record(torch.tensor([-3.5, -3.0, -0.25, 0.0, 0.0, 0.49, 0.5, 100.0]))["advantage"]
    assert list(record["histogram"]) == ["below", *(f"{edge:g}" for edge in EDGES)]
    counts = {edge: share * 8 for edge, share in record["histogram"].items() if share}
    assert counts == {"below": 1, "-3": 1, "-0.5": 1, "0": 3, "0.5": 1, "3": 1}
    assert (record["zero"], record["max_abs"]) == (0.25, 100.0)
    assert advantage_record(None) == advantage_record(torch.empty(0)) == {}


def row(values: Tensor, parts: Tensor | None, *, pad: int = 0, micro_batch: int = 2) -> tuple[Diagnostics, list[float]]:
    """Return the diagnostics of a rank's items, and their row; filled-up rows hold garbage."""
    held = values.shape[1]
    real = torch.cat([torch.ones(held), torch.zeros(pad)])
    filled = torch.cat([values, torch.full((2, pad), 7.0)], dim=1)
    found = Diagnostics(real, parts)
    for start in range(0, held + pad, micro_batch):
        rows = slice(start, start + micro_batch)
        found.add(Info(*filled[:, rows]), rows, torch.tensor(0.5 * (start == 0)), 0)
    return found, found.row([100.0, 200.0]).tolist()


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
    assert parts_record(parts, steps=True) == {"by_step": found}
    assert set(parts_record(parts, steps=False)["by_level"]["kl_ref"]) == {"0", "0.2"}
    assert parts_record(None, steps=True) == {}


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
    best, worst = kept.extremes(found, one, count=2)
    assert (best.prompts, best.scores) == (["prompt 1", "prompt 3"], [1.0, 1.0])
    assert (worst.prompts, worst.scores) == (["prompt 2", "prompt 4"], [0.0, 0.25])
    assert [image.getpixel((0, 0)) for image in worst.images] == [(102,) * 3, (204,) * 3]
    assert worst.images[0].size == (256, 256)
    assert [shown.prompts for shown in kept.extremes(scores(0.5, 1.0, 0.0), one, count=8)] == [["prompt 1"], ["prompt 2"]]


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
        first.extremes(found, one, count=1)
    best, worst = second.extremes(found, one, count=1)
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
        assert mfu.peak_of(name, torch.bfloat16) == (None if peak is None else pytest.approx(peak * 1e12)), name
    for name, row in mfu.PEAKS.items():
        assert row.float32 < row.bfloat16, name
        assert mfu.peak_of(name, torch.float32) == row.float32
        assert mfu.peak_of(name, torch.float64) is None
    assert mfu.peak(torch.device("cpu"), torch.float32) is None
    assert mfu.mfu(6e12, 2.0, peak=1e12, ranks=4) == pytest.approx(0.75)
    for wrong in ({"seconds": 0.0}, {"peak": -1.0}, {"ranks": 0}, {"peak": float("nan")}):
        numbers: dict[str, Any] = {"seconds": 1.0, "peak": 1.0, "ranks": 1, **wrong}
        with pytest.raises(ValueError, match=f"mfu: {next(iter(wrong))} is"):
            mfu.mfu(1.0, **numbers)
