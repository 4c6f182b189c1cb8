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
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

import fluvial.engines
from fluvial.core import sigmas
from fluvial.core.random import key
from fluvial.core.rollout import rollout
from fluvial.core.transitions import bind, ddim
from fluvial.engines import plugins
from fluvial.engines.cli import main as cli
from fluvial.engines.cli.runs import describe_run
from fluvial.engines.cli.train import _recipe
from fluvial.engines.errors import UsageError
from fluvial.engines.extensions.published import runs as published
from fluvial.engines.extensions.published.resolve import ASSUMED, resolve, side_by_side
from fluvial.engines.extensions.published.runs import find, load_published
from fluvial.engines.run.recipes import grpo
from fluvial.engines.run.record import as_record, read_record
from fluvial.engines.scoring.options import parse
from fluvial.engines.scoring.registry import built_in, select
from fluvial.models import LoraConfig
from fluvial.models.lora import add_lora, lora_layers
from fluvial.models.pipelines.sd3 import SD3
from fluvial.models.rewards.table import REWARD_MODELS
from fluvial.models.shapes import MODELS

RUNS = load_published()
TRAINED = [name for name, run in RUNS.items() if not run.needs]
ATTENTION = {"to_q", "to_k", "to_v", "to_out.0"}


@cache
def config_of(name: str) -> Any:
    return resolve(find(name))


@cache
def rows_of(name: str) -> dict[str, Any]:
    return {row.setting: row for row in side_by_side(find(name))}


def test_every_run_says_where_it_was_read() -> None:
    """Each setting that is not assumed has a source with repository, path and commit; no run lacks a model or a method."""
    assert len(RUNS) == 88
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
    with_options = {text for name in TRAINED for text in config_of(name).rewards if ":" in text}
    models = {text for text in with_options if text.partition(":")[0] in REWARD_MODELS}
    assert models < with_options
    for text in models:
        name, options, _ = parse(text, REWARD_MODELS, field="rewards")
        assert {*options} <= {*inspect.signature(REWARD_MODELS[name].make).parameters}
    for text in with_options - models:
        with pytest.raises(UsageError, match="trust_pickle is False"):
            select({}, (text,))
        assert callable(select({}, (f"{text},trust_pickle=true",))[text.partition(":")[0]][0])


@pytest.mark.parametrize("name", TRAINED)
def test_a_published_run_is_a_configuration(name: str) -> None:
    """It round-trips through JSON, and its deviations name settings, in words."""
    run = find(name)
    config, deviations = config_of(run.name), run.deviations
    record = as_record(config)
    assert read_record(json.loads(json.dumps(record))) == config
    assert config.model == RUNS[name].model
    assert str(config.out) == f"runs/{name}"
    for deviation in deviations.values():
        assert deviation.kind in ("hardware", "precision", "reward", "model", "method")
        assert deviation.why


@pytest.mark.parametrize("name", RUNS)
def test_what_is_published_is_ours_or_a_deviation(name: str) -> None:
    """A setting that is no field of the configuration is what fluvial always does, or a deviation."""
    run, rows = RUNS[name], rows_of(name)
    assert set(run.published) | set(run.deviations) <= set(rows)
    if run.needs:
        return
    tables = {path.rpartition(".")[0] for path in flat_record(name)} | {"sampling.sampler", "noising"}
    for path, value in run.published.items():
        if path not in flat_record(name) and path not in tables and path not in {**run.deviations, **run.fixed}:
            assert published.always()[path] == value, path


@cache
def flat_record(name: str) -> dict[str, Any]:
    return {published.as_flag(field): value for field, value in published.flat(as_record(config_of(name))).items()}


@pytest.mark.parametrize("name", TRAINED)
def test_no_setting_is_unsaid(name: str) -> None:
    """Each of the whole configuration is what its source states, differs for a reason that is told, or is assumed."""
    run, rows = find(name), rows_of(name)
    assert not set(flat_record(name)) - set(rows)
    for path in flat_record(name):
        row, setting = rows[path], run.settings.get(path)
        is_stated = path in run.published or (setting is not None and setting.source is not None)
        if row.why == ASSUMED:
            assert not is_stated, path
            assert (row.published, row.source) == ("not stated", None), path
        else:
            assert is_stated or path in run.deviations, path


# Settings that were wrong, or were read in another source than that of the run.
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
    ("flow_grpo/sd3.5-medium/pickscore-fast", "advantage.drop_zero"): False,
    ("flow_grpo/sd3.5-medium/pickscore-fast", "optimizer.ema_repeats"): 2,
    ("flow_grpo/flux.1-dev/geneval-fast", "optimizer.ema_repeats"): 6,
    ("flow_grpo/flux.1-dev/pickscore-fast", "optimizer.ema_repeats"): 6,
    ("flow_cps/flux.1-dev/pickscore", "optimizer.ema_repeats"): 6,
    ("flow_grpo/bagel-7b/pickscore-full", "sampling.window.draw"): "call",
    ("flow_cps/qwen-image/pickscore", "sampling.window.low"): 3,
    ("flow_cps/qwen-image/pickscore", "sampling.window.high"): 5,
    ("miles_diffusion/qwen-image/ocr", "advantage.clip"): 5.0,
    ("miles_diffusion/qwen-image/ocr", "advantage.eps"): 1e-4,
    ("miles_diffusion/qwen-image/ocr", "optimizer.eps"): 1e-8,
    ("miles_diffusion/qwen-image/ocr", "optimizer.max_grad_norm"): 1.0,
    ("miles_diffusion/qwen-image/ocr", "seed"): 1234,
    ("flow_factory/sd3.5-medium/awm", "optimizer.ema_decay"): 0.3,
    ("flow_factory/flux.1-dev/awm", "optimizer.ema_decay"): 0.3,
    ("flow_factory/sd3.5-medium/nft", "optimizer.ema_decay"): 0.5,
    ("flow_factory/sd3.5-medium/crd-ocr", "optimizer.ema_decay"): 0.995,
    # Flow-GRPO's average takes in the weights once per micro-batch of a GPU; others follow per update, or per rollout.
    ("flow_grpo/sd3.5-medium/ocr", "optimizer.ema_repeats"): 576 // (32 * 9),
    ("flow_grpo/sd3.5-medium/ocr-4gpu", "optimizer.ema_repeats"): 128 // (4 * 8),
    ("tempflow_grpo/sd3.5-medium/geneval", "optimizer.ema_repeats"): 2,
    ("flow_factory/flux.1-dev/grpo", "optimizer.ema_interval"): 4 * 2,
    ("dancegrpo/flux.1-dev/hpsv2-8gpu", "optimizer.ema_interval"): 2,
    ("ddpo/sd1.4/prompt_image_alignment", "engine.micro_batch"): 4,
    ("ddpo/sd1.4/prompt_image_alignment", "checkpoint.every"): 2,
    **{(f"awm/sd3.5-medium/{task}", "data.seed"): 42 for task in ("geneval", "ocr", "pickscore")},
    ("unirl/qwen-image/nft", "pipeline.text_tokens"): 512,
    ("dancegrpo/sd1.4/hpsv2", "sampling.window.high"): None,  # the last step takes noise, too, and is not trained
    ("dancegrpo/sd1.4/hpsv2", "trained.fraction"): 0.98,
}


def test_what_the_sources_of_these_settings_state() -> None:
    """The value is ours, and has the source or the words of a source, except where the default is meant."""
    assert sum(value == " " for value in READ_AGAIN.values()) == 11
    for (name, path), value in READ_AGAIN.items():
        assert flat_record(name)[path] == value, (name, path)
        assert value is None or rows_of(name)[path].why != ASSUMED, (name, path)
    assert rows_of("flow_grpo/qwen-image/pickscore")["sampling.guidance.negative"][1:3] == ('" "', '" "')
    source = rows_of("flow_grpo/sd3.5-medium/pickscore-fast")["advantage.drop_zero"].source
    assert source is not None
    assert source.repo == "IamCreateAI/FlowCPS"
    assert rows_of("flow_grpo/sd3.5-medium/pickscore-fast")["sampling.shared_noise"].published.startswith("true: 2 x 9")


def test_an_assumed_setting_is_said_to_be() -> None:
    """A setting in no source has our value and the word; one that a source states has its source."""
    rows = rows_of("diffusion_dpo/sd1.5/pickapic")
    assert (rows["seed"].published, rows["seed"].ours, rows["seed"].why) == ("not stated", "0", "assumed")
    assert rows["optimizer.lr"].why == ""
    assert rows["optimizer.lr"].source is not None
    assert rows["optimizer.lr"].source.repo == "SalesforceAIResearch/DiffusionDPO"


def test_the_runs_without_deviations() -> None:
    """The number of runs that differ in hardware, precision and rewards alone does not fall."""
    elsewhere = ("hardware", "precision", "reward")
    clean = [name for name in TRAINED if all(found.kind in elsewhere for found in find(name).deviations.values())]
    assert "flow_grpo/sd3.5-medium/ocr" in clean
    assert "diffusion_nft/sd3.5-medium/ocr" in clean
    assert "dancegrpo/flux.1-dev/hpsv2-16gpu" in clean
    assert len(clean) >= 61


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


@pytest.mark.parametrize("name", TRAINED)
def test_rewards_are_the_built_in_ones(name: str) -> None:
    """Every reward that a run names comes with fluvial; one that does not is a deviation that says what to do."""
    known = built_in()
    run = find(name)
    config, deviations = config_of(run.name), run.deviations
    for text in config.rewards:
        assert parse(text, plugins.names("rewards", known), field="rewards").name in known
    if config.makes_samples and not config.rewards:
        assert deviations["rewards"].kind == "reward"
    assert not any("one of your own" in found.why for path, found in deviations.items() if path == "rewards")


# The table of issue 24: what these runs trained with before, in silence.


def test_diffusion_dpo_draws_timesteps_of_the_whole_schedule() -> None:
    """t is uniform over 1,000 timesteps; the one that diffusers' scheduler lacks is a deviation."""
    for name in ("diffusion_dpo/sd1.5/pickapic", "diffusion_dpo/sdxl/pickapic"):
        run = find(name)
        config, deviations = config_of(run.name), run.deviations
        assert (config.method.sampling.steps, config.method.noising.each, config.method.noising.levels.kind) == (
            999,
            1,
            "schedule",
        )
        assert deviations["sampling.steps"].published == "t uniform over timesteps 0 to 999"
        assert config.pipeline.latents == "sample"


def test_the_pairs_of_verl_omni_are_noised_at_logit_normal_levels() -> None:
    """The shift of SD3's scheduler is the mean of the logit; Qwen-Image's has none."""
    sd3 = config_of("verl_omni/sd3.5-medium/dpo-offline-lora")
    qwen = config_of("verl_omni/qwen-image/ocr-online-dpo")
    found: Any = (sd3.method.noising.levels, qwen.method.noising.levels)
    assert [levels.kind for levels in found] == ["logit_normal"] * 2
    assert [levels.mean for levels in found] == pytest.approx([math.log(3), 0])
    assert sd3.method.sampling.guidance.scale == 4.0
    assert (sd3.updates, sd3.method.passes.minibatches, sd3.method.sampling.prompts) == (4000, 4, 16)
    assert (qwen.updates, qwen.method.passes.minibatches, qwen.method.sampling.prompts) == (600, 2, 32)


def clip_of(name: str) -> tuple[float, float]:
    method: Any = config_of(name).method
    return method.clip_low, method.clip_high


def test_the_clip_of_wan_is_the_default_of_its_project() -> None:
    assert clip_of("verl_omni/wan2.2-ti2v-5b/hpsv3-dancegrpo") == (1e-4, 1e-4)


def test_d3po_compares_20_pairs_per_epoch() -> None:
    """Two batches of 10 prompts with two images each; the published updates of single pairs are a deviation."""
    run = find("d3po/sd1.5/compressibility")
    config, deviations = config_of(run.name), run.deviations
    assert (config.method.sampling.prompts, config.method.sampling.group, config.updates) == (20, 2, 400)
    assert deviations["passes.minibatches"].published == "20 updates of 1 pair"


def test_an_older_flow_grpo_fast_has_64_prompts() -> None:
    """32 GPUs make 4 batches of one prompt each, and two calls share a prompt: 64 groups of 18."""
    config = config_of("flow_grpo/sd3.5-medium/pickscore-fast")
    assert (config.method.sampling.prompts, config.method.sampling.group, config.method.passes.minibatches) == (64, 18, 2)


@pytest.mark.parametrize("name", [name for name in TRAINED if name.startswith("tempflow_grpo/")])
def test_tempflow_has_the_base_file_of_flow_grpo(name: str) -> None:
    config = config_of(name)
    assert (config.optimizer.lr, config.seed) == (3e-4, 42)
    assert clip_of(name) == (1e-4, 1e-4)
    source = rows_of(name)["optimizer.lr"].source
    assert source is not None
    assert (source.repo, source.path) == ("yifan123/flow_grpo", "config/base.py")


def test_the_second_attention_of_sd3_is_not_adapted() -> None:
    """Flow-GRPO on SD3.5 medium adapts 191 layers with 18.8 M parameters, as its scripts do, run or recipe."""
    assert grpo("stabilityai/stable-diffusion-3.5-medium").lora.targets is None
    for targets in (
        SD3.lora_targets,
        MODELS["sd3.5-medium"].lora_targets,
        config_of("flow_grpo/sd3.5-medium/ocr").lora.targets,
    ):
        with torch.device("meta"):
            module = MODELS["sd3.5-medium"].build()
        add_lora(module, LoraConfig(rank=32), tuple(targets or ()))
        layers = lora_layers(module)
        assert len(layers) == 191
        assert not any("attn2" in name for name in layers)
        trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
        assert trained == pytest.approx(18.8e6, rel=5e-3)


# The list of wrong data of issue 24.


def test_dgpos_beta_and_reference() -> None:
    """beta_dpo is 100 at the cited commit, and the reference of the preference is the base model (use_ema_ref false)."""
    method = config_of("dgpo/sd3.5-medium/geneval").method
    assert (method.beta, method.reference) == (100.0, "base")
    assert not any("101" in line for line in find("dgpo/sd3.5-medium/geneval").unusual)


def test_hunyuanvideo_1_5_is_a_repository_of_diffusers() -> None:
    run = find("unirl/hunyuanvideo-1.5/dancegrpo")
    config, deviations = config_of(run.name), run.deviations
    window: Any = config.method.sampling.window
    assert config.model == "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
    assert len(config.lora.targets or ()) == 12
    assert (window.kind, window.size, window.low, window.high) == ("scattered", 8, 0, 9)
    assert set(deviations) == {"model", "prompts", "precision.trainable", "rewards"}


def test_dancegrpo_sums_the_losses_of_its_rewards() -> None:
    run = find("dancegrpo/hunyuanvideo/videoalign-vq")
    assert run.published["advantage.combine"].startswith("the losses of both rewards are summed")
    assert config_of(run.name).method.advantage.extremes == 4


def test_the_adapter_of_spo_is_stated() -> None:
    spo = find("spo/sdxl/4k-prompts").settings
    assert (spo["lora.alpha"].value, set(spo["lora.targets"].value)) == (64, ATTENTION)


# What single runs do.


def test_flow_grpo_leaves_the_last_step_out() -> None:
    """9 of the 10 stochastic steps are trained on, the noisiest; samples without advantage are dropped."""
    config = config_of("flow_grpo/sd3.5-medium/ocr")
    sampling, trained = config.method.sampling, config.method.trained
    assert (sampling.steps, sampling.window.kind, trained.kind, trained.count(10)) == (10, "all", "first", 9)
    assert config.method.advantage.drop_zero
    assert config.method.kl.weight_of(sampling.sampler.rule) == "rate"


def test_dance_decodes_the_clean_estimate() -> None:
    """The last step takes no noise, and 60 % of the others are trained on."""
    method = config_of("dancegrpo/flux.1-dev/hpsv2-16gpu").method
    sampling, trained = method.sampling, method.trained
    assert sampling.window.range(sampling.steps) == (0, 15)
    assert (trained.count(15), trained.kind) == (9, "random")


def test_the_last_step_of_dance_is_the_clean_estimate() -> None:
    """A rollout whose window ends before the last step returns x - sigma v of that step, to the bit (DanceGRPO)."""
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def velocity(x: torch.Tensor, level: torch.Tensor, step: int) -> torch.Tensor:
        calls.append((x, torch.sin(x) + level[:, None]))
        return calls[-1][1]

    levels = sigmas.shifted(16, 3.0)
    sampler = bind("dance_sde", 0.3, levels)
    found = rollout(velocity, torch.randn(4, 6), levels, transition=sampler, key=key(0), window=range(15))
    x, v = calls[-1]
    assert torch.equal(found.final, x - levels[15] * v)
    assert found.steps.tolist() == [list(range(15))] * 4


def test_the_decay_of_nfts_ocr_run_counts_updates() -> None:
    method = config_of("diffusion_nft/sd3.5-medium/ocr").method
    decays = [method.old.decay(updates // 2, updates) for updates in (75, 77, 1000)]
    assert decays == pytest.approx([0.0, 0.015, 0.999])


def test_a_method_that_fluvial_lacks_is_said_to_be() -> None:
    """Its settings are listed, and training it is an error of one line."""
    with pytest.raises(UsageError, match="is a run of SRPO, and fluvial has no such method, which needs the gradient"):
        resolve(find("srpo/flux.1-dev/hpsv2"))
    assert sorted({run.algorithm for run in RUNS.values() if run.needs}) == ["BranchGRPO", "GARDO", "SPO", "SRPO"]
    assert rows_of("srpo/flux.1-dev/hpsv2")["optimizer.lr"].published == "5e-06"


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


@pytest.mark.parametrize("name", RUNS)
def test_every_run_is_printed_and_trained_by_its_name(name: str) -> None:
    """`fluvial runs NAME` prints it, and `fluvial train NAME` trains its configuration, or says what fluvial lacks."""
    printed = describe_run(find(name))
    assert all(setting in printed for setting in rows_of(name))
    if RUNS[name].needs:
        with pytest.raises(UsageError, match="has no such method"):
            _recipe(name)
    else:
        assert _recipe(name)() == config_of(name)


def test_a_configuration_is_printed_and_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `config` prints is what `--config` reads, and flags go on top of it."""
    typed = ["grpo", "--sampling.group", "4", "--out", str(tmp_path / "run")]
    assert cli.run(["config", *typed, "--json"]) == 0
    first = capsys.readouterr().out
    path = tmp_path / "run.json"
    path.write_text(first)
    assert cli.run(["config", "--config", str(path), "--json"]) == 0
    assert capsys.readouterr().out == first
    assert cli.run(["config", "--config", str(path), "--seed", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {**json.loads(first), "seed": 3}
    toml = tmp_path / "run.toml"
    assert cli.run(["config", *typed]) == 0  # without --json it is TOML, and the same run
    toml.write_text(capsys.readouterr().out)
    assert cli.run(["config", str(toml), "--json"]) == 0
    assert capsys.readouterr().out == first
    toml.write_text(f'out = "{tmp_path}"\nupdates = 6\n[method]\nname = "grpo"\n[method.sampling]\ngroup = 4\n')
    assert cli.run(["config", str(toml), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["method"]["sampling"]["group"] == 4
    toml.write_text(
        f'out = "{tmp_path}"\nprompt_order = "distinct"\n[method]\nname = "grpo"\n[method.sampling]\ngroup = 4\n'
        '[method.sampling.window]\nkind = "random"\nsize = 2\n'
        '[method.sampling.window.tail]\nsolver = "dpmpp_2m"\nfraction = 0.4\n'
        '[method.kl]\ncoef = 0.1\nweight = "mse"\n'
    )
    assert cli.run(["config", str(toml), "--json"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed)["method"]["sampling"]["window"]["tail"] == {"solver": "dpmpp_2m", "fraction": 0.4, "least": 1}
    path.write_text(printed)
    assert cli.run(["config", "--config", str(path), "--kl.weight", "exact", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    expected = json.loads(printed)
    expected["method"]["kl"]["weight"] = "exact"
    assert again == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "is not a configuration"), ('{"out": "x", "seeds": 1}', "unknown fields seeds"), (None, "cannot be read")],
)
def test_a_file_that_is_no_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, says: str
) -> None:
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    assert cli.run(["train", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_ddpos_statistics_and_last_step() -> None:
    """256 prompts of one sample with the last 16 rewards of each; Stable Diffusion's schedule ends with a noisy step."""
    run = find("ddpo/sd1.4/compressibility")
    config, deviations = config_of(run.name), run.deviations
    assert (config.method.sampling.prompts, config.method.sampling.group, config.method.passes.minibatches) == (256, 1, 4)
    assert (config.method.advantage.history, config.method.advantage.history_min, config.method.advantage.eps) == (
        16,
        16,
        1e-6,
    )
    assert not any(name.startswith("sampling") for name in deviations)
    scheduler = DDIMScheduler(1000, 0.00085, 0.012, beta_schedule="scaled_linear", set_alpha_to_one=False, steps_offset=1)
    scheduler.set_timesteps(50)
    assert ddim(scheduler.alphas_cumprod[scheduler.timesteps[-1]], scheduler.final_alpha_cumprod, eta=1.0).std > 0


def test_windows_of_published_runs() -> None:
    """Per call (Flow-GRPO-Fast), per sample (verl-omni), moving (MixGRPO, UniRL), one by one (UniRL)."""

    def window(name: str) -> Any:
        return config_of(name).method.sampling.window

    assert window("flow_grpo/sd3.5-medium/geneval-fast-nocfg").draw == "call"
    assert window("verl_omni/qwen-image/ocr-flowdppo").draw == "sample"
    mix, unirl = window("mixgrpo/flux.1-dev/multi-reward"), window("unirl/sd3.5-medium/mixgrpo")
    assert (mix.kind, mix.size, mix.range(25), mix.every, mix.stride) == ("moving", 4, (0, 23), 25, 1)
    assert (unirl.kind, unirl.every, unirl.stride) == ("moving", 25, 3)
    assert window("unirl/sd3.5-medium/flowgrpo").kind == "scattered"


def test_a_trunk_of_branches() -> None:
    """TempFlow-GRPO branches 6 times at each of the 9 trained steps; 4 initial noises share a prompt."""
    for task in ("flux.1-dev/hpsv3", "sd3.5-medium/geneval"):
        sampling = config_of(f"tempflow_grpo/{task}").method.sampling
        window: Any = sampling.window
        assert (window.samples, window.size, window.range(sampling.steps)) == (6, 1, (0, 9))
        assert window.trunk(sampling.steps, sampling.group) == 54
        assert (sampling.prompts, sampling.group) == (48, 4 * 54)


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


def test_models_that_cannot_be_trained_as_published() -> None:
    """Their runs name it, and do not count among those without deviations."""
    for name in ("flow_grpo/bagel-7b/pickscore-full", "unirl/hunyuanvideo-1.5/dancegrpo"):
        assert [path for path, found in find(name).deviations.items() if found.kind == "model"] == ["model"]


def test_an_offline_run_takes_its_pairs_from_a_folder() -> None:
    """Diffusion-DPO's have no rollout; the online ones make as many updates as their pairs give."""
    offline = config_of("diffusion_dpo/sd1.5/pickapic")
    assert (offline.makes_samples, offline.method.sampling.prompts, offline.method.passes.minibatches) == (False, 2048, 1)
    online = config_of("verl_omni/qwen-image/ocr-online-dpo")
    assert (online.makes_samples, online.method.passes.minibatches, online.method.sampling.prompts) == (True, 2, 32)


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
    (run,) = published._runs({"block": BLOCKS, "run": {"p/m/t": entry}}, {})
    return run


def test_a_run_extends_blocks() -> None:
    """Later blocks come before earlier ones; each setting keeps the source of its block; what is stated is not assumed."""
    run = composed(extends=["near"], settings={"kl": {"coef": 0.1}}, unusual=["second"], gpus=4)
    values = {path: setting.value for path, setting in run.settings.items()}
    assert values == {
        "seed": 1,
        "kl.coef": 0.1,
        "engine.micro_batch": 4,
        "sampling.window.kind": "random",
        "sampling.window.size": 2,
    }
    paths = {path: setting.source and setting.source.path for path, setting in run.settings.items()}
    assert paths == {
        "seed": "x",
        "kl.coef": "y",
        "engine.micro_batch": None,
        "sampling.window.kind": "y",
        "sampling.window.size": "y",
    }
    assert (run.unusual, run.gpus) == (("first", "second"), 4)
    assert run.overlay()["method"]["sampling"] == {"window": {"kind": "random", "size": 2}}


def test_another_variant_of_a_union_drops_the_fields_of_the_first() -> None:
    """A block that sets another kind inherits no field of the other variant; one that sets the same kind does."""
    scattered = composed(extends=["near"], settings={"rollout": {"window": {"kind": "all", "high": 5}}})
    assert scattered.overlay()["method"]["sampling"]["window"] == {"kind": "all", "high": 5}
    same = composed(extends=["near"], settings={"rollout": {"window": {"kind": "random", "high": 5}}})
    assert same.overlay()["method"]["sampling"]["window"] == {"kind": "random", "size": 2, "high": 5}


def test_a_run_that_states_nothing_is_assumed_throughout() -> None:
    """Every setting but those that are stated, of a loss of steps and of one of noised samples."""
    for objective in ("clipped", "nft"):
        run = composed(
            source=BLOCKS["far"]["source"], settings={"model": "m", "train": "lora", "objective": {"name": objective}}
        )
        rows = {row.setting: row for row in side_by_side(run)}
        assert {name for name, row in rows.items() if row.why != ASSUMED} == {"model", "train", "method.name"}
        assert [*rows] == [published.as_flag(name) for name in published.flat(as_record(resolve(run)))]
        assert {row.published for row in rows.values() if row.why == ASSUMED} == {"not stated"}
