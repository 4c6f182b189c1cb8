"""Diagnostics: how far the samples of a group lie apart, and how far a model has gone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from safetensors.torch import save_file
from torch import Tensor, nn

from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError
from fluvial.engines.run.monitoring import diagnostics
from fluvial.engines.run.monitoring.diagnostics import Probe
from fluvial.engines.run.training import Training
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.generate import diversity, on_device, thumbnails
from fluvial.engines.sampling.samplers import Stochastic
from fluvial.models import Schedule

CPU = torch.device("cpu")


def images(count: int, *shape: int) -> Tensor:
    """Return images of noise."""
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(0))


def schedule(job: Any) -> Schedule:
    """Return the job's schedule."""
    return on_device(job.model.schedule(tiny.STEPS, job.shape), CPU)


@pytest.mark.parametrize(("groups", "group"), [(1, 2), (3, 4), (5, 7)])
def test_diversity_is_a_mean_over_pairs(groups: int, group: int) -> None:
    """Against a loop over all pairs of a group, each counted once."""
    flat = images(groups * group, 6).unflatten(0, (groups, group))
    distances = [((each[i] - each[j]) ** 2).mean().sqrt() for each in flat for i in range(group) for j in range(i)]
    assert diversity(flat.flatten(0, 1), group) == pytest.approx(float(torch.stack(distances).mean()), rel=1e-6)


def test_diversity_of_a_collapsed_group() -> None:
    """0 where samples are the same, however far groups lie apart; half where one of two is. Black and white are 1 apart."""
    same = torch.arange(3.0).repeat_interleave(4)[:, None].expand(12, 5)
    assert diversity(same, 4) == 0.0
    apart = images(4, 5)
    assert diversity(torch.cat([apart, apart[:1].expand(4, 5)]), 4) == pytest.approx(diversity(apart, 4) / 2)
    for size in (1, 100):
        assert diversity(torch.stack([torch.zeros(size), torch.ones(size)]), 2) == pytest.approx(1.0)


def test_thumbnails() -> None:
    """At most 32 pixels a side, and what is smaller stays as it is; the mean is kept where pixels divide."""
    for shape, height, width in (((3, 64, 96), 32, 32), ((1, 8, 32), 8, 32), ((3, 40, 16), 32, 16)):
        assert thumbnails(images(2, *shape)).shape == (2, shape[0] * height * width)
    assert torch.equal(thumbnails(images(2, 1, 8, 32)), images(2, 1, 8, 32).flatten(1))
    torch.testing.assert_close(thumbnails(images(2, 3, 64, 96)).mean(1), images(2, 3, 64, 96).flatten(1).mean(1))


def test_diversity_is_in_the_record(one: World, tmp_path: Path) -> None:
    """Of the images that the reward saw, group by group; a rollout that takes no noise and begins alike would have 0."""
    rollout, seen = SamplingConfig(prompts=2, group=4, steps=tiny.STEPS, sampler=Stochastic(eta=0.5)), []

    def scored(drawn: Tensor, prompts: Any) -> Tensor:
        if drawn.unique().numel() > 1:  # not the blank images that a reward is tried on
            seen.append(drawn)
        return tiny.brightness(drawn, prompts)

    run = tiny.Run(tiny.config(tmp_path, sampling=rollout), one, tiny.job(rewards={"scored": scored}))
    record = run.rollout()
    assert record["diversity"] == pytest.approx(diversity(torch.cat(seen).flatten(1), 4))
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
        assert probe.velocity_drift(job, module, micro_batch=4) == 0.0
        assert probe.velocity_drift(job, module, micro_batch=16) < 1e-10
        probe.save(tmp_path / "probe.safetensors")
        again = Probe.load(tmp_path / "probe.safetensors", CPU)
        for each in (again, same):
            assert all(torch.equal(a, b) for a, b in zip(probe, each, strict=True))
        assert not torch.equal(probe.x, other.x)

        drifts = []
        for scale in (0.01, 0.1):
            for parameter in module.parameters():
                parameter.add_(scale)
            drifts.append(again.velocity_drift(job, module, micro_batch=4))
        assert 0 < drifts[0] < drifts[1]

        twice = job.model.build()
        assert isinstance(twice.out, nn.Linear)
        for parameter in twice.out.parameters():
            parameter.mul_(2)
        assert probe.velocity_drift(job, twice, micro_batch=4) == pytest.approx(1.0, rel=1e-5)  # |2v - v|^2 / |v|^2


def test_a_probe_that_cannot_be_read(tmp_path: Path) -> None:
    """Missing, cut or of another content: one line that names the file."""
    path = tmp_path / "probe.safetensors"
    for damage in (lambda: None, lambda: path.write_bytes(b"nothing"), lambda: save_file({"y": torch.zeros(1)}, path)):
        damage()
        with pytest.raises(RunError, match=r"probe\.safetensors, the probe that drift is measured with, cannot be") as error:
            Probe.load(path, CPU)
        assert "\n" not in str(error.value)


def test_a_run_goes_on_without_a_probe(one: World, tmp_path: Path) -> None:
    """Drift is not measured any more, as a line says."""
    lines: list[str] = []
    trainer = SimpleNamespace(progress=SimpleNamespace(before={}), world=one)
    resumed: Any = SimpleNamespace(
        trainer=trainer, config=SimpleNamespace(out=tmp_path), progress=SimpleNamespace(say=lines.append)
    )
    assert Training._probe(resumed) is None
    assert "probe.safetensors" in lines[0]
    assert lines[0].endswith("no further evaluation measures it")
