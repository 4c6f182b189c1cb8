"""Runs on two processes under torchrun and gloo: the same training as one, and calls in one order."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import launch
from helpers.marks import long
from safetensors.torch import load_file
from workers import two_ranks

from fluvial.engines.engine.world import World, init_world
from fluvial.engines.run.exports import export_run
from fluvial.models.handwriting import BASE


@pytest.mark.long
def test_ranks_call_what_is_collective_in_one_order(tmp_path: Path) -> None:
    """Of an update and an evaluation; a call that one rank alone makes would wait for ever."""
    first, second = launch.on_ranks(2, "workers.two_ranks:calls", tmp_path)[0]
    assert first == second
    assert {"RolloutSampler.specify", "Scoring.collect", "gather_rewards", "Loop.learn", "evaluate"} <= {*first}


def whole(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "weights" / "diffusion_pytorch_model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [long("full"), "lora"])
def test_training_on_two_ranks_is_training_on_one(tmp_path: Path, kind: str) -> None:
    """The same rollouts to the bit while the weights are the same, and the same weights to the order of float32 sums.

    A checkpoint of two ranks is continued by one, which ends there too.
    """
    flags = ["--updates", "3", "--train", kind, "--kl.coef", "0.1", "--optimizer.ema-decay", "0.5"]
    said = launch.train(tmp_path / "two", *flags, "--checkpoint.background", ranks=2).stdout
    assert ("each of the 2 ranks holds all weights (engine.replicas auto)" in said) == (kind == "lora")
    launch.train(tmp_path / "one", *flags)
    shutil.copytree(tmp_path / "two", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "000003")
    launch.train(tmp_path / "resumed", *flags, "--resume")
    one, two = launch.records(tmp_path / "one"), launch.records(tmp_path / "two")
    first_one, first_two = (next(record for record in records if "reward" in record) for records in (one, two))
    assert first_one["reward"] == first_two["reward"]
    assert first_one["pairs"] == first_two["pairs"]
    assert first_two["loss"] == pytest.approx(first_one["loss"], rel=1e-5, abs=1e-7)
    assert first_two["grad_norm"] == pytest.approx(first_one["grad_norm"], rel=1e-5)
    assert one[0]["score"] == two[0]["score"]  # the evaluation before training
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert summary["first_pass_max_abs_log_ratio"] == 0.0
    assert summary["ranks"] == 2
    left, right, resumed = (whole(tmp_path / name) for name in ("one", "two", "resumed"))
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-4, atol=1e-5)
    distance = sum(float(((left[name] - resumed[name]).double() ** 2).sum()) for name in left) ** 0.5
    base = load_file(BASE / "diffusion_pytorch_model.safetensors")
    assert distance < 0.02 * sum(float(((left[name] - base[name]).double() ** 2).sum()) for name in left) ** 0.5
    with init_world() as world:  # its checkpoint, which two ranks wrote, is exported by one
        out, _ = export_run(tmp_path / "two", "merged", average=True, out=tmp_path / "merged", world=world)
    alone = load_file(out / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(alone[name], right[name]) for name in right)


def test_bad_input_ends_all_ranks_in_one_line(tmp_path: Path) -> None:
    """The main rank's line, torchrun's own summary aside, and no traceback of ours."""
    (tmp_path / "config.json").write_text("{}")
    done = launch.fluvial("train", "handwriting", "--out", str(tmp_path), ranks=2)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("fluvial: ")]
    assert [line for line in lines if not launch.WAITS.fullmatch(line)] == [
        f"fluvial: {tmp_path} already holds a run: set --resume to continue it, or set --out to another folder"
    ]
    assert os.listdir(tmp_path) == ["config.json"]


@pytest.fixture(scope="module")
def found(one: World, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Return the result of updates by the number of ranks; items without advantage are not computed."""
    folder = tmp_path_factory.mktemp("uneven")
    return {1: two_ranks.updates(one, str(folder)), 2: launch.on_ranks(2, "workers.two_ranks:updates", folder)[0]}


def test_forwards_are_counted(found: dict[int, dict[str, Any]]) -> None:
    """16 samples of 2 steps, of which 8 have an advantage: 16 pairs, 4 micro-batches, 2 on each of 2 ranks."""
    assert found[1]["0.0"]["pairs"] == found[2]["0.0"]["pairs"] == 16
    assert found[1]["0.0"]["forwards"] == [4]
    assert found[2]["0.0"]["forwards"] == [2, 2]
    # A KL to the reference pulls on every pair.
    assert found[1]["0.1"]["pairs"] == found[2]["0.1"]["pairs"] == 32
    assert found[1]["0.1"]["forwards"] == [8]
    assert found[2]["0.1"]["forwards"] == [4, 4]


@pytest.mark.parametrize("kl_coef", ["0.0", "0.1"])
def test_the_gradient_is_that_of_one_process(found: dict[int, dict[str, Any]], kl_coef: str) -> None:
    """To the order of float32 sums; and a pair that was moved is still on policy, to the bit."""
    one, two = (torch.tensor(found[ranks][kl_coef]["gradient"]) for ranks in (1, 2))
    assert float(one.norm()) > 0
    assert float((one - two).norm() / one.norm()) < 1e-5
    assert found[1][kl_coef]["ratio"] == found[2][kl_coef]["ratio"] == 0.0
