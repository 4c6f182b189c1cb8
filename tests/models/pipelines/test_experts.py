"""Wan 2.2's two experts: on two ranks, and with a scale of guidance each."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import launch
from helpers.marks import Captured, Folders
from helpers.refusals import refuses
from helpers.tiny_pipelines import ROWS, STEPS, TEXT, conditions, images_of, opened, sampled, save, start, theirs
from safetensors.torch import load_file
from workers import experts

from fluvial.engines.cli import main as cli
from fluvial.engines.engine.world import init_world
from fluvial.models.pipelines.wan import EXPERTS


@pytest.mark.slow
def test_ranks_on_two_sides_take_the_step_of_one_process(tmp_path: Path) -> None:
    """They agree to run both experts, or one would wait for the other; each expert learns, and is exported to a folder."""
    folder = save(ROWS["wan-experts"], tmp_path / "wan")
    launch.on_ranks(2, "workers.experts:exported", folder, tmp_path / "two")
    found = load_file(tmp_path / "two" / "gradients.safetensors")
    with init_world() as one:
        expected = experts.update(folder, tmp_path / "one", one)
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        assert gradient.any(), name
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7)
    for part in EXPERTS:
        base, *after = (
            load_file(place / part / "diffusion_pytorch_model.safetensors")
            for place in (folder, tmp_path / "one", tmp_path / "two")
        )
        for tensors in after:
            assert set(tensors) == set(base)
            assert not any(torch.equal(tensors[name], base[name]) for name in base)


@pytest.mark.long
def test_each_expert_has_a_scale_of_guidance(folders: Folders) -> None:
    row, folder = ROWS["wan-experts"], folders("wan-experts")
    model, pipeline = opened("wan-experts", folder, guidance_scale_2=1.5), theirs(row, folder)
    both = row._replace(call=lambda scale: {**row.call(scale), "guidance_scale_2": 1.5})
    x = start(model, 2, row.sizes[0])
    schedule, cond = model.schedule(STEPS, tuple(x.shape[1:])), conditions(model, row.prompts[:2], 4.0)
    assert {bool(timestep < 1000 * pipeline.config.boundary_ratio) for timestep in schedule.timesteps} == {False, True}
    found = model.decode(sampled(model, model.build(), x, cond, schedule).final)
    expected, other = (images_of(which, pipeline, model, x, row.prompts[:2], 4.0) for which in (both, row))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (expected - other).abs().max() > 0.01


def test_the_scale_is_that_of_the_network_which_the_timestep_chooses(folders: Folders) -> None:
    folder, scale = folders("wan-experts"), torch.full((3,), 4.0)
    model: Any = opened("wan-experts", folder, guidance_scale_2=1.5)
    at = 1000 * model.boundary_ratio
    timesteps = torch.tensor([at - 1, at, at + 1])
    assert model.scale_at(scale, torch.zeros(3), timesteps).tolist() == [1.5, 4.0, 4.0]
    assert model.scale_at(scale, timesteps / 1000, None).tolist() == [1.5, 4.0, 4.0]
    alone: Any = opened("wan-experts", folder)
    assert alone.scale_at(scale, torch.zeros(3), timesteps) is scale


@pytest.mark.parametrize(
    ("name", "scale", "says"),
    [
        ("wan", 2.0, r"guidance_scale_2 is 2\.0, but .* has one network only: remove it"),
        ("wan-experts", -1, "guidance_scale_2 is -1, expected a number of at least 0"),
        ("wan-experts", "two", "guidance_scale_2 is 'two', expected a number of at least 0"),
    ],
)
def test_a_second_scale_without_a_meaning_is_refused(name: str, scale: Any, says: str, folders: Folders) -> None:
    refuses(says, opened, name, folders(name), guidance_scale_2=scale)


SIZE = f"--pipeline.height 16 --pipeline.width 16 --pipeline.frames 5 --pipeline.text-tokens {TEXT}".split()


def run_of(folders: Folders, folder: Path) -> list[str]:
    (folder / "prompts.txt").write_text("a red fox\ntwo cats\n")
    typed = (
        f"train grpo --model {folders('wan-experts')} --prompts {folder / 'prompts.txt'} --rewards jpeg --updates 1 "
        "--passes.minibatches 1 --pipeline.call guidance_scale_2=1.5 --sampling.prompts 2 --sampling.group 2 "
        f"--sampling.steps 3 --micro-batch 2 "
        f"--final-samples 2 --evaluation.every 0 --tracker none --train lora --out {folder / 'run'}"
    )
    return [*typed.split(), *SIZE]


@pytest.mark.long
def test_a_run_has_two_scales(folders: Folders, tmp_path: Path, capfd: Captured) -> None:
    """By the command line: the first ratio is exactly 1; without guidance a second scale is refused."""
    typed = run_of(folders, tmp_path)
    assert cli.run([*typed, "--sampling.guidance.scale", "1"]) == 2
    assert "--pipeline.call has no effect with guidance_scale_2, without guidance" in launch.one_line(capfd.readouterr().err)
    assert cli.run([*typed, "--sampling.guidance.scale", "4"]) == 0, capfd.readouterr().err
    (update,) = [record for record in launch.records(tmp_path / "run") if "grad_norm" in record]
    assert update["first_pass_max_abs_log_ratio"] == 0
    assert update["grad_norm"] > 0


@pytest.mark.long
def test_only_evaluations_have_two_scales(folders: Folders, tmp_path: Path, capfd: Captured) -> None:
    """Of a run without guidance: they have the scores that `fluvial eval` finds, and without the second scale others."""
    run, found = str(tmp_path / "run"), []
    assert cli.run([*run_of(folders, tmp_path), "--evaluation.guidance", "4"]) == 0, capfd.readouterr().err
    for number, more in enumerate(([], ["--guidance", "1"], ["--pipeline.call", "guidance_scale_2=4"])):
        assert cli.run(["eval", run, *more, "--out", str(tmp_path / f"{number}")]) == 0, capfd.readouterr().err
        (row,) = json.loads((tmp_path / f"{number}" / "table.json").read_text())["rows"]
        found.append(row["mean"])
    assert found[0] == pytest.approx(json.loads((tmp_path / "run" / "summary.json").read_text())["jpeg_score_after"])
    assert len({*found}) == 3
    few = ["--pipeline.call", "guidance_scale_2=2", "--prompts", str(tmp_path / "prompts.txt"), *SIZE]
    for command, more in (("sample", []), ("preferences", ["--rewards", "jpeg"]), ("eval", [])):
        capfd.readouterr()
        assert cli.run([command, str(folders("wan-experts")), *few, *more, "--out", str(tmp_path / "x.png")]) == 2
        assert "--pipeline.call has no effect with guidance_scale_2" in launch.one_line(capfd.readouterr().err)
