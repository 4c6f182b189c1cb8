"""Prompts with images, trained from the command line: the images reach the pipeline, or the run is refused."""

import json
from pathlib import Path

import launch
import pytest
import tiny_conditioned
import tiny_pipelines

from fluvial.engines.cli import main as cli

SHORT = (
    "--rollout.prompts 2 --rollout.group 2 --rollout.steps 3 --micro-batch 2 --updates 2 --minibatches 1 "
    "--final-samples 2 --eval-every 0 --checkpoint-every 2 --pipeline.height 16 --pipeline.width 16"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images; pipelines are saved there by the tests that use them."""
    folder = tmp_path_factory.mktemp("media")
    for number in range(3):
        tiny_conditioned.draw_image(folder / f"{number}.png", number)
    return folder


def prompts(file: Path, **columns: object) -> Path:
    """Write a file of three prompts with images of the folder and further columns."""
    records = [
        {"prompt": text, "image": f"{number}.png", **columns} for number, text in enumerate(("a fox", "owls", "cats"))
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def train(pipeline: Path, file: Path, out: Path, *more: str) -> int:
    """Train on a file of prompts, and return the exit code."""
    return cli.run(
        ["train", "grpo", "--model", str(pipeline), "--prompts", str(file), *SHORT.split(), *more, "--out", str(out)]
    )


def test_an_image_that_nothing_uses_is_refused(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A pipeline that takes text only, with a reward of the samples alone."""
    pipeline = folder / "sd3"
    tiny_pipelines.save(tiny_pipelines.ROWS["sd3"], pipeline)
    capfd.readouterr()
    assert train(pipeline, prompts(folder / "a.jsonl"), tmp_path / "run") == 2
    assert "prompt 'owls' has a column image, which nothing uses" in launch.one_line(capfd.readouterr().err)


def test_an_image_that_the_pipeline_takes_and_that_is_not_passed_is_refused(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pipeline = tiny_conditioned.save("kontext", folder / "kontext")
    capfd.readouterr()
    assert train(pipeline, prompts(folder / "b.jsonl"), tmp_path / "run") == 2
    assert "has a column image, which FluxKontextPipeline takes" in launch.one_line(capfd.readouterr().err)


def test_a_missing_image_file_is_refused(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pipeline = tiny_conditioned.save("kontext", folder / "kontext")
    capfd.readouterr()
    file = folder / "missing.jsonl"
    file.write_text('{"prompt": "a fox", "image": "0.png"}\n{"prompt": "owls", "image": "nowhere.png"}\n')
    assert train(pipeline, file, tmp_path / "run") == 2
    assert "line 2, column image names nowhere.png, and there is no such file" in launch.one_line(capfd.readouterr().err)
