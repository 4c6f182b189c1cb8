"""The commands of the README and of its pages run in their order, with tiny networks in the place of the published weights.

The models are folders under their published names, of the real layout. A command is typed as it is written; only sizes are
added: updates, samples, steps, pixels. Files that a page speaks of are there, and `mine.py` is the code that the pages show.
"""

import json
import shlex
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest
from helpers import pages, short_runs, tiny_pipelines, tiny_rewards
from PIL import Image

from fluvial.engines.cli import main as cli
from fluvial.engines.cli import processes
from fluvial.engines.data import prompt_sets

MODELS = {
    "stabilityai/stable-diffusion-3.5-medium": "sd3",
    "black-forest-labs/FLUX.1-dev": "flux",
    "Qwen/Qwen-Image": "qwen-image",
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": "wan",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": "wan",
}
REWARDS = "yuvalkirstain/PickScore_v1", "openai/clip-vit-large-patch14"
CAPTIONS = ("a red fox", "two cats", "an owl")
RUN = {
    "--updates": "1",
    "--micro-batch": "2",
    "--update-micro-batch": "rollout",
    "--evaluation.every": "0",
    "--evaluation.samples": "2",
    "--final-samples": "2",
    "--checkpoint.every": "1",
}
ROLLOUT = {"--sampling.prompts": "2", "--sampling.group": "2"}
SIZE = {"--pipeline.height": "16", "--pipeline.width": "16"}
PIPELINE = {**SIZE, "--sampling.steps": "6", "--evaluation.steps": "4"}
FITTED = "--engine.fit"  # works out the memory of the published network, which has tests of its own
NOISED = {recipe: {"--noising.each": "2"} for recipe in ("nft", "raft", "dpo")}
# A command with one of these words needs a server or another machine, or works out memory, which has tests of its own.
ELSEWHERE = (
    *(
        "torchrun",
        "s3://",
        "http://",
        "serve",
        "serve-rewards",
        "plan",
        "--dry-run",
        "--as-gpus",
        "python",
        "models",
        "runs",
    ),
    *("config", "vote", "hpsv3:", "videoreward:", "preference"),
)
TOPICS = ("run", "data", "scoring", "export", "run/checkpoint", "run/evaluation", "methods", "cli")
STORY = ["README.md", *(f"engines/{topic}/README.md" for topic in TOPICS)]


def is_here(words: Sequence[str]) -> bool:
    """Return whether a command runs on this machine in the time of a test."""
    return words[0] == "fluvial" and not any(
        word == part or (":" in part and part in word) or word.startswith(part + "=") for word in words for part in ELSEWHERE
    )


def sized(words: Sequence[str]) -> list[str]:
    """Return a command with its sizes replaced by small ones."""
    command, *rest = (word.replace("checkpoints/000040", "checkpoints/000001") for word in words[1:])
    if "--resume" in rest or command in ("export", "report"):
        return [command, *rest]
    is_pipeline = any(name in rest for name in (*MODELS, "runs/sft")) or "/" in rest[0]
    if command == "train":
        small = {
            **RUN,
            **({} if rest[0].startswith("mine:") else {"--passes.minibatches": "1"}),
            **({} if rest[0] == "sft" else ROLLOUT),
            **(PIPELINE if is_pipeline else {}),
            **NOISED.get(rest[0], {}),
        }
    elif command == "eval":
        small = {"--seeds": "1", "--samples": "2", "--steps": "2", "--micro-batch": "2"}
        small |= SIZE if rest[0] in MODELS else {}
    else:
        small = {"--steps": "2", "--micro-batch": "2"}
        small |= SIZE if rest[0] in MODELS else {}
        small |= {"--group": "2", "--count": "2"} if command == "preferences" else {}
    kept: list[str] = []
    for word in rest:
        if kept and kept[-1] in (*small, FITTED):
            kept.pop()
        else:
            kept.append(word)
    return [command, *kept, *(word for pair in small.items() for word in pair)]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folder in which a person of the README works, and change to it."""
    short_runs.shorten_runs()
    for name, row in MODELS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        tiny_pipelines.save(tiny_pipelines.ROWS[row], tmp_path / name)
    for name in REWARDS:
        (tmp_path / name).mkdir(parents=True)
        tiny_rewards.save_clip(tmp_path / name)
    (tmp_path / "mine.py").write_text(pages.mine())
    (tmp_path / "mine.toml").write_text(pages.suite())
    records = [json.dumps({"prompt": caption, "tag": "counting"}) for caption in CAPTIONS]
    for name in ("prompts.jsonl", "counting.jsonl", "geneval.jsonl"):
        (tmp_path / name).write_text("\n".join(records))
    for name in ("prompts.txt", "drawings.txt"):
        (tmp_path / name).write_text("\n".join(CAPTIONS))
    for folder in ("photos", "drawings"):
        (tmp_path / folder).mkdir()
        for number, caption in enumerate(CAPTIONS):
            Image.effect_noise((20, 16), 50 + number).save(tmp_path / folder / f"{number}.png")
            (tmp_path / folder / f"{number}.txt").write_text(caption)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    whole = prompt_sets.read_set  # of which a few are encoded
    monkeypatch.setattr(prompt_sets, "read_set", lambda *given, **named: islice(whole(*given, **named), 12))
    monkeypatch.setattr(processes, "run", lambda args, count: cli.run(args))  # what each rank runs
    return tmp_path


def supply(words: Sequence[str], home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Make the run that a command starts from, where no earlier command of the page has made it."""
    given = [word for i, word in enumerate(words) if word.startswith("runs/") and words[i - 1] != "--out"]
    for name in {Path(word).parts[1] for word in given}:
        run = home / "runs" / name
        if run.exists():
            continue
        command = ["fluvial", "train", "grpo", "--model", "stabilityai/stable-diffusion-3.5-medium"]
        command += [
            "--prompts",
            "prompts.txt",
            "--rewards",
            "pickscore",
            "--out",
            f"runs/{name}",
            "--optimizer.ema-decay",
            "0.9",
        ]
        assert cli.run(sized(command)) == 0, capfd.readouterr().err


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", STORY)
def test_the_commands_of_a_page_run(name: str, home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = [words for words in pages.commands(name) if is_here(words)]
    assert found
    for words in found:
        supply(words, home, capfd)
        code = cli.run(sized(words))
        assert code == 0, f"{shlex.join(sized(words))}\n{capfd.readouterr().err}"
