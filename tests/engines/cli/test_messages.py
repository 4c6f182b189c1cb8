"""Input that would be ignored or misread is refused or explained, in one line."""

import json
import shlex
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import launch

from fluvial.engines import run as training
from fluvial.engines.cli import main as cli
from fluvial.engines.run import recipes
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.jobs.weights import from_run
from fluvial.engines.run.record import as_record, read_record
from fluvial.models import hub


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """Configurations that the command would train; nothing is trained."""
    seen: list[TrainConfig] = []
    monkeypatch.setattr(training, "train", lambda config, console: seen.append(config))
    return seen


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("train grpo --out ''", "--out is '', expected a path; the current folder is ."),
        ("train grpo --out=", "--out is '', expected a path"),
        ("sample handwriting --lora ''", "--lora is '', expected a path"),
        ("sample handwriting --prompts 0427 typo.jsonl", "fluvial: no such file: typo.jsonl"),
        ("sample handwriting --prompts nowhere/TYPO.TXT", "fluvial: no such file: nowhere/TYPO.TXT"),
        (f"sample handwriting --prompts {'a' * 300}.csv", "fluvial: no such file: aaa"),
        ("eval handwriting --prompts typo.jsonl", "typo.jsonl cannot be read: No such file or directory"),
        ("train grpo --prompts typo.txt", "typo.txt cannot be read: No such file or directory"),
        (f"train grpo --prompts {'a' * 300}=2", "cannot be read: No such file or directory; texts go into a file"),
        ("report ''", "report takes the folder of a run, or of several, got ''"),
        ("config nosuch", "fluvial: config needs the name of a recipe, got 'nosuch'"),
        ("train grpo --config x.toml", "x.toml cannot be read"),
        ("train --config x --config=y", "--config names 2 files, expected one"),
        ("train grpo --updates 99999999999", "expected an integer in [1, 2147483648]"),
        ("train grpo --seed -1", "expected an integer in [0, 9223372036854775807]"),
        ("export x --as foo", "--as is 'foo', expected lora or merged or full or comfyui ("),
        ("train distill", "--teacher is missing: name a folder of weights"),
    ],
)
def test_input_that_would_be_misread_is_refused(typed: str, line: str, fluvial: Any) -> None:
    assert line in fluvial(*shlex.split(typed), code=2)


def test_a_file_may_come_after_other_flags(tmp_path: Path, trained: list[TrainConfig], fluvial: Any) -> None:
    record = as_record(recipes.grpo())
    (tmp_path / "run.json").write_text(json.dumps(record))
    fluvial("train", "--updates", 4, f"--config={tmp_path / 'run.json'}")
    assert trained == [replace(recipes.grpo(), updates=4)]
    with pytest.raises(ValueError, match="is '', expected a path"):
        read_record({**record, "out": ""})


def begun(out: Path, config: TrainConfig) -> None:
    """Write the record of a run to a folder."""
    out.mkdir(exist_ok=True)
    (out / "config.json").write_text(json.dumps(as_record(replace(config, out=out))))


def test_weights_that_an_interrupted_run_lacks_are_exported_by_a_command(tmp_path: Path, fluvial: Any) -> None:
    run = tmp_path / "run"
    begun(run, recipes.grpo())
    (run / "metrics.jsonl").write_text("")
    advice = f"fluvial export {run} --as merged --out {run / 'weights'}"
    assert advice in fluvial("eval", "handwriting", "--weights", run / "weights", code=2)
    with pytest.raises(ValueError, match=r"has exported no weights: .*fluvial export .* --as merged"):
        from_run(replace(recipes.grpo(), model=str(run)))


def test_a_damaged_run_is_reported_with_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    begun(run, recipes.grpo())
    (run / "metrics.jsonl").write_text('{"update": 1}\n{"update": \n{"update": 3}\n')
    (run / "summary.json").write_text("{")
    assert cli.run(["report", str(run)]) == 0
    said = capfd.readouterr().err.splitlines()
    assert [line.partition(" is damaged")[0] for line in said] == [
        f"fluvial: {run / 'metrics.jsonl'}, line 2",
        f"fluvial: {run / 'summary.json'}",
    ]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine without a network, whose Hub client has not been told so."""
    from huggingface_hub import constants

    attempts: list[Any] = []

    def refused(*where: Any) -> Any:
        attempts.append(where)
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "create_connection", refused)
    for name in hub.PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    hub._is_reachable.cache_clear()
    yield attempts
    hub._is_reachable.cache_clear()


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--rewards pickscore", "fluvial: --rewards 'pickscore': the weights yuvalkirstain/PickScore_v1 cannot be loaded"),
        ("--model nosuch/model", "model nosuch/model: it is not a folder, and the Hub gives no pipeline of that id"),
    ],
)
def test_without_a_network_the_hub_is_tried_once(
    typed: str, says: str, offline: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """One line says so, one the error, which names the reward or the model, before its prompts."""
    assert cli.run(["train", "grpo", *typed.split()]) == 2
    unreachable, error = capfd.readouterr().err.splitlines()
    assert "cannot be reached (Network is unreachable): only its cache is read" in unreachable
    assert says in error
    assert len(offline) == 1


@pytest.mark.long
def test_a_run_that_resumes_may_end_earlier_and_says_so(tmp_path: Path, fluvial: Any) -> None:
    """Without a checkpoint it says that it begins again; files of weights are readable like all others."""
    flags = [*launch.SMALL, "--passes.minibatches", 1, "--optimizer.schedule", "cosine", "--final-samples", 4]
    out = tmp_path / "run"
    fluvial("train", "grpo", "--out", out, *flags, "--updates", 2)
    assert len({file.stat().st_mode & 0o777 for file in (out / "weights").iterdir()}) == 1
    resumed = ["train", "grpo", "--resume", "--out", out, "--updates"]
    said = fluvial(*resumed, 1).replace("\n", " ")
    assert "has 2 updates, more than `updates` 1: nothing to train" in said
    assert "0 updates on 8 samples each: 0 batches of" in said
    assert json.loads((out / "config.json").read_text())["resume"] is False  # `train config.json` is a new run
    line = fluvial(*resumed, 3, code=2)
    assert "--updates is 3, expected at most 2: the learning rate was planned for 2 updates, and would go from 0 to" in line
    shutil.rmtree(out / "checkpoints")
    assert "holds no checkpoint yet: the run starts from the beginning" in fluvial(*resumed, 1).replace("\n", " ")


def test_a_recipe_of_another_objective_or_sampler_and_a_run(
    tmp_path: Path, trained: list[TrainConfig], fluvial: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """The former does not resume it; the latter is said not to count."""
    begun(tmp_path / "run", recipes.grpo())
    resumes = ("--resume", "--out", str(tmp_path / "run"))
    assert "holds a run with the method grpo, and nft has nft" in fluvial("train", "nft", *resumes, code=2)
    assert not trained
    assert cli.run(["train", "cps", *resumes]) == 0
    assert "sampling.sampler flow_sde there, cps asked for" in launch.one_line(capfd.readouterr().err)
    assert trained[0].method.sampling.sampler.kind == "flow_sde"
    file = tmp_path / "run.toml"  # changed since
    file.write_text(f'recipe = "grpo"\nout = "{tmp_path}/run"\nupdates = 8\nseed = 0\n')
    assert cli.run(["train", str(file), "--resume"]) == 0
    assert "updates 100 there, 8 asked for" in launch.one_line(capfd.readouterr().err)
    assert cli.run(["train", str(file), "--resume", "--updates", "8"]) == 0
    assert not capfd.readouterr().err


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--lora.rank 4", "lora.alpha stays 32: at rank 4 the adapter's scale, alpha / rank, is 8"),
        ("--lora.rank 4 --lora.alpha 8", ""),
        ("--model mine:Net", "optimizer.lr 0.0003 and kl.coef 0.04 of the recipe grpo were chosen for large published"),
        ("--model mine:Net --optimizer.lr 1e-3 --kl.coef 0", ""),
    ],
)
@pytest.mark.usefixtures("trained")
def test_settings_that_follow_from_others_are_said(flags: str, line: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "grpo", *flags.split()]) == 0
    said = capfd.readouterr().err
    assert line in launch.one_line(said) if line else not said


def test_preferences_do_not_go_into_a_folder_of_something_else(tmp_path: Path, fluvial: Any) -> None:
    (tmp_path / "thesis.tex").write_text("")
    line = fluvial("preferences", "handwriting", "--count", 1, "--out", tmp_path, code=2)
    assert "holds other files: choose a new or an empty folder" in line
