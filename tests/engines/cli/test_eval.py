"""`fluvial eval` of runs, checkpoints and pipelines: the numbers of the run, a base on the same noise, and wrong input."""

import csv
import json
import shlex
import shutil
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from helpers import launch, tiny_pipelines
from PIL import Image
from torch import Tensor

from fluvial.engines.cli import main as cli
from fluvial.engines.cli.train import configure

TAGGED = [("a red fox", "colors"), ("two cats", "counting"), ("an owl", "colors")]
SIZE = ["--pipeline.height", "16", "--pipeline.width", "16"]
SMALL = (
    "--sampling.prompts 2 --sampling.group 2 --sampling.steps 3 --micro-batch 2 --update-micro-batch rollout --updates 2 "
    "--passes.minibatches 1 --evaluation.every 1 --checkpoint.every 1"
)
# Trained without guidance at 16 x 16, evaluated with it at 32 x 16, in more steps, on prompts and by evaluators of its own.
OWN = "--evaluation.guidance 4.5 --evaluation.height 32 --evaluation.steps 4 --evaluation.seeds 2 --evaluation.samples 4"
AS_EVALUATED = "--pipeline.height 32 --pipeline.width 16 --steps 4 --guidance 4.5 --seeds 2 --micro-batch 2"


def brightness(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Score images by their mean."""
    return images.flatten(1).mean(1)


def passes(images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> list[float]:
    """Pass the images of one tag, those of a height that was asked for."""
    return [float(record["tag"] == "colors" and images.shape[-2] == 32) for record in metadata]


@pytest.fixture(scope="module", autouse=True)
def mine() -> Iterator[None]:
    """User-defined module with evaluators."""
    sys.modules["evaluators"] = types.SimpleNamespace(brightness=brightness, passes=passes)  # type: ignore[assignment]
    yield
    del sys.modules["evaluators"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny SD3, a run on it with an evaluation of its own, and a run of the built-in model."""
    folder = tmp_path_factory.mktemp("evaluated")
    tiny_pipelines.save(tiny_pipelines.ROWS["sd3"], folder / "sd3")
    (folder / "train.txt").write_text("a dog\na house\na tree\n")
    lines = (json.dumps({"prompt": prompt, "tag": tag}) for prompt, tag in TAGGED)
    (folder / "tagged.jsonl").write_text("\n".join(lines) + "\n")
    own = [*OWN.split(), "--evaluation.prompts", str(folder / "tagged.jsonl")]
    own += ["--evaluation.rewards", "evaluators:passes", "evaluators:brightness"]
    model = ["--model", str(folder / "sd3"), "--prompts", str(folder / "train.txt"), *launch.rewarded(*SIZE)]
    typed = ["train", "grpo", *model, *SMALL.split(), *own, "--optimizer.lr", "0.01", "--lora.rank", "4"]
    typed += ["--sampling.guidance.scale", "1", "--pipeline.text-cache", str(folder / "texts")]
    assert cli.run([*typed, "--out", str(folder / "run")]) == 0
    launch.trained(folder / "codes", "--updates", "2")
    return folder


def table(folder: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return the rows of an evaluation's table, or of a run's summary, by evaluator, part and name."""
    file = folder / "table.json"
    rows = json.loads((file if file.exists() else folder / "summary.json").read_text())
    found = rows["rows"] if file.exists() else rows["evaluation"]
    return {(row["evaluator"], row["part"], row["name"]): row for row in found}


def test_a_run_is_evaluated_as_its_settings_say(folder: Path) -> None:
    """With guidance, size, prompts, seeds and evaluators that its training has not; in its records and its summary."""
    before, *_, after = (record for record in launch.records(folder / "run") if "score" in record)
    assert set(before["score"]) == {"evaluators:passes", "evaluators:brightness"}
    for record in (before, after):
        assert record["tags"]["colors"]["evaluators:passes"] == 1  # so the images have the evaluation's size
        assert record["tags"]["counting"]["evaluators:passes"] == 0
        assert {tag: part["samples"] for tag, part in record["tags"].items()} == {"colors": 4, "counting": 2}
        assert record["overall"] == {"evaluators:passes": 0.5}
    part = next(record for record in launch.records(folder / "run") if "score" in record and record["update"] == 1)
    assert {tag: found["samples"] for tag, found in part["tags"].items()} == {"colors": 2, "counting": 2}
    rows = table(folder / "run")
    assert rows["evaluators:passes", "tags", "mean over tags"]["mean"] == 0.5
    assert rows["evaluators:passes", "all", ""]["mean"] == pytest.approx(2 / 3)
    bright = rows["evaluators:brightness", "all", ""]
    assert bright["mean"] == after["score"]["evaluators:brightness"]
    assert bright["base_mean"] == before["score"]["evaluators:brightness"]
    assert bright["difference"] != 0
    record = json.loads((folder / "run" / "config.json").read_text())
    assert record["method"]["sampling"]["guidance"]["scale"] == 1
    assert (folder / "run" / "samples" / "update-0001.csv").exists()


BRIGHT = ("evaluators:brightness", "all", "")


def test_a_checkpoint_has_the_numbers_of_its_run(folder: Path, tmp_path: Path, fluvial: Any) -> None:
    """To the bit, and so has the model that the run started from."""
    shown = fluvial("eval", folder / "run" / "checkpoints" / "000002", "--base", "start", "--out", tmp_path)
    assert table(tmp_path) == table(folder / "run")
    assert "against the base on the same noise" in shown
    assert len(list((tmp_path / "images").glob("*.png"))) == len(list((tmp_path / "base").glob("*.png"))) == 6


def test_guidance_that_is_typed_replaces_the_runs(folder: Path, tmp_path: Path, fluvial: Any) -> None:
    """Without guidance the same weights draw other images; prompts and evaluators stay those of the run."""
    for name, scale in (("guided", 4.5), ("plain", 1)):
        fluvial("eval", folder / "run", "--guidance", scale, "--out", tmp_path / name)
    guided, plain, run = table(tmp_path / "guided"), table(tmp_path / "plain"), table(folder / "run")
    assert guided[BRIGHT]["mean"] == pytest.approx(run[BRIGHT]["mean"], abs=1e-4)  # of the merged weights, to rounding
    assert abs(plain[BRIGHT]["mean"] - guided[BRIGHT]["mean"]) > 1e-3
    assert set(plain) == set(guided) == set(run)


def test_a_pipeline_with_an_adapter_against_itself_without(folder: Path, tmp_path: Path, fluvial: Any) -> None:
    """The run's adapter on the pipeline is what the run evaluated; a base may be a run or a folder of weights, too."""
    asked = ["--prompts", folder / "tagged.jsonl", "--rewards", "evaluators:brightness", "evaluators:passes", "jpeg"]
    another = f"{folder}/run/../sd3"  # another name of the same folder
    adapter = ["eval", another, *asked, *AS_EVALUATED.split(), "--lora", folder / "run" / "lora"]
    fluvial(*adapter, "--base", "start", "--out", tmp_path / "start")
    found, run = table(tmp_path / "start"), table(folder / "run")
    assert {key[0] for key in found} == {"evaluators:brightness", "evaluators:passes", "jpeg"}
    key = ("evaluators:brightness", "tag", "colors")
    for name in ("mean", "base_mean", "difference", "std"):
        assert found[key][name] == pytest.approx(run[key][name], abs=1e-4)
    for number, base in enumerate((folder / "run", folder / "run" / "weights")):
        fluvial(*adapter, "--base", base, "--out", tmp_path / f"base{number}")
        assert table(tmp_path / f"base{number}")[BRIGHT]["difference"] == pytest.approx(0, abs=1e-4)
    with (tmp_path / "start" / "scores.csv").open(newline="") as stream:
        first, *_ = csv.DictReader(stream)
    assert (first["sample"], first["prompt"], first["tag"]) == ("00000-0", "a red fox", "colors")
    assert float(first["base jpeg"]) != 0


@pytest.mark.long
def test_a_base_may_be_a_checkpoint(folder: Path, tmp_path: Path, fluvial: Any) -> None:
    """Of the run itself or of another; one process evaluates what two ranks per sample trained."""
    copy, both = tmp_path / "run", {}
    shutil.copytree(folder / "run", copy)
    record = json.loads((copy / "config.json").read_text())
    record["engine"]["context_parallel"] = record["engine"]["replicas"] = 2
    (copy / "config.json").write_text(json.dumps(record))
    for number in (1, 2):
        base = folder / "run" / "checkpoints" / f"00000{number}"
        fluvial("eval", copy / "checkpoints" / "000002", "--base", base, "--out", tmp_path / f"{number}")
        both[number] = table(tmp_path / f"{number}")[BRIGHT]
    assert both[2]["difference"] == pytest.approx(0, abs=1e-6)
    assert both[2]["base_mean"] == pytest.approx(both[1]["mean"], abs=1e-6)
    assert abs(both[1]["difference"]) > 1e-5
    codes = ["eval", folder / "codes", "--samples", 4, "--out", tmp_path / "codes"]
    fluvial(*codes, "--base", folder / "codes" / "checkpoints" / "000002")
    assert table(tmp_path / "codes")["reward", "all", ""]["difference"] == pytest.approx(0, abs=1e-6)


def test_a_built_in_run_scores_as_at_its_end(folder: Path, tmp_path: Path, fluvial: Any) -> None:
    """Its held-out codes, its evaluators and its number of samples come from its record."""
    summary = json.loads((folder / "codes" / "summary.json").read_text())
    shown = fluvial("eval", folder / "codes", "--base", "start", "--out", tmp_path)
    for evaluator in ("reward", "heldout"):
        row = table(tmp_path)[evaluator, "all", ""]
        assert row["samples"] == summary["eval_samples"] == 8
        assert row["mean"] == pytest.approx(summary[f"{evaluator}_score_after"], abs=1e-6)
        assert row["base_mean"] == pytest.approx(summary[f"{evaluator}_score_before"], abs=1e-6)
    assert "held-out prompts, 8 samples of" in " ".join(shown.split())


SUITE = """
rewards = ["evaluators:passes", "evaluators:brightness"]
seeds = 3
steps = 3

[[prompts]]
prompt = "a red fox"
tag = "colors"

[[prompts]]
prompt = "two cats"
tag = "counting"
"""


def test_a_suite_of_ones_own_is_one_command(folder: Path, tmp_path: Path, fluvial: Any) -> None:
    """Prompts, evaluators and sampling of one file, beside what the run started from, with intervals, as JSON."""
    (tmp_path / "mine.toml").write_text(SUITE)
    suite = ["eval", folder / "run", "--suite", tmp_path / "mine.toml"]
    shown = json.loads(fluvial(*suite, "--json"))
    assert shown["model"] == str(folder / "run")
    settings = shown["settings"]
    assert (settings["seeds"], settings["steps"], settings["base"], settings["guidance"]) == (3, 3, "start", 4.5)
    found = {(row["evaluator"], row["part"], row["name"]): row for row in shown["rows"]}
    everything = found[BRIGHT]
    assert everything["samples"] == 2 * 3
    assert everything["mean_low"] <= everything["mean"] <= everything["mean_high"]
    assert everything["low"] <= everything["difference"] <= everything["high"]
    assert everything["difference"] == pytest.approx(everything["mean"] - everything["base_mean"], abs=1e-6)
    assert found["evaluators:passes", "tag", "colors"]["mean"] == 1  # at the run's evaluation size
    assert found["evaluators:passes", "tags", "mean over tags"]["mean"] == 0.5

    typed = ["--seeds", 1, "--rewards", "evaluators:brightness", "--steps", 2, "--out", tmp_path / "out"]
    printed = "".join(fluvial(*suite, *typed).split())  # a long path is broken over lines
    assert "mine.toml,2samplesof" in printed
    assert "2steps,guidance4.5" in printed
    assert {key[0] for key in table(tmp_path / "out")} == {"evaluators:brightness"}
    assert table(tmp_path / "out")[BRIGHT]["samples"] == 2


def test_a_built_in_suite_takes_its_prompt_set(folder: Path, fluvial: Any) -> None:
    """On a pipeline without a run there is nothing to compare with; fewer samples where a number is typed."""
    typed = ["--suite", "compression", "--steps", 1, "--samples", 4, "--seeds", 1, "--json"]
    shown = json.loads(fluvial("eval", folder / "sd3", *SIZE, *typed))
    assert shown["settings"]["base"] is None
    rows = {(row["part"], row["name"]): row for row in shown["rows"]}
    assert rows["all", ""]["samples"] == 4
    assert {name for part, name in rows if part == "tag"} <= {"alone", "activity"}


PROMPTED = "{tmp}/sd3 --prompts {tmp}/train.txt --rewards jpeg"
WRONG = [
    ("{tmp}/sd3 --rewards jpeg", "needs prompts to evaluate on: set --prompts to a file"),
    ("{tmp}/sd3 --prompts {tmp}/train.txt", "--rewards is empty, expected at least one evaluator"),
    ("{tmp}/sd3 --prompts {tmp}/nothing.txt --rewards jpeg", "nothing.txt cannot be read: No such file"),
    ("{tmp}/sd3 --prompts {tmp}/train.txt --rewards jpg", "did you mean 'jpeg'?"),
    ("{tmp}/sd3 --prompts {tmp}/train.txt=2 --rewards jpeg", "a weight, which has no effect on evaluations"),
    (f"{PROMPTED}=2", "evaluators have no weights"),
    (f"{PROMPTED} --seeds 0", "--seeds is 0, expected an integer in [1, 1048576]"),
    (f"{PROMPTED} --base start", "set --weights or --lora"),
    (f"{PROMPTED} --lora {{tmp}}/no", "no is neither a file nor a folder"),
    (f"{PROMPTED} --weights {{tmp}}/no", "no: there is no such folder"),
    (f"{PROMPTED} --guidance -1", "--guidance is -1.0,"),
    ("handwriting --rewards nice", "--rewards is 'nice', expected one of characters"),
    ("handwriting --base start", "there is nothing to compare with it"),
    ("handwriting --base {tmp}/nowhere", "nowhere', expected start, the folder of a run, a checkpoint or a"),
    ("handwriting --base {tmp}/run", "a run of {tmp}/sd3, and handwriting is evaluated: expected a run of the same"),
    ("{tmp}/run --base {tmp}/codes", "a run of handwriting, and {tmp}/sd3 is evaluated"),
    (
        "{tmp}/run --weights {tmp}/run/weights",
        "--weights and --lora have no effect with {tmp}/run, a run with its own weights;",
    ),
    ("{tmp}/run --pipeline.height 17", "17"),
    ("{tmp}/run --suite gen-eval", "did you mean 'geneval'?"),
    ("{tmp}/run --suite {tmp}/none.toml", "none.toml cannot be read: No such file"),
    ("handwriting --suite ocr", "prompt set @ocr, heldout record 1"),
    ("{tmp}/run --pipeline.sizes 16x16 16x32", "--pipeline.width have no effect with --pipeline.sizes"),
    ("{tmp}/alone/000001", "is a checkpoint, but {tmp} holds no run"),
    ("{tmp}/codes/checkpoints/000002 --negative 1234", "--negative is '1234', expected '': that is the negative prompt"),
]


@pytest.mark.parametrize(("typed", "says"), WRONG, ids=[typed for typed, _ in WRONG])
def test_wrong_input_is_one_line(folder: Path, typed: str, says: str, fluvial: Any) -> None:
    """Exit code 2."""
    (folder / "alone" / "000001").mkdir(parents=True, exist_ok=True)
    (folder / "alone" / "000001" / "manifest.json").write_text("{}")
    size = SIZE if "/sd3 " in typed else []
    line = fluvial("eval", *typed.format(tmp=folder).split(), *size, code=2)
    assert line.startswith("fluvial: ")
    assert says.format(tmp=folder) in line


def test_two_ranks_find_the_same(tmp_path: Path, fluvial: Any) -> None:
    """The whole command, to the bit: scores, table and sheet, and each image once."""
    typed = ["eval", "handwriting", "--seeds", "1", "--samples", "5", "--steps", "2", "--micro-batch", "2", "--out"]
    fluvial(*typed, tmp_path / "one")
    done = launch.fluvial(*typed, str(tmp_path / "two"), ranks=2)
    assert done.returncode == 0, done.stderr
    assert table(tmp_path / "one") == table(tmp_path / "two")
    for name in ("scores.csv", "table.csv", "sheet.png"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    images = [sorted(path.name for path in (tmp_path / name / "images").iterdir()) for name in ("one", "two")]
    assert images[0] == images[1]
    assert len(images[0]) == 5


def test_samples_and_preferences_are_drawn_with_a_run_and_its_checkpoints(tmp_path: Path, fluvial: Any) -> None:
    """A checkpoint draws what the export of its weights draws; so does a run that has exported nothing yet."""
    run, prompts = tmp_path / "run", ["--prompts", "0427", "--each", 2]
    flags = [*launch.SMALL, "--passes.minibatches", 1, "--updates", 2, "--optimizer.lr", 0.05]
    fluvial("train", "grpo", "--out", run, *flags)
    drawn = {}
    for name, typed in {
        "run": [run],
        "checkpoint": [run / "checkpoints" / "000002"],
        "weights": ["handwriting", "--weights", run / "weights", "--steps", 4],
        "base": ["handwriting", "--steps", 4],
    }.items():
        fluvial("sample", *cast(list[Any], typed), *prompts, "--out", tmp_path / f"{name}.png")
        with Image.open(tmp_path / f"{name}.png") as image:
            drawn[name] = image.convert("L").crop((0, 40, image.width, image.height)).tobytes()
    assert drawn["run"] == drawn["checkpoint"] == drawn["weights"]
    assert drawn["run"] != drawn["base"]
    shutil.rmtree(run / "weights")
    pairs = tmp_path / "pairs of it"
    said = fluvial("preferences", run, "--count", 2, "--group", 4, "--out", pairs)
    assert (pairs / "preferences.jsonl").is_file()
    first, then = (shlex.split(line) for line in said.splitlines()[-2:])
    assert fluvial(*first[1:-1]).startswith("exported")
    assert configure("train", then[2:]).pipeline.weights == pairs / "weights"
    assert "--lora has no effect with" in fluvial("sample", run, "--lora", "x", *prompts, code=2)


def test_a_run_of_a_user_defined_model_is_evaluated(tmp_path: Path, fluvial: Any) -> None:
    """With its exported weights, beside the model that it started from."""
    (tmp_path / "prompts.txt").write_text("0427\n1999\n3141\n8650\n")
    own = ["--model", "helpers.doors:adapter", "--prompts", tmp_path / "prompts.txt", "--rewards", "helpers.doors:bold"]
    fluvial("train", "helpers.doors:recipe", "--out", tmp_path / "run", *own)
    fluvial("eval", tmp_path / "run", "--base", "start", "--out", tmp_path / "scores")
    assert "helpers.doors:bold" in (tmp_path / "scores" / "table.json").read_text()
    images = [path for part in ("base", "images") for path in (tmp_path / "scores" / part).glob("*.png")]
    assert len({image.read_bytes() for image in images}) > len(images) // 2
