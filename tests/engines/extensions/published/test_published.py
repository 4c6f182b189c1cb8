"""Published runs: each resolves to a configuration, says where its settings were read, and leaves nothing unsaid."""

import inspect
import json
import math
import re
import tokenize
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from helpers import launch

import fluvial.engines
from fluvial.engines.cli import main as cli
from fluvial.engines.cli.runs import describe_run
from fluvial.engines.cli.train import _find_recipe
from fluvial.engines.errors import UsageError
from fluvial.engines.extensions.published import runs as published
from fluvial.engines.extensions.published.resolve import ASSUMED, compare_settings, resolve
from fluvial.engines.extensions.published.runs import find_run, load_published
from fluvial.engines.run.recipes import grpo
from fluvial.engines.run.record import as_record, read_record
from fluvial.engines.scoring.options import parse
from fluvial.engines.scoring.registry import select
from fluvial.models import LoraConfig
from fluvial.models.lora import add_lora, find_lora_layers
from fluvial.models.pipelines.sd3 import SD3
from fluvial.models.rewards.table import REWARD_MODELS
from fluvial.models.shapes import MODELS

RUNS = load_published()


@cache
def config_of(name: str) -> Any:
    return resolve(find_run(name))


@cache
def rows_of(name: str) -> dict[str, Any]:
    return {row.setting: row for row in compare_settings(find_run(name))}


def test_every_run_says_where_it_was_read() -> None:
    """Each setting that is not assumed has a source with repository, path and commit; no run lacks a model or a method."""
    assert len(RUNS) == 104
    for name, run in RUNS.items():
        assert run.name == name
        assert run.algorithm
        assert run.model
        assert run.sources
        assert all(source.repo and source.path and source.commit for source in run.sources)
        assert all(setting.source is not None for path, setting in run.settings.items() if path in ("model", "train"))


def test_the_clients_of_runs_have_the_options_that_are_set() -> None:
    """A reward on a server is a client with options. Only that it may read pickles is left to the person who runs it.

    Options of reward models are those that the models have.
    """
    with_options = {text for name in RUNS for text in config_of(name).rewards if ":" in text}
    models = {text for text in with_options if text.partition(":")[0] in REWARD_MODELS}
    assert models < with_options
    for text in models:
        name, options, _ = parse(text, REWARD_MODELS, field="rewards")
        assert {*options} <= {*inspect.signature(REWARD_MODELS[name].make).parameters}
    for text in with_options - models:
        with pytest.raises(UsageError, match="trust_pickle is False"):
            select({}, (text,))
        assert callable(select({}, (f"{text},trust_pickle=true",))[text.partition(":")[0]][0])


@cache
def flat_record(name: str) -> dict[str, Any]:
    """Return the values of a run's configuration by dotted name."""
    return {published.as_flag(field): value for field, value in published.flatten(as_record(config_of(name))).items()}


@pytest.mark.parametrize("name", RUNS)
def test_a_published_run_is_a_configuration(name: str) -> None:
    """It has a name on the command line, round-trips through JSON, and what is no setting is a deviation or always done.

    Each setting is what its source states, differs for a reason that is told, or is assumed.
    """
    run, rows, settings = find_run(name), rows_of(name), flat_record(name)
    assert set(run.published) | set(run.deviations) | set(settings) <= set(rows)
    printed = describe_run(run)
    assert all(setting in printed for setting in rows)
    config = config_of(name)
    assert _find_recipe(name)() == read_record(json.loads(json.dumps(as_record(config)))) == config
    assert (config.model, str(config.out)) == (run.model, f"runs/{name}")
    for deviation in run.deviations.values():
        assert deviation.kind in ("hardware", "precision", "reward", "model", "method")
        assert deviation.why
    tables = {path.rpartition(".")[0] for path in settings} | {"sampling.sampler", "noising"}
    for path, value in run.published.items():
        if path not in {*settings, *tables, *run.deviations, *run.fixed}:
            assert published.load_constants()[path] == value, path
    for path in settings:
        row, setting = rows[path], run.settings.get(path)
        is_stated = path in run.published or (setting is not None and setting.source is not None)
        if row.why == ASSUMED:
            assert (is_stated, row.published, row.source) == (False, "not stated", None), path
        else:
            assert is_stated or path in run.deviations, path


# Settings that were wrong, or were read in another source than that of the run; those of test_published_numbers.py are left
# out.
READ_AGAIN: dict[tuple[str, str], Any] = {
    **{
        (name, "sampling.guidance.negative"): " "
        for name, run in RUNS.items()
        if run.settings["model"].value.startswith("Qwen/") and run.settings.get("sampling.guidance.scale", (1.0,))[0] == 4.0
    },
    ("verl_omni/sd3.5-medium/dpo-offline-lora", "sampling.guidance.negative"): " ",
    ("verl_omni/wan2.2-ti2v-5b/hpsv3-dancegrpo", "sampling.guidance.negative"): " ",
    ("flow_grpo/sd3.5-medium/ocr", "sampling.guidance.negative"): "",
    ("flow_grpo/wan2.1-t2v-1.3b/ocr", "sampling.guidance.negative"): "",
    ("flow_grpo/sd3.5-medium/pickscore-fast", "optimizer.ema_repeats"): 2,
    ("flow_grpo/flux.1-dev/geneval-fast", "optimizer.ema_repeats"): 6,
    ("flow_grpo/flux.1-dev/pickscore-fast", "optimizer.ema_repeats"): 6,
    ("flow_cps/flux.1-dev/pickscore", "optimizer.ema_repeats"): 6,
    ("flow_cps/qwen-image/pickscore", "sampling.window.low"): 3,
    ("flow_cps/qwen-image/pickscore", "sampling.window.high"): 5,
    # Flow-GRPO's average takes in the weights once per micro-batch of a GPU; others follow per update, or per rollout.
    ("flow_grpo/sd3.5-medium/ocr", "optimizer.ema_repeats"): 576 // (32 * 9),
    ("flow_grpo/sd3.5-medium/ocr-4gpu", "optimizer.ema_repeats"): 128 // (4 * 8),
    ("tempflow_grpo/sd3.5-medium/geneval", "optimizer.ema_repeats"): 2,
    ("flow_factory/flux.1-dev/grpo", "optimizer.ema_interval"): 4 * 2,
    ("dancegrpo/flux.1-dev/hpsv2-8gpu", "optimizer.ema_interval"): 2,
    ("ddpo/sd1.4/prompt_image_alignment", "checkpoint.every"): 2,
    ("dancegrpo/sd1.4/hpsv2", "sampling.window.high"): None,  # the last step takes noise, too, and is not trained
    ("dancegrpo/sd1.4/hpsv2", "trained.fraction"): 0.98,
    ("dancegrpo/hunyuanvideo/videoalign-vq", "advantage.extremes"): 4,
    ("dgpo/sd3.5-medium/geneval", "reference"): "base",  # use_ema_ref false
    # Windows: per call (Flow-GRPO-Fast), per sample (verl-omni), moving (MixGRPO, UniRL), one by one (UniRL).
    ("flow_grpo/bagel-7b/pickscore-full", "sampling.window.draw"): "call",
    ("flow_grpo/sd3.5-medium/geneval-fast-nocfg", "sampling.window.draw"): "call",
    ("verl_omni/qwen-image/ocr-flowdppo", "sampling.window.draw"): "sample",
    ("mixgrpo/flux.1-dev/multi-reward", "sampling.window.kind"): "moving",
    ("mixgrpo/flux.1-dev/multi-reward", "sampling.window.every"): 25,
    ("mixgrpo/flux.1-dev/multi-reward", "sampling.window.high"): 23,
    ("unirl/sd3.5-medium/mixgrpo", "sampling.window.kind"): "moving",
    ("unirl/sd3.5-medium/mixgrpo", "sampling.window.stride"): 3,
    ("unirl/sd3.5-medium/flowgrpo", "sampling.window.kind"): "scattered",
    ("unirl/hunyuanvideo-1.5/dancegrpo", "sampling.window.kind"): "scattered",
    ("unirl/hunyuanvideo-1.5/dancegrpo", "sampling.window.size"): 8,
    ("unirl/hunyuanvideo-1.5/dancegrpo", "sampling.window.high"): 9,
    # t is uniform over 1,000 timesteps, of which diffusers' scheduler has 999; SD3's shift is the mean of the logit.
    ("diffusion_dpo/sd1.5/pickapic", "sampling.steps"): 999,
    ("diffusion_dpo/sdxl/pickapic", "sampling.steps"): 999,
    ("verl_omni/sd3.5-medium/dpo-offline-lora", "noising.levels.kind"): "logit_normal",
    ("verl_omni/sd3.5-medium/dpo-offline-lora", "noising.levels.mean"): pytest.approx(math.log(3)),
    ("verl_omni/qwen-image/ocr-online-dpo", "noising.levels.kind"): "logit_normal",
}
# What a source states where fluvial does something else.
DIFFERS = {
    ("diffusion_dpo/sd1.5/pickapic", "sampling.steps"): "t uniform over timesteps 0 to 999",
    ("diffusion_dpo/sdxl/pickapic", "sampling.steps"): "t uniform over timesteps 0 to 999",
    ("d3po/sd1.5/compressibility", "passes.minibatches"): "20 updates of 1 pair",
}


def test_what_the_sources_of_these_settings_state() -> None:
    """The value is ours, and has the source or the words of a source, except where the default is meant."""
    assert sum(value == " " for value in READ_AGAIN.values()) == 11
    for (name, path), value in READ_AGAIN.items():
        assert flat_record(name)[path] == value, (name, path)
        assert value is None or rows_of(name)[path].why != ASSUMED, (name, path)
    for (name, path), words in DIFFERS.items():
        assert find_run(name).deviations[path].published == words
    assert rows_of("flow_grpo/qwen-image/pickscore")["sampling.guidance.negative"][1:3] == ('" "', '" "')
    assert rows_of("flow_grpo/sd3.5-medium/pickscore-fast")["sampling.shared_noise"].published.startswith("true: 2 x 9")
    vq = find_run("dancegrpo/hunyuanvideo/videoalign-vq").published["advantage.combine"]
    assert vq.startswith("the losses of both rewards are summed")
    assert config_of("rtdmd/sd3.5-medium/multi-reward").method.advantage.combine == "gdpo"
    assert set(find_run("spo/sdxl/4k-prompts").settings["lora.targets"].value) == {"to_q", "to_k", "to_v", "to_out.0"}
    video = find_run("unirl/hunyuanvideo-1.5/dancegrpo")
    assert set(video.deviations) == {"model", "prompts", "precision.trainable", "rewards"}
    assert not any(name.startswith("sampling") for name in find_run("ddpo/sd1.4/compressibility").deviations)


@pytest.mark.parametrize(
    ("name", "path", "repo"),
    [
        ("flow_grpo/sd3.5-medium/pickscore-fast", "advantage.drop_zero", "IamCreateAI/FlowCPS"),
        ("diffusion_dpo/sd1.5/pickapic", "optimizer.lr", "SalesforceAIResearch/DiffusionDPO"),
        *((name, "optimizer.lr", "yifan123/flow_grpo") for name in RUNS if name.startswith("tempflow_grpo/")),
        ("diffusion_dpo/sd1.5/pickapic", "seed", None),
    ],
)
def test_a_setting_names_its_source_or_is_said_to_be_assumed(name: str, path: str, repo: str | None) -> None:
    row = rows_of(name)[path]
    assert (row.source and row.source.repo, row.why) == (repo, "" if repo else ASSUMED)
    assert (row.published == "not stated") == (repo is None)


def test_what_the_settings_of_these_runs_amount_to() -> None:
    """Steps that take noise and those that are trained on, counts of branches, and the average that makes rollouts."""
    ocr, dance = (config_of(name).method for name in ("flow_grpo/sd3.5-medium/ocr", "dancegrpo/flux.1-dev/hpsv2-16gpu"))
    assert (ocr.sampling.steps, ocr.sampling.window.kind, ocr.trained.kind, ocr.trained.count(10)) == (10, "all", "first", 9)
    assert ocr.kl.weight_of(ocr.sampling.sampler.rule) == "rate"
    assert dance.sampling.window.range(dance.sampling.steps) == (0, 15)  # the last step takes no noise
    assert (dance.trained.count(15), dance.trained.kind) == (9, "random")
    for task in ("flux.1-dev/hpsv3", "sd3.5-medium/geneval"):  # 6 branches at each of 9 steps; 4 noises share a prompt
        sampling = config_of(f"tempflow_grpo/{task}").method.sampling
        assert sampling.window.trunk(sampling.steps, sampling.group) == 54
        assert (sampling.prompts, sampling.group) == (48, 4 * 54)
    nft = config_of("diffusion_nft/sd3.5-medium/ocr").method  # 0 for 75 updates, then 0.0075 per update up to 0.999
    assert [nft.old.compute_decay(updates // 2, updates) for updates in (75, 77, 1000)] == pytest.approx([0.0, 0.015, 0.999])
    offline, online = (config_of(name) for name in ("diffusion_dpo/sd1.5/pickapic", "verl_omni/qwen-image/ocr-online-dpo"))
    assert (offline.makes_samples, online.makes_samples, offline.method.sampling.prompts) == (False, True, 2048)
    assert flat_record("diffusion_dpo/sdxl/pickapic")["noising.levels.kind"] == "schedule"
    assert flat_record("verl_omni/qwen-image/ocr-online-dpo")["noising.levels.mean"] == 0
    for name in ("flow_grpo/bagel-7b/pickscore-full", "unirl/hunyuanvideo-1.5/dancegrpo"):
        assert [path for path, found in find_run(name).deviations.items() if found.kind == "model"] == ["model"]


def test_the_runs_without_deviations() -> None:
    """The number of runs that differ in hardware, precision and rewards alone does not fall."""
    elsewhere = ("hardware", "precision", "reward")
    clean = [name for name in RUNS if all(found.kind in elsewhere for found in find_run(name).deviations.values())]
    assert "flow_grpo/sd3.5-medium/ocr" in clean
    assert "diffusion_nft/sd3.5-medium/ocr" in clean
    assert "dancegrpo/flux.1-dev/hpsv2-16gpu" in clean
    assert len(clean) >= 63


def test_no_python_names_the_source_of_a_run() -> None:
    """What a source did is data: the package that reads it knows no project, repository or algorithm."""
    names = {run.name.partition("/")[0] for run in RUNS.values()}
    names |= {source.repo for run in RUNS.values() for source in run.sources}
    folder = Path(fluvial.engines.__path__[0]) / "extensions" / "published"
    files = [path for path in (*folder.rglob("*.py"), folder.parents[1] / "cli" / "runs.py") if path.name != "settings.py"]
    assert len(files) >= 4
    for path in files:
        text = path.read_text()
        assert not [name for name in names if re.search(rf"\b{re.escape(name)}\b", text)], path
        with path.open("rb") as file:
            strings = [token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.STRING]
        algorithms = {run.algorithm for run in RUNS.values()}
        assert not [text for text in strings if text.strip("\"'") in algorithms], path


def test_the_second_attention_of_sd3_is_not_adapted() -> None:
    """Flow-GRPO on SD3.5 medium adapts 191 layers with 18.8 M parameters, as its scripts do, run or recipe."""
    assert grpo("stabilityai/stable-diffusion-3.5-medium").lora.targets is None
    shapes = MODELS["sd3.5-medium"]
    for targets in (SD3.lora_targets, shapes.lora_targets, config_of("flow_grpo/sd3.5-medium/ocr").lora.targets):
        with torch.device("meta"):
            module = shapes.build()
        add_lora(module, LoraConfig(rank=32), tuple(targets or ()))
        layers = find_lora_layers(module)
        assert (len(layers), any("attn2" in name for name in layers)) == (191, False)
        trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
        assert trained == pytest.approx(18.8e6, rel=5e-3)


def test_runs_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """All are listed; one is printed side by side; an unknown name is exit code 2 with the nearest one."""
    assert cli.run(["runs"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in RUNS)
    assert cli.run(["runs", "flow_grpo/sd3.5-medium/ocr"]) == 0
    lines = capsys.readouterr().out.splitlines()
    columns = {line.split()[0]: line.split() for line in lines if line}
    assert columns["setting"] == ["setting", "published", "ours", "source", "why"]
    assert columns["optimizer.lr"][1:3] == ["0.0003", "0.0003"]
    assert columns["checkpoint.every"][1:4] == ["60", "rollouts", "120"]
    assert columns["engine.compute"][1:5] == ["fp16", "auto", "-", "[precision]"]
    assert any("int(10*0.99) = 9" in line for line in lines)
    assert any("ltt0716/flow_grpo_official" in line for line in lines)
    assert cli.run(["config", "flow_grpo/sd3.5-medium/ocr", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "stabilityai/stable-diffusion-3.5-medium"
    for command in ("runs", "train"):
        assert cli.run([command, "flow_grpo/sd3-medium/ocr"]) == 2
        assert "did you mean flow_grpo/sd3.5-medium/ocr?" in capsys.readouterr().err


def test_a_configuration_is_printed_and_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `config` prints is what `--config` reads, as JSON and as TOML, and flags go on top of it."""

    def shown(*args: Any) -> str:
        assert cli.run(["config", *map(str, args)]) == 0
        return capsys.readouterr().out

    path, toml = tmp_path / "run.json", tmp_path / "run.toml"
    typed = ["grpo", "--sampling.group", "4", "--out", tmp_path / "run"]
    first = shown(*typed, "--json")
    path.write_text(first)
    toml.write_text(shown(*typed))
    assert shown("--config", path, "--json") == shown(toml, "--json") == first
    assert json.loads(shown("--config", path, "--seed", "3", "--json")) == {**json.loads(first), "seed": 3}
    toml.write_text(
        f'out = "{tmp_path}"\nprompt_order = "distinct"\n[method]\nname = "grpo"\n[method.sampling]\ngroup = 4\n'
        '[method.sampling.window]\nkind = "random"\nsize = 2\n'
        '[method.sampling.window.tail]\nsolver = "dpmpp_2m"\nfraction = 0.4\n'
        '[method.kl]\ncoef = 0.1\nweight = "mse"\n'
    )
    printed = shown(toml, "--json")
    expected = json.loads(printed)
    assert expected["method"]["sampling"]["window"]["tail"] == {"solver": "dpmpp_2m", "fraction": 0.4, "least": 1}
    path.write_text(printed)
    expected["method"]["kl"]["weight"] = "exact"
    assert json.loads(shown("--config", path, "--kl.weight", "exact", "--json")) == expected
    for text, says in (("{", "is not JSON"), ('{"out": "x", "method": "grpo", "seeds": 1}', "unknown fields seeds")):
        path.write_text(text)
        assert cli.run(["train", "--config", str(path)]) == 2
        assert says in launch.one_line(capsys.readouterr().err)


def test_levels_of_published_runs() -> None:
    """One of each part without the first (AWM), the noisiest (UniRL), those above a level (Flow-Factory)."""

    def levels(name: str) -> tuple[Any, ...]:
        noising = config_of(name).method.noising
        found: Any = noising.levels
        return noising.each, noising.draw, found.kind, found.highest, found.skip

    assert levels("awm/sd3.5-medium/ocr") == (6, "call", "stratified", 12, 1)
    assert levels("unirl/sd3.5-medium/nft") == (9, "sample", "schedule", 9, 0)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(14)
    last = int(torch.nonzero(scheduler.timesteps >= 500).max())
    assert levels("flow_factory/sd3.5-medium/nft") == (4, "call", "stratified", last, 0)


# How blocks are put together.

BLOCKS: dict[str, dict[str, Any]] = {
    "far": {"source": {"repo": "a/b", "path": "x", "commit": "1"}, "settings": {"seed": 1, "kl": {"coef": 0.5}}, "gpus": 8},
    "guess": {"assumed": {"seed": 9, "engine.micro_batch": 4}, "unusual": ["first"]},
    "near": {
        "extends": ["far", "guess"],
        "source": {"path": "y"},
        "settings": {"rollout": {"window": {"kind": "random", "size": 2}}},
    },
}


def composed(**entry: Any) -> published.PublishedRun:
    (run,) = published._parse_runs({"block": BLOCKS, "run": {"p/m/t": entry}}, {})
    return run


def test_a_run_extends_blocks() -> None:
    """Later blocks come before earlier ones; each setting keeps the source of its block; what is stated is not assumed."""
    run = composed(extends=["near"], settings={"kl": {"coef": 0.1}}, unusual=["second"], gpus=4)
    found = {path: (setting.value, setting.source and setting.source.path) for path, setting in run.settings.items()}
    window = {"sampling.window.kind": ("random", "y"), "sampling.window.size": (2, "y")}
    assert found == {"seed": (1, "x"), "kl.coef": (0.1, "y"), "engine.micro_batch": (4, None), **window}
    assert (run.unusual, run.gpus) == (("first", "second"), 4)
    for change, expected in (  # another variant of a union drops the fields of the first
        ({}, {"kind": "random", "size": 2}),
        ({"kind": "all", "high": 5}, {"kind": "all", "high": 5}),
        ({"kind": "random", "high": 5}, {"kind": "random", "size": 2, "high": 5}),
    ):
        other = composed(extends=["near"], settings={"rollout": {"window": change}} if change else {})
        assert other.build_overlay()["method"]["sampling"]["window"] == expected


def test_a_run_that_states_nothing_is_assumed_throughout() -> None:
    """Every setting but those that are stated, of a loss of steps and of one of noised samples."""
    for objective in ("clipped", "nft"):
        stated = {"model": "m", "train": "lora", "objective": {"name": objective}}
        run = composed(source=BLOCKS["far"]["source"], settings=stated)
        rows = {row.setting: row for row in compare_settings(run)}
        assert {name for name, row in rows.items() if row.why != ASSUMED} == {"model", "train", "method.name"}
        assert [*rows] == [published.as_flag(name) for name in published.flatten(as_record(resolve(run)))]
        assert {row.published for row in rows.values() if row.why == ASSUMED} == {"not stated"}
