"""Given preferences and a pipeline: whose prompts they are, what is held out, and a job with an encoder of its own."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import launch, tiny_jobs, tiny_pipelines
from torch import Tensor

from fluvial.engines.cli import main as cli
from fluvial.engines.data.preferences import read_preferences, write_preferences
from fluvial.engines.data.records import texts
from fluvial.engines.engine.world import init_world
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.table import Dpo
from fluvial.engines.run import job as jobs
from fluvial.engines.run.config import PipelineConfig
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.generate import NO_GUIDANCE
from fluvial.engines.sampling.samplers import Ode

ROW = tiny_pipelines.ROWS["sd3"]
PROMPTS = [f"{number} red foxes" for number in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pipeline, and preferences of twelve prompts, two of each."""
    folder = tmp_path_factory.mktemp("preferred")
    tiny_pipelines.save(ROW, folder / "model")
    images = torch.rand(48, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    write_preferences(folder / "prefs", [(PROMPTS[i // 2], images[2 * i], images[2 * i + 1]) for i in range(24)])
    return folder


def pipeline_job(folder: Path) -> jobs.Job:
    """Return the job of the pipeline on the prompts of its preferences."""
    height, width = ROW.sizes[0][:2]
    return jobs.open_to_train(
        str(folder / "model"),
        PipelineConfig(height=height, width=width),
        preferences=folder / "prefs",
        steps=3,
        guidance=NO_GUIDANCE,
        compute=torch.float32,
    )


def test_without_preferences_and_prompts_the_line_asks_for_prompts(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Pairs then come from rollouts."""
    assert cli.run(["train", "dpo", "--model", str(folder / "model")]) == 2
    assert "needs prompts to train on: set --prompts to a file" in launch.one_line(capfd.readouterr().err)


def test_prompts_come_from_the_preferences_and_evaluation_prompts_are_held_out(folder: Path) -> None:
    """Every tenth prompt; their pairs are left out of training."""
    job = pipeline_job(folder)
    assert texts(job.heldout) == [PROMPTS[0], PROMPTS[10]]
    assert texts(job.prompts) == [prompt for prompt in PROMPTS if prompt not in texts(job.heldout)]
    job = replace(job, encode=lambda images: images[:, :1])
    asked = {"encode": job.encode, "shape": (1, 16, 16), "check": job.model.check_prompt}
    found = read_preferences(folder / "prefs", skip=texts(job.heldout), **asked)  # type: ignore[arg-type]
    assert [preference.prompt for preference in found] == [prompt for prompt in job.prompts for _ in range(2)]
    with pytest.raises(UsageError, match="line 1: '0 red foxes' is held out for evaluation, never trained on"):
        read_preferences(folder / "prefs", heldout=texts(job.heldout), **asked)  # type: ignore[arg-type]


def test_prompts_of_a_file_of_their_own_must_not_be_in_the_preferences(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "heldout.txt").write_text(f"an owl\n{PROMPTS[3]}\n")
    config = PipelineConfig(height=ROW.sizes[0][0], width=ROW.sizes[0][1], heldout=(str(tmp_path / "heldout.txt"),))
    with pytest.raises(UsageError, match="line 7: '3 red foxes' is held out for evaluation, never trained on"):
        jobs.open_to_train(
            str(folder / "model"), config, preferences=folder / "prefs", steps=3, guidance=NO_GUIDANCE, compute=torch.float32
        )


def test_a_pipeline_trains_on_given_preferences_where_its_job_encodes_images(folder: Path, tmp_path: Path) -> None:
    """A person passes `encode`; only pairs of the training prompts are drawn, and the loss starts at log 2."""
    job = pipeline_job(folder)
    draws = torch.Generator().manual_seed(1)
    weights = torch.randn(job.shape[0], 3, generator=draws)

    def encode(images: Tensor) -> Tensor:
        small = torch.nn.functional.interpolate(images * 2 - 1, job.shape[-2:])
        return torch.einsum("bchw,kc->bkhw", small, weights)

    job = replace(job, encode=encode)
    config = tiny_jobs.config(
        tmp_path / "run",
        model=str(folder / "model"),
        train="lora",
        updates=2,
        method=Dpo(beta=10.0, preferences=folder / "prefs"),
        sampling=SamplingConfig(prompts=4, group=1, steps=4, sampler=Ode()),
    )
    with init_world() as world:
        run = tiny_jobs.Run(config, world, job)
        record = run.rollout()
    assert record["pairs"] > 0
    assert run.infos[0].loss == pytest.approx(math.log(2), abs=1e-5)
    assert run.infos[0].grad_norm > 0


def test_a_job_without_an_encoder_says_how_to_bring_one(folder: Path, tmp_path: Path) -> None:
    config = tiny_jobs.config(
        tmp_path / "run",
        model=str(folder / "model"),
        method=Dpo(preferences=folder / "prefs"),
        sampling=SamplingConfig(prompts=4, group=1, steps=4, sampler=Ode()),
    )
    with init_world() as world, pytest.raises(UsageError, match=r"has no function from images to samples: pass"):
        tiny_jobs.Run(config, world, pipeline_job(folder))
