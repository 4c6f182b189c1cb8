"""Published runs: each is read, resolves to a configuration, and differs from its source in nothing that is not named."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

from fluvial.core import sigmas
from fluvial.core.random import key
from fluvial.core.rollout import rollout
from fluvial.core.transitions import bind, ddim
from fluvial.engines.cli import main as cli
from fluvial.engines.errors import UsageError
from fluvial.engines.rollout.noising import NoisingConfig
from fluvial.engines.rollout.window import WindowMoves
from fluvial.engines.train.published.deviations import MISSING, OURS
from fluvial.engines.train.published.fields import FIELDS
from fluvial.engines.train.published.objectives import LACKING, OBJECTIVES
from fluvial.engines.train.published.resolve import resolve
from fluvial.engines.train.published.runs import find, published_runs
from fluvial.engines.train.record import as_record, recorded

RUNS = published_runs()
RESOLVED = {name: resolve(run) for name, run in RUNS.items() if run.algorithm in OBJECTIVES}
# Where a published field stands in a run's record, for those that need no arithmetic.
PLACES = {
    "resolution_height": "pipeline.height", "resolution_width": "pipeline.width", "num_frames": "pipeline.frames",
    "train_sampling_steps": "rollout.steps", "eval_sampling_steps": "evaluation.steps", "noise_level": "rollout.eta",
    "shared_initial_noise": "rollout.shared_noise", "samples_per_prompt": "rollout.group",
    "prompts_per_rollout": "rollout.prompts", "inner_epochs": "epochs", "micro_batch_per_gpu": "micro_batch",
    "advantage_eps": "advantage.eps", "advantage_std_ddof": "advantage.ddof", "zero_advantage_filter": "advantage.drop_zero",
    "kl_coef": "kl.coef", "learning_rate": "optimizer.lr", "adam_eps": "optimizer.eps",
    "weight_decay": "optimizer.weight_decay", "max_grad_norm": "optimizer.max_grad_norm",
    "lr_warmup_steps": "optimizer.warmup", "ema_interval": "optimizer.ema_interval", "finetune": "train",
    "lora_rank": "lora.rank", "lora_alpha": "lora.alpha", "lora_targets": "lora.targets", "lora_init": "lora.init",
    "seed": "seed", "data_seed": "data_seed",
}  # fmt: skip
ELSEWHERE = ("hardware", "precision", "reward")  # what a person's own machine and rewards decide


def test_every_run_is_read() -> None:
    """88 runs, each with a source, and with known settings alone."""
    assert len(RUNS) == 88
    for name, run in RUNS.items():
        assert run.name == name
        assert {"repo", "path", "commit"} <= set(run.source)
        assert set(run.settings) <= set(FIELDS)


def test_every_field_is_compared() -> None:
    """Each of the 76 fields is read back from the configuration, or has a rule of its own."""
    assert len(FIELDS) == 76
    assert set(OURS) | set(MISSING) == set(FIELDS)
    assert not set(OURS) & set(MISSING)


@pytest.mark.parametrize("name", RESOLVED)
def test_a_resolved_run_is_what_was_published(name: str) -> None:
    """The record of the run has the published value wherever no deviation is named; it round-trips."""
    config, deviations = RESOLVED[name]
    record = as_record(config)
    assert recorded(json.loads(json.dumps(record))) == config
    named = {deviation.field for deviation in deviations}
    assert len(named) == len(deviations)
    for field, place in PLACES.items():
        if field in named or field not in RUNS[name].settings:
            continue
        found: Any = record
        for part in place.split("."):
            found = found[part]
        expected = RUNS[name].settings[field]
        if field == "ema_interval" and any(line.startswith("EMA is stepped") for line in RUNS[name].unusual):
            found /= config.updates_per_rollout  # the source counts rollouts
        if config.rollout.branches is not None and field in ("shared_initial_noise", "samples_per_prompt"):
            continue  # `test_a_trunk_of_branches`
        if field == "noise_level" and config.rollout.sampler_name == "cps":
            found, expected = math.sin(found * math.pi / 2), pytest.approx(math.sin(expected * math.pi / 2))
        assert found == expected, field
    for deviation in deviations:
        assert deviation.why


def test_the_runs_without_deviations() -> None:
    """The number of runs that differ in hardware, precision and rewards alone does not fall."""
    clean = [name for name, (_, found) in RESOLVED.items() if all(deviation.kind in ELSEWHERE for deviation in found)]
    assert "flow_grpo/sd3.5-medium/ocr" in clean
    assert "diffusion_nft/sd3.5-medium/ocr" in clean
    assert "dancegrpo/flux.1-dev/hpsv2-16gpu" in clean
    assert len(clean) >= 74


def test_flow_grpo_leaves_the_last_step_out() -> None:
    """9 of the 10 stochastic steps are trained on, the noisiest; samples without advantage are dropped."""
    config = resolve(find("flow_grpo/sd3.5-medium/ocr")).config
    rollout = config.rollout
    assert (rollout.steps, rollout.window, rollout.pick, rollout.trained_of(rollout.steps)) == (10, None, "first", 9)
    assert config.advantage.drop_zero
    assert config.kl.weight_of(rollout.sampler_name) == "rate"


def test_dance_decodes_the_clean_estimate() -> None:
    """The last step takes no noise, and 60 % of the others are trained on."""
    rollout = resolve(find("dancegrpo/flux.1-dev/hpsv2-16gpu")).config.rollout
    assert rollout.window_range == (0, 15)
    assert (rollout.trained_of(15), rollout.pick) == (9, "random")


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
    assert found.steps.tolist() == list(range(15))


def test_the_decay_of_nfts_ocr_run_counts_updates() -> None:
    """0 for 75 updates, then 0.0075 per update up to 0.999."""
    objective: Any = resolve(find("diffusion_nft/sd3.5-medium/ocr")).config.objective
    decays = [objective.old_decay(updates // 2, updates) for updates in (75, 77, 1000)]
    assert decays == pytest.approx([0.0, 0.015, 0.999])


def test_a_method_that_fluvial_lacks_is_said_to_be() -> None:
    """Its settings are listed, and training it is an error of one line."""
    with pytest.raises(UsageError, match="is a run of SRPO, and fluvial has no such objective, which needs the gradient"):
        resolve(find("srpo/flux.1-dev/hpsv2"))
    assert {run.algorithm for run in RUNS.values()} == set(OBJECTIVES) | set(LACKING)
    assert not set(OBJECTIVES) & set(LACKING)


def test_runs_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """All are listed; one is printed with each setting; an unknown name is exit code 2 with the nearest one."""
    assert cli.run(["runs"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in RUNS)
    assert cli.run(["runs", "flow_grpo/sd3.5-medium/ocr"]) == 0
    printed = capsys.readouterr().out
    assert all(field in printed for field in FIELDS)
    assert "int(10*0.99) = 9" in printed
    assert "[precision] precision_compute" in printed
    for command in ("runs", "train"):
        assert cli.run([command, "flow_grpo/sd3-medium/ocr"]) == 2
        assert "did you mean flow_grpo/sd3.5-medium/ocr?" in capsys.readouterr().err


def test_a_configuration_is_printed_and_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `config` prints is what `--config` reads, and flags go on top of it."""
    typed = ["grpo", "--rollout.group", "4", "--out", str(tmp_path / "run")]
    assert cli.run(["config", *typed]) == 0
    first = capsys.readouterr().out
    path = tmp_path / "run.json"
    path.write_text(first)
    assert cli.run(["config", "--config", str(path)]) == 0
    assert capsys.readouterr().out == first
    assert cli.run(["config", "--config", str(path), "--seed", "3"]) == 0
    assert json.loads(capsys.readouterr().out) == {**json.loads(first), "seed": 3}
    toml = tmp_path / "run.toml"
    toml.write_text(f'out = "{tmp_path}"\nupdates = 6\n[rollout]\ngroup = 4\n')
    assert cli.run(["config", "--config", str(toml)]) == 0
    assert json.loads(capsys.readouterr().out)["rollout"]["group"] == 4
    toml.write_text(
        f'out = "{tmp_path}"\nprompt_order = "distinct"\n[rollout]\ngroup = 4\nwindow = 2\n'
        '[rollout.after]\nsolver = "dpmpp_2m"\nfraction = 0.4\n[kl]\ncoef = 0.1\nweight = "mse"\n'
    )
    assert cli.run(["config", "--config", str(toml)]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed)["rollout"]["after"] == {"solver": "dpmpp_2m", "fraction": 0.4, "least": 1}
    path.write_text(printed)
    assert cli.run(["config", "--config", str(path), "--kl.weight", "exact"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again.pop("kl") == {**json.loads(printed).pop("kl"), "weight": "exact"}
    assert again == {name: value for name, value in json.loads(printed).items() if name != "kl"}


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "is not a configuration"), ('{"out": "x", "seeds": 1}', "unknown fields seeds"), (None, "cannot be read")],
)
def test_a_file_that_is_no_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, says: str
) -> None:
    """One line and exit code 2."""
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    assert cli.run(["train", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_ddpos_statistics_and_last_step() -> None:
    """256 prompts of one sample with the last 16 rewards of each; Stable Diffusion's schedule ends with a noisy step."""
    config, deviations = resolve(find("ddpo/sd1.4/compressibility"))
    assert (config.rollout.prompts, config.rollout.group, config.minibatches) == (256, 1, 4)
    assert (config.advantage.history, config.advantage.history_min, config.advantage.eps) == (16, 16, 1e-6)
    assert "last_step_trained" not in {deviation.field for deviation in deviations}
    scheduler = DDIMScheduler(1000, 0.00085, 0.012, beta_schedule="scaled_linear", set_alpha_to_one=False, steps_offset=1)
    scheduler.set_timesteps(50)
    assert ddim(scheduler.alphas_cumprod[scheduler.timesteps[-1]], scheduler.final_alpha_cumprod, eta=1.0).std > 0


def test_averages_of_published_runs() -> None:
    """Flow-GRPO's takes in the weights once per micro-batch of a GPU; others follow per update, or per rollout."""
    optimizers = {name: resolved.config.optimizer for name, resolved in RESOLVED.items()}
    repeats = {name: optimizers[f"flow_grpo/sd3.5-medium/{name}"].ema_repeats for name in ("ocr", "ocr-4gpu")}
    assert repeats == {"ocr": 576 // (32 * 9), "ocr-4gpu": 128 // (4 * 8)}
    assert optimizers["tempflow_grpo/sd3.5-medium/geneval"].ema_repeats == 2
    assert optimizers["diffusion_nft/sd3.5-medium/ocr"].ema_repeats == 1
    assert optimizers["flow_factory/flux.1-dev/grpo"].ema_interval == 4 * 2
    assert optimizers["dancegrpo/flux.1-dev/hpsv2-8gpu"].ema_interval == 2


def test_windows_of_published_runs() -> None:
    """Per call (Flow-GRPO-Fast), per sample (verl-omni), moving (MixGRPO, UniRL), one by one (UniRL)."""
    rollouts = {name: resolved.config.rollout for name, resolved in RESOLVED.items()}
    assert rollouts["flow_grpo/sd3.5-medium/geneval-fast-nocfg"].window_draw == "call"
    assert rollouts["verl_omni/qwen-image/ocr-flowdppo"].window_draw == "sample"
    mix, unirl = rollouts["mixgrpo/flux.1-dev/multi-reward"], rollouts["unirl/sd3.5-medium/mixgrpo"]
    assert (mix.window, mix.window_range, mix.moves) == (4, (0, 23), WindowMoves(every=25))
    assert unirl.moves == WindowMoves(every=25, stride=3)
    assert not rollouts["unirl/sd3.5-medium/flowgrpo"].contiguous


def test_a_trunk_of_branches() -> None:
    """TempFlow-GRPO branches 6 times at each of the 9 trained steps; 4 initial noises share a prompt."""
    for task in ("flux.1-dev/hpsv3", "sd3.5-medium/geneval"):
        rollout = RESOLVED[f"tempflow_grpo/{task}"].config.rollout
        assert (rollout.branches, rollout.window, rollout.window_range, rollout.trunk) == (6, 1, (0, 9), 54)
        assert (rollout.prompts, rollout.group) == (48, 4 * 54)


def test_levels_of_published_runs() -> None:
    """One of each part without the first (AWM), the noisiest (UniRL), those above a level (Flow-Factory)."""
    noising = {name: resolved.config.noising for name, resolved in RESOLVED.items()}
    assert noising["awm/sd3.5-medium/ocr"] == NoisingConfig(6, "stratified", highest=12, skip=1, draw="call")
    assert noising["unirl/sd3.5-medium/nft"] == NoisingConfig(9, highest=9)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(14)
    last = int(torch.nonzero(scheduler.timesteps >= 500).max())
    assert noising["flow_factory/sd3.5-medium/nft"] == NoisingConfig(4, "stratified", highest=last, draw="call")


def test_models_that_cannot_be_trained_as_published() -> None:
    """Their runs name it, and do not count among those without deviations."""
    for name in ("flow_grpo/bagel-7b/pickscore-full", "flow_grpo/flux.1-kontext-dev/counting"):
        assert [found.field for found in RESOLVED[name].deviations if found.kind == "model"] == ["model"]


def test_an_offline_run_takes_its_pairs_from_a_folder() -> None:
    """Diffusion-DPO's have no rollout; the online ones make as many updates as their pairs give."""
    offline, deviations = resolve(find("diffusion_dpo/sd1.5/pickapic"))
    assert (offline.makes_samples, offline.rollout.prompts, offline.minibatches) == (False, 2048, 1)
    assert "samples_per_update" not in {deviation.field for deviation in deviations}
    online = resolve(find("verl_omni/qwen-image/ocr-online-dpo")).config
    assert (online.makes_samples, online.minibatches, online.rollout.prompts) == (True, 2, 32)
