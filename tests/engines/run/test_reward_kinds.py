"""A run of a tiny pipeline from the command line for each kind of reward, those of servers with a server process."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import fake_servers, launch, tiny_pipelines, tiny_rewards
from helpers.pipeline_runs import TWO_UPDATES

from fluvial.engines.cli import main as cli

ADAPTER = "--train lora --lora.rank 2 --pipeline.height 16 --pipeline.width 16"
ROLLOUT = "--sampling.prompts 2 --sampling.group 2 --sampling.steps 2 --sampling.window all --sampling.window.high 1"
SMALL = [*TWO_UPDATES, *f"{ADAPTER} {ROLLOUT}".split()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pipeline, a tiny CLIP model and prompts."""
    place = tmp_path_factory.mktemp("kinds")
    tiny_pipelines.save(tiny_pipelines.ROWS["sd3"], place / "sd3")
    tiny_rewards.save_clip(place / "clip")
    (place / "prompts.txt").write_text("a red fox\ntwo cats\nan owl\na blue hat\n")
    return place


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a reward server, a process of its own."""
    with launch.start("serve-rewards", "helpers.fake_servers:lightness", "--port", "0") as process:
        yield process.address()


KINDS = {
    "local model": ("pickscore:weights={folder}/clip,device=cpu",),
    "remote JSON": ("flow_factory:url={server}",),
    "remote JSON of UniRL": ("unirl:url={server},rewards=lightness",),
    "vlm": ("vlm_yes_no:url={vlm}",),
    "group-wise": ("helpers.fake_servers:ranked",),
    "constraint": ("helpers.fake_servers:lightness", "pickscore:weights={folder}/clip,device=cpu"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_learns_from_it(
    kind: str, folder: Path, server: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its rewards differ between samples, and the adapter moves; nothing is left out."""
    with fake_servers.loopback(fake_servers.YesNo()) as vlm:
        rewards = [text.format(folder=folder, server=server, vlm=vlm) for text in KINDS[kind]]
        floor = ["--advantage.floors", "pickscore=10"] if kind == "constraint" else []
        words = ["train", "grpo", "--model", str(folder / "sd3"), "--prompts", str(folder / "prompts.txt"), "--out"]
        code = cli.run([*words, str(tmp_path / "run"), *SMALL, "--rewards", *rewards, *floor])
    assert code == 0, capfd.readouterr().err
    records = [record for record in launch.records(tmp_path / "run") if "reward" in record]
    assert len(records) == 2
    assert all(record["reward"]["std"] > 0 and record["grad_norm"] > 0 for record in records)
    assert all(record["invalid"] == {"samples": 0, "groups": 0} for record in records)
    if floor:
        pushed = [record["multipliers"]["pickscore"] for record in records]
        assert 0 < pushed[0] < pushed[1]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["updates"] == 2
