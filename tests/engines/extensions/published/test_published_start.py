"""Published runs start: prompt sets, built-in rewards, as many samples on other hardware; presets of fewer GPUs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny_conditioned, tiny_pipelines

from fluvial.engines.cli import main as cli
from fluvial.engines.data.prompt_sets import PROMPT_SETS
from fluvial.engines.errors import UsageError
from fluvial.engines.extensions.published.requirements import describe_accumulation, describe_requirements, list_missing
from fluvial.engines.extensions.published.resolve import resolve
from fluvial.engines.extensions.published.runs import find_run, load_published
from fluvial.engines.run.config import with_values
from fluvial.engines.run.recipes import RECIPES, fit_to_gpus
from fluvial.engines.scoring.options import parse
from fluvial.engines.scoring.registry import built_in

RUNS = load_published()
OCR = "flow_grpo/sd3.5-medium/ocr"


@pytest.mark.parametrize("name", list(RUNS))
def test_a_run_starts_or_says_what_to_bring(name: str) -> None:
    """Rewards that fluvial has, and prompt sets that come with it, with the records that the rewards need."""
    run, known = RUNS[name], built_in()
    config, missing = resolve(run), list_missing(run)
    for word in config.prompts:
        assert word.removeprefix("@") in PROMPT_SETS
    for reward in config.rewards:
        assert parse(reward, {*known}, field="rewards")[0] in known
    if config.makes_samples:
        assert config.rewards or run.deviations["rewards"].kind == "reward"
        assert ("--prompts" in missing) == (not config.prompts)
        assert ("--rewards" in missing) == (not config.rewards)
    else:
        assert missing == ["--preferences"]
    if any(reward.startswith("ocr") for reward in config.rewards):
        assert config.prompts == ("@ocr",)
    if any("form=geneval" in reward for reward in config.rewards):
        assert config.prompts == ("@geneval",)
        assert "a reward server" in missing


def test_other_hardware_keeps_the_samples_of_an_update() -> None:
    config = resolve(find_run(OCR))
    said = describe_accumulation(config, published=32, gpus=2)
    assert config.method.sampling.batch == 48 * 24
    assert said.startswith("published on 32 GPUs, here 2: an update keeps its 576 samples, 288 per GPU")
    assert said.endswith("accumulated over 32 micro-batches of up to 9")
    assert "micro-batches" not in describe_accumulation(
        with_values(config, {"engine.micro_batch": "auto"}), published=32, gpus=2
    )


@pytest.mark.parametrize(("preset", "groups"), [("1gpu", 4), ("2gpus", 8), ("8gpu", 32), ("12gpu", 48), ("64gpu", 48)])
def test_a_preset_makes_fewer_groups_and_changes_nothing_else(preset: str, groups: int) -> None:
    """With 4 GPUs as many as the published run of four; and at least one per update."""
    published = resolve(find_run(OCR))
    found, said = fit_to_gpus(published, preset)
    assert found == with_values(published, {"sampling.prompts": groups, "engine.micro_batch": "auto"})
    assert said.startswith(f"--preset {preset}: ")
    assert ("sampling.prompts" in said) == (groups != 48)
    assert f"{groups * 24} samples" in said
    four = resolve(find_run("flow_grpo/sd3.5-medium/ocr-4gpu"))
    assert fit_to_gpus(published, "4gpu")[0].method.sampling.prompts == four.method.sampling.prompts
    config = with_values(published, {"passes.minibatches": 6, "updates": 1998})
    assert fit_to_gpus(config, "1gpu")[0].method.sampling.prompts == 6


def test_a_preset_keeps_what_a_method_needs() -> None:
    """Samples that divide among the fake's updates, and a micro-batch that cannot be tried."""
    for name in ("dmd2", "refl", "cps"):
        for preset in ("1gpu", "8gpu"):
            config, _ = fit_to_gpus(RECIPES[name]("owner/name"), preset)
            assert config.method.sampling.batch < RECIPES[name]("owner/name").method.sampling.batch


def test_a_preset_is_a_number_of_gpus() -> None:
    for preset in ("", "gpu", "0gpu", "1", "-1gpu", "1gpux", "1.5gpu"):
        with pytest.raises(UsageError, match="such as 1gpu or 8gpu"):
            fit_to_gpus(resolve(find_run(OCR)), preset)


def said_of(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[dict[str, Any], str]:
    """Return the configuration that a command prints, and what it says besides."""
    assert cli.run(["config", *args, "--json"]) == 0
    shown = capsys.readouterr()
    return json.loads(shown.out), shown.err


def test_a_run_on_the_command_line_says_what_is_not_as_published(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, said = said_of(capsys, OCR)
    assert config["prompts"] == ["@ocr"]
    gpus, prompts = said.splitlines()
    assert gpus.startswith("fluvial: published on 32 GPUs, here 1: an update keeps its 576 samples")
    assert prompts == (
        "fluvial: the prompts @ocr stand in for flow_grpo dataset/ocr: --prompts FILE takes the published file"
    )
    monkeypatch.setenv("WORLD_SIZE", "32")
    _, said = said_of(capsys, OCR, "--prompts", "train.txt")
    assert said == ""


def test_a_preset_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a recipe and of a published run; what is typed beside it comes last."""
    model = ["--model", "stabilityai/stable-diffusion-3.5-medium", "--prompts", "@ocr"]
    config, said = said_of(capsys, "grpo", "--preset", "1gpu", *model, "--sampling.group", "12")
    sampling = config["method"]["sampling"]
    assert (sampling["prompts"], sampling["group"], config["engine"]["micro_batch"]) == (4, 12, "auto")
    assert said == (
        "fluvial: --preset 1gpu: sampling.prompts 4 in place of 48; a rollout has 96 samples, published 1152; every "
        "other setting stays\n"
    )
    config, _ = said_of(capsys, OCR, "--preset=2gpu", "--sampling.prompts", "6")
    assert config["method"]["sampling"]["prompts"] == 6
    assert "keeps its" not in said_of(capsys, OCR, "--preset", "2gpu")[1]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["config", "grpo", "--preset", "1gpu"], "--preset has no effect with handwriting"),
        (["config", OCR, "--preset", "one"], "--preset is 'one', expected a number of GPUs"),
        (["config", OCR, "--preset"], "--preset is"),
        (["config", "diffusion_dpo/sd1.5/pickapic", "--preset", "1gpu"], "--preset has no effect with a method"),
        (["train", OCR, "--preset", "1gpu", "--resume"], "--preset has no effect with --resume"),
        (["sample", "handwriting", "--prompts", "@ocr"], "--prompts holds the prompt set @ocr, expected texts"),
        (["plan", "flow_grpo/sd3-medium/ocr"], f"did you mean {OCR}?"),
        (["plan", OCR, "--check"], "--check makes an update of the built-in model"),
        (["plan", OCR, "--gpus", "0"], "--gpus is 0"),
    ],
)
def test_wrong_input_is_one_line(args: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(args) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert says in line


def test_what_a_run_takes() -> None:
    run = find_run(OCR)
    _, *rest = describe_requirements(run, resolve(run), gpus=1)
    found = {line.split()[0]: " ".join(line.split()[1:]) for line in rest}
    assert found["model"].startswith("stabilityai/stable-diffusion-3.5-medium, from the Hub or --model FOLDER, 5 GiB")
    assert found["reward"].startswith("ocr: 0.0")
    assert found["prompts"].startswith("@ocr: 3460 prompts to train on and 400 prompts held out, for flow_grpo dataset/ocr")
    assert found["rollout"] == "48 groups of 24 samples, 10 steps, 2 updates"
    assert found["GPUs"].startswith("published on 32 GPUs, here 1")
    assert found["start"] == f"fluvial train {OCR}"


@pytest.mark.long
def test_a_plan_says_what_a_run_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """Weights, rewards, prompts, GPUs and memory; with the settings of the run, and the GPUs that are typed."""
    assert cli.run(["plan", OCR, "--gpus", "1"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"start +fluvial train flow_grpo/sd3.5-medium/ocr$", shown, re.MULTILINE)
    assert "lora, on 1 GPU" in shown
    assert "It fits into 80 GiB" in shown


TINY = "--sampling.prompts 2 --sampling.group 2 --sampling.steps 3 --micro-batch 2 --update-micro-batch rollout --updates 2"
TINY += " --passes.minibatches 1 --checkpoint.every 2 --final-samples 2 --evaluation.every 0 --evaluation.steps 2"
TINY += " --optimizer.ema-interval 1"


@pytest.mark.long
def test_a_published_run_trains_by_its_name_and_is_evaluated(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """On the training part of a prompt set; the other part is held out, and is a suite's."""
    tiny_pipelines.save(tiny_pipelines.ROWS["sd3"], tmp_path / "sd3")
    out, size = tmp_path / "run", ["--pipeline.height", "16", "--pipeline.width", "16"]
    model = ["--model", str(tmp_path / "sd3"), "--rewards", "jpeg", *size]
    assert cli.run(["train", OCR, *model, *TINY.split(), "--out", str(out)]) == 0
    assert "stand in for flow_grpo dataset/ocr" in capfd.readouterr().err
    assert json.loads((out / "config.json").read_text())["prompts"] == ["@ocr"]
    summary = json.loads((out / "summary.json").read_text())
    assert {row["name"] for row in summary["evaluation"] if row["part"] == "source"} <= {"@ocr"}
    typed = ["--suite", "compression", "--seeds", "1", "--samples", "3", "--steps", "1", "--json"]
    assert cli.run(["eval", str(out), *typed]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert {"suite": "compression", "base": "start", "guidance": 4.5}.items() <= shown["settings"].items()
    row = next(row for row in shown["rows"] if row["part"] == "all")
    assert (row["evaluator"], row["samples"]) == ("jpeg", 3)
    assert {"base_mean", "difference", "low", "high", "mean_low", "mean_high"} <= set(row)


def test_lists_and_plans_say_what_to_bring(capsys: pytest.CaptureFixture[str]) -> None:
    """Most runs need nothing; a plan also names the memory that cannot be computed."""
    assert cli.run(["runs", "--json"]) == 0
    listed = {run["name"]: run["to_bring"] for run in json.loads(capsys.readouterr().out)}
    assert listed[OCR] == listed["flow_grpo/flux.1-dev/pickscore"] == []
    assert listed["flow_grpo/sd3.5-medium/geneval"] == ["a reward server"]
    assert listed["spo/sd1.5/4k-prompts"] == []
    assert sum(not needs for needs in listed.values()) > len(RUNS) // 2
    assert cli.run(["plan", "ddpo/sd1.4/prompt_image_alignment"]) in (0, 1)
    shown = capsys.readouterr().out
    assert "with --rewards of your own" in shown
    assert "memory   the memory of " in shown


EDITS = {
    "flow_grpo/flux.1-kontext-dev/counting": ("kontext", "--pipeline.call", "_auto_resize=false"),
    "flow_grpo/qwen-image-edit/counting": ("qwen-edit",),
    "flow_grpo/qwen-image-edit/counting-fast": ("qwen-edit",),
}


@pytest.mark.long
@pytest.mark.parametrize("name", EDITS)
def test_a_published_run_of_edits_trains_on_prompts_with_images(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It lacks prompts and a reward, and says so; a pipeline that scales by area makes images of the size asked for."""
    assert list_missing(find_run(name)) == ["--prompts", "--rewards"]
    tiny_conditioned.without_scaling(monkeypatch)
    model, *call = EDITS[name]
    lines = [
        {"prompt": text, "image": tiny_conditioned.draw_image(tmp_path / f"{number}.png", number).name}
        for number, text in enumerate(("three foxes", "four cats", "an owl"))
    ]
    (tmp_path / "edits.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = ["--model", str(tiny_conditioned.save(model, tmp_path / model)), "--prompts", str(tmp_path / "edits.jsonl")]
    words += ["--rewards", "jpeg", "--pipeline.height", "16", "--pipeline.width", "16", *call]
    words += TINY.replace("--sampling.steps 3", "").replace("--evaluation.steps 2", "").split()  # those of the run
    assert cli.run(["train", name, *words, "--out", str(tmp_path / "run")]) == 0
    said = capfd.readouterr()
    assert "asked for" not in said.out + said.err
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    ratios = [row["first_pass_max_abs_log_ratio"] for row in records if "first_pass_max_abs_log_ratio" in row]
    assert ratios[0] == 0
