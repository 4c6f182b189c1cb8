"""Training runs: what they leave behind, how they stop and go on, and what makes them fail."""

import errno
import io
import json
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import launch, short_runs
from helpers import tiny_jobs as tiny
from helpers.handwriting_jobs import config, job, trained, updates
from helpers.marks import long
from helpers.refusals import fails, refuses
from helpers.resumed import untimed
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from fluvial.engines.engine.engine import OptimizerConfig
from fluvial.engines.engine.world import init_world
from fluvial.engines.extensions.report import charts as drawing
from fluvial.engines.methods.table import Guard
from fluvial.engines.run import train
from fluvial.engines.run.checkpoint import checkpoint
from fluvial.engines.run.config import with_values
from fluvial.engines.run.evaluation.evaluate import evaluate
from fluvial.engines.run.monitoring.diagnostics import Probe
from fluvial.engines.run.saving import fingerprint_run
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import SamplingConfig, ServersConfig
from fluvial.engines.sampling.generate import Guidance, move_schedule
from fluvial.engines.sampling.samplers import Stochastic
from fluvial.engines.sampling.window import AllSteps
from fluvial.models import LoraConfig
from fluvial.models.handwriting import BASE
from fluvial.models.lora import LowRank

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with evaluations, a moving average, a KL term and charts."""
    out = tmp_path_factory.mktemp("run") / "run"
    changes = {"evaluation.every": 1, "optimizer": OptimizerConfig(ema_decay=0.5), "kl.coef": 0.1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "draw_curves", short_runs.curves)
        train(config(out, **changes), job())
    return out


def test_the_run_folder(run: Path) -> None:
    """Everything a person looks for is there."""
    names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and "tensorboard" not in str(path)}
    assert names == {
        *("config.json", "metrics.jsonl", "summary.json", "report.html", "curves.png", "probe.safetensors"),
        *(f"samples/{name}.png" for name in ("before", "update-0001", "after", "best", "worst", "before-after")),
        *(f"samples/{name}.json" for name in ("before", "update-0001", "after", "best", "worst")),
        *(f"samples/{name}.csv" for name in ("before", "update-0001", "after")),
        *("checkpoints/000002/manifest.json", "checkpoints/000002/shard-00001-model-00001-of-00001.safetensors"),
        *("weights/config.json", "weights/diffusion_pytorch_model.safetensors", "weights/README.md"),
        *("weights/reward.png", "weights/samples.png"),
    }
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    with Image.open(run / "curves.png") as charts:
        assert 900 < charts.width < 1100 < 2 * charts.height, "readable within a page of text"
        assert np.unique(np.asarray(charts.convert("L"))).size > 10


def test_the_summary_and_the_records(run: Path) -> None:
    """The promised fields; one record per update, with an on-policy ratio of exactly 1, and one per evaluation."""
    summary, records = json.loads((run / "summary.json").read_text()), launch.records(run)
    known = {"updates": 2, "train_samples": 16, "skipped_steps": 0, "first_pass_max_abs_log_ratio": 0.0}
    assert known.items() <= summary.items()
    assert all(0 <= summary[f"heldout_exact_{when}"] <= 1 for when in ("before", "after"))
    assert 0 < summary["train_seconds"] < 60
    assert summary["versions"]["torch"] == torch.__version__
    shape = [(record["update"], "exact" in record) for record in records]
    assert shape == [(0, True), (1, False), (1, True), (2, False), (2, True)]
    first, second = (record for record in records if "objective" in record)
    for record in (first, second):
        assert record["objective"]["ratio"] == 1.0
        assert record["first_pass_max_abs_log_ratio"] == 0.0
        assert record["reward"]["mean"] == 0.5
        assert set(record["seconds"]) == {"rollout", "reward", "update"}
        assert record["speed"]["update_flops"] > 1e6
        assert "mfu" not in record["speed"]  # of a peak that nobody knows
    assert first["objective"]["kl_ref"] == 0.0 < second["objective"]["kl_ref"]  # the policy is still the reference


def test_the_exported_weights_are_the_average_that_was_evaluated(run: Path) -> None:
    """The exported folder is a diffusers model: its weights moved, are the checkpoint's average, and score as recorded.

    The drift is a mean over noised samples, so it tells the average from the last weights where scores do not.
    """
    base, trained = load_file(BASE / WEIGHTS), load_file(run / "weights" / WEIGHTS)
    assert set(base) == set(trained)
    moved = {name for name in base if not torch.equal(base[name], trained[name])}
    # The last block drops its text stream, and with it two of its parameters; the table of positions is fixed.
    unused = {f"transformer_blocks.3.attn.add_q_proj.{kind}" for kind in ("weight", "bias")} | {"pos_embed.pos_embed"}
    assert set(base) - moved <= unused
    saved = load_file(next((run / "checkpoints" / "000002").glob("*.safetensors")))
    assert all(torch.equal(trained[name], saved[f"average.{name}"]) for name in moved)
    assert any(not torch.equal(trained[name], saved[f"weight.{name}"]) for name in moved)

    exported, cpu, recorded = job(weights=run / "weights"), torch.device("cpu"), launch.records(run)[-1]
    schedule = move_schedule(exported.model.schedule(4, exported.shape), cpu)
    module = exported.model.build().eval()
    with torch.no_grad(), init_world() as world:
        again = evaluate(exported, module, schedule=schedule, samples=8, micro_batch=4, world=world)
        drift = Probe.load(run / "probe.safetensors", cpu).measure_drift(exported, module, micro_batch=4)
    assert again.score == pytest.approx(recorded["score"])
    assert again.exact == pytest.approx(recorded["exact"])
    assert drift == pytest.approx(recorded["drift"], rel=1e-3)
    assert drift > 0


def test_the_seed_decides_every_bit(tmp_path: Path) -> None:
    """The same one twice gives the same weights; another one gives others."""
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(tiny.config(tmp_path / name, seed=seed, **{"evaluation.final_samples": 2}), tiny.job())
    assert launch.weights(tmp_path / "a") == launch.weights(tmp_path / "b")
    assert launch.weights(tmp_path / "a") != launch.weights(tmp_path / "c")


STEPS = SamplingConfig(prompts=2, group=4, steps=3, window=AllSteps())
MERGED = LoraConfig(rank=4, form=LowRank(product="merged"))
LR = OptimizerConfig(lr=1e-2)
# Runs that are on policy to the bit, in the second update, too, where adapters add something.
ON_POLICY: dict[str, dict[str, Any]] = {
    **{sampler: {"sampling.sampler": Stochastic(sampler, eta=0.7)} for sampler in ("flow_sde", "dance_sde", "cps")},
    **{
        f"guard {sampler}": {"method": Guard(), "sampling.sampler": Stochastic(sampler)}
        for sampler in ("flow_sde", "dance_sde")
    },
    "bfloat16": {"engine.compute": "bfloat16", "kl.coef": 0.1},
    "merged product": {"train": "lora", "lora": MERGED},
    **{
        base: {"train": "lora", "engine.base": base, "engine.checkpointing": "block"}
        for base in ("nf4", "int8", "int4", "fp8", "fp8_dynamic")
    },
}
SHORT = {("guard flow_sde", "full"), ("cps", "lora"), ("bfloat16", "lora"), ("merged product", "lora"), ("nf4", "lora")}


@pytest.mark.bits
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind) if (name, kind) in SHORT else long(name, kind)
        for name, kind in product(ON_POLICY, ("full", "lora"))
        if ON_POLICY[name].get("train", kind) == kind
    ],
)
def test_a_run_is_on_policy_to_the_bit(tmp_path: Path, name: str, kind: str) -> None:
    """All steps stochastic: the first ratio is exactly 1, and the first KL exactly 0, where the policy is the reference."""
    changes = {"sampling": STEPS, "train": kind, "optimizer": LR, **ON_POLICY[name]}
    first, second = updates(config(tmp_path, **changes), count=2)
    for record in (first, second):
        assert record["first_pass_max_abs_log_ratio"] == 0.0
        assert record["objective"]["ratio"] == 1.0
        assert record["skipped_steps"] == 0
        assert record["grad_norm"] > 0
        assert record["pairs"] == 8 * (2 if name == "cps" else 3)  # the last step of CPS has no noise, and is not trained on
    if "kl.coef" in changes:
        assert first["objective"]["kl_ref"] == 0.0 < second["objective"]["kl_ref"]


def test_lora_trains_adapters_alone_and_is_exported_merged(tmp_path: Path) -> None:
    """Only adapters and their moments are in the checkpoint; what is exported is a plain model."""
    train(config(tmp_path / "run", train="lora", **{"kl.coef": 0.1}), job())
    saved = load_file(next((tmp_path / "run" / "checkpoints" / "000002").glob("*.safetensors")))
    assert saved
    assert all("lora_" in name for name in saved)
    base, merged = load_file(BASE / WEIGHTS), load_file(tmp_path / "run" / "weights" / WEIGHTS)
    assert set(base) == set(merged)
    moved = {name for name in base if not torch.equal(base[name], merged[name])}
    assert moved
    assert all(name.endswith(".weight") for name in moved)
    assert launch.records(tmp_path / "run")[-2]["objective"]["kl_ref"] > 0


@pytest.mark.long
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_where_weights_lie_and_who_reads_them_changes_no_bit(tmp_path: Path, kind: Any) -> None:
    """With a reference, an average and evaluations between the updates."""
    changes = {"train": kind, "optimizer": OptimizerConfig(ema_decay=0.5), "evaluation.every": 1, "kl.coef": 0.1}
    plain: dict[str, Any] = {"engine.offload": "none", "engine.init": "sharded"}
    for name, engine in (("one", {}), ("two", {"engine.offload": "phases"}), ("three", {"engine.init": "whole"})):
        train(config(tmp_path / name, **changes, **plain | engine), job())
        assert launch.weights(tmp_path / name) == launch.weights(tmp_path / "one")


@pytest.mark.bits
@pytest.mark.parametrize("kind", [long("full"), "lora"])
def test_guidance_is_on_policy(tmp_path: Path, kind: Any) -> None:
    """In one forward pass or two: the ratio is exactly 1, the gradient is the same, and another one than without."""
    norms = {}
    halves: dict[str, Any] = {"gradient": "conditional"}
    for name, guidance in {
        "none": Guidance(),
        **{forwards: Guidance(2.0, forwards=forwards) for forwards in ("one", "two")},
        **{f"{forwards}, half": Guidance(2.0, forwards=forwards, **halves) for forwards in ("one", "two")},
    }.items():
        rollout = replace(config(tmp_path).method.sampling, guidance=guidance)
        (record,) = updates(config(tmp_path, train=kind, sampling=rollout))
        assert record["first_pass_max_abs_log_ratio"] == 0.0
        norms[name] = record["grad_norm"]
    assert norms["two"] == pytest.approx(norms["one"], rel=1e-5)
    assert norms["two, half"] == pytest.approx(norms["one, half"], rel=1e-5)
    assert len({round(norms[name], 9) for name in ("none", "one", "one, half")}) == 3


@pytest.mark.parametrize("where", ["folder", long("URL")])
@pytest.mark.long
def test_checkpoints_may_be_written_in_the_background(tmp_path: Path, where: str) -> None:
    """And behind a URL: they are resumed from to the bit, and a failure ends the run in one line."""
    trained(tmp_path / "straight", updates=4)
    changes: dict[str, Any] = {"checkpoint.background": True, "checkpoint.every": 1}
    if where == "URL":
        changes["checkpoint.folder"] = f"memory://{tmp_path.name}/checkpoints"
    train(config(tmp_path / "run", updates=3, **changes), job())
    saved = checkpoint.list_checkpoints(config(tmp_path / "run", **changes).checkpoint_folder)
    assert [str(path).rpartition("/")[2] for path in saved] == ["000002", "000003"]
    assert (tmp_path / "run" / "checkpoints").exists() == (where == "folder")
    train(config(tmp_path / "run", updates=4, **changes, **{"checkpoint.resume_from": str(saved[0])}), job())
    assert launch.weights(tmp_path / "run") == launch.weights(tmp_path / "straight")


@pytest.mark.parametrize("always", [True, long(False)])
def test_a_background_checkpoint_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, always: bool) -> None:
    """Once: the present state is saved instead, at once, and the person is told. Again at the next save: the run ends."""
    write, calls = HuggingFaceStorageWriter.write_data, []

    def full(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if always or len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args, **kwargs)

    monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", full)
    console = Console(file=io.StringIO(), width=500)
    run = config(tmp_path / "run", updates=3, **{"checkpoint.background": True, "checkpoint.every": 1, "checkpoint.keep": 3})
    if always:
        fails(r"checkpoint .*000002 could not be saved: the disk is full", train, run, job(), console=console)
        return
    train(run, job(), console=console)
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())] == ["000002", "000003"]
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "000001 could not be saved: " in said
    assert "saved after update 2 instead" in said


@pytest.mark.long
def test_resuming_elsewhere_says_so(tmp_path: Path) -> None:
    """Settings of the engine may change, and threads; what may differ by it is said in one line."""
    trained(tmp_path / "run")
    console = Console(file=io.StringIO(), width=500)
    engine = {"engine.checkpointing": "block", "engine.comm": "reshard"}
    train(config(tmp_path / "run", updates=3, resume=True, **engine), job(), console=console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "engine.comm keep then, reshard now, engine.checkpointing none then, block now: bits may differ" in said


def test_rollout_and_update_must_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is not the same in the update as in the rollout stops the run, saying so."""
    broken = job()
    real = type(broken.model).predict

    def velocity(self: Any, module: Any, *args: Any, **kwargs: Any) -> Tensor:
        return real(self, module, *args, **kwargs) * (1.01 if torch.is_grad_enabled() else 1.0)

    monkeypatch.setattr(type(broken.model), "predict", velocity)
    fails(
        "rollout and update do not compute the same policy",
        train,
        config(tmp_path / "run", **{"rollout.max_log_ratio": 1e-7}),
        broken,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "says"),
    [
        ("nan", 2, "is nan for prompt"),
        ("hangs", 2, "took over 1 s"),
        long("shape", 2, "returned shape [1] for 4 images"),
        long("raises", 2, "raised KeyError"),
        long("exits", 2, "raised SystemExit"),
        long("nan", 1, "is nan for prompt"),
        long("exits", 1, "raised SystemExit"),
        long("hangs", 1, "took over 1 s"),
    ],
)
def test_a_bad_reward_ends_every_process(tmp_path: Path, kind: str, ranks: int, says: str) -> None:
    """In one line and exit code 1, also where one rank's reward alone is bad, and one that hangs keeps nothing alive."""
    done = launch.program("workers.two_ranks:bad_reward", str(tmp_path / "run"), kind, ranks=ranks)
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("fluvial: ")]
    assert f"reward 'reward' {says}" in line
    if ranks == 1:
        launch.one_line(done.stderr)


STATE = "--optimizer.ema-decay 0.9 --kl.coef 0.1 --evaluation.every 3 --optimizer.schedule cosine --optimizer.warmup 2"
# Flags of runs that are killed, and the update that is recorded then; the first has no checkpoint yet.
KILLED = {
    "at once": ("--checkpoint.every 5", 0),
    **{kind: (f"{STATE} --train {kind}", 3) for kind in ("full", "lora")},
    "ahead": ("--rollout.ahead 2 --correction truncate --correction.threshold 2", 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", *map(long, ("at once", "full", "ahead"))])
def test_kill_and_resume_is_the_same_to_the_bit(tmp_path: Path, name: str, fluvial: Any) -> None:
    """kill -9 in the middle of a run, then --resume: the weights, and the records but for their times, of a run without."""
    typed, update = KILLED[name]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    flags = [*launch.SMALL, "--updates", "5", *typed.split()]
    fluvial("train", "handwriting", "--out", straight, *flags)
    with launch.start("train", "handwriting", "--out", str(killed), *flags) as process:
        wait_for_update(killed, update, process)
        process.kill()
    assert not (killed / "summary.json").exists()
    fluvial("train", "handwriting", "--out", killed, "--resume")  # with its own settings: no flag has to be typed again
    assert launch.weights(killed) == launch.weights(straight)
    assert [*map(untimed, launch.records(killed))] == [*map(untimed, launch.records(straight))]


def wait_for_update(out: Path, update: int, process: launch.Process) -> None:
    """Wait until a run has recorded an update."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended too early"
        metrics = out / "metrics.jsonl"
        if metrics.exists() and f'{{"update": {update}, ' in metrics.read_text():
            return
        time.sleep(0.02)
    pytest.fail("the run is too slow")


@pytest.mark.parametrize("number", [signal.SIGINT, long(signal.SIGTERM)])
def test_a_request_to_stop_saves_and_exits_0(tmp_path: Path, number: signal.Signals, fluvial: Any) -> None:
    """Ctrl-C or SIGTERM: the update is finished and saved, and the person is told how to go on."""
    out = tmp_path / "run"
    flags = ["--updates", "500", "--checkpoint.every", "500"]
    with launch.start("train", "handwriting", "--out", str(out), *launch.SMALL, *flags) as process:
        wait_for_update(out, 2, process)
        beside = fluvial("train", "handwriting", "--out", out, "--resume", code=2)
        assert process.poll() is None
        assert f"run folder {out} is held by process" in beside
        process.send_signal(number)
        assert process.wait(timeout=60) == 0, process.stderr
        text, errors = process.stdout, process.stderr
    saved = [path.name for path in (out / "checkpoints").iterdir()]
    assert len(saved) == 1
    assert f"{number.name}: stopped after update {int(saved[0])}, all saved; continue with --resume --out {out}" in text
    assert errors == ""
    more = ["--updates", int(saved[0]) + 1, "--resume"]
    assert f"after update {int(saved[0])}" in fluvial("train", "handwriting", "--out", out, *more)


def test_a_second_request_stops_at_once(tmp_path: Path) -> None:
    """Whatever is being done; one line says so."""
    out = tmp_path / "run"
    large = ["--sampling.prompts", "32", "--sampling.group", "16", "--sampling.steps", "10", "--micro-batch", "64"]
    with launch.start("train", "handwriting", "--out", str(out), *launch.SMALL, *large) as process:
        wait_for_update(out, 0, process)  # an update of this size takes seconds from here
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)  # two signals at once may arrive as one
        assert process.wait(timeout=60) == 130
        assert "SIGINT: stopped at once; everything saved so far" in launch.one_line(process.stderr)


@pytest.mark.long
def test_a_damaged_newest_checkpoint_does_not_block_a_resumption(tmp_path: Path, fluvial: Any) -> None:
    """The newest whole one is taken, and a line says so; without any other the run is refused."""
    out = tmp_path / "run"
    launch.trained(out, "--updates", "4")
    words = ["train", "handwriting", "--out", out, "--updates", 2, "--resume"]
    for damaged, code in ((4, 0), (2, 1)):
        file = next((out / "checkpoints" / f"{damaged:06d}").glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:1000])
        said = fluvial(*words, code=code).replace("\n", " ")
        if code == 0:
            assert f"skipped: checkpoint {out}/checkpoints/000004 is damaged (" in said
            assert f"resumed {out}/checkpoints/000002 after update 2" in said
    assert "is damaged, and there is no other whole one" in said


def test_resuming_with_other_settings_is_refused(tmp_path: Path, fluvial: Any) -> None:
    """It would be another run."""
    out = launch.trained(tmp_path / "run", "--updates", "2")
    for flag, value, says in (
        ("--seed", 5, "--seed 0 there, 5 here"),
        ("--sampling.sampler.eta", 0.5, "0.8 there, 0.5 here"),
    ):
        line = fluvial("train", "handwriting", "--out", out, flag, value, "--resume", code=2)
        assert "is of another run: " + flag in line
        assert says in line


def test_where_samples_come_from_is_no_identity_of_a_run(tmp_path: Path) -> None:
    """Addresses of servers, and how they are asked, may change; the sampler may not."""
    one = config(tmp_path)
    asked = {"rollout.source": "http://a:1", "rollout.servers": ServersConfig(patience=1), "rollout.store": tmp_path}
    expected = fingerprint_run(one, "", "")
    assert fingerprint_run(with_values(one, asked), "", "") == expected
    assert fingerprint_run(with_values(one, {**asked, "sampling.sampler": Stochastic(eta=0.1)}), "", "") != expected


@pytest.mark.long
def test_resuming_on_other_base_weights_is_refused(tmp_path: Path, fluvial: Any) -> None:
    """What LoRA adapts and what a KL refers to is part of the run, wherever it lies."""
    for name in ("one", "same", "other"):
        shutil.copytree(BASE, tmp_path / name)
    file = tmp_path / "other" / WEIGHTS
    save_file({name: tensor / 2 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    out = tmp_path / "run"
    words = ["train", "handwriting", "--out", out]
    fluvial(*words, *launch.SMALL, "--updates", 2, "--train", "lora", "--weights", tmp_path / "one")
    other = fluvial(*words, "--resume", "--weights", tmp_path / "other", code=2)
    assert "is of another run: base_weights" in other
    fluvial(*words, "--resume", "--weights", tmp_path / "same")


def test_a_finished_run_can_be_resumed(tmp_path: Path) -> None:
    """It evaluates and exports again, to the same bits, and records nothing twice; odd lines in the metrics are dropped."""
    out = tmp_path / "run"
    trained(out)
    before, records = launch.weights(out), launch.records(out)
    (out / "samples" / "before.png").unlink()
    with (out / "metrics.jsonl").open("ab") as file:
        file.write(b'3\n\xff{"upd')
    train(config(out, resume=True), job())
    assert launch.weights(out) == before
    assert launch.records(out) == records


def test_a_run_that_is_gamed_ends_early(tmp_path: Path) -> None:
    """With its weights, a report, and the checkpoint of the best evaluation, however few are kept; resumed it watches on."""
    calls = [0]

    def rising(images: Tensor, prompts: Sequence[str]) -> Tensor:
        calls[0] += 1
        return images.mean((1, 2, 3)) + calls[0]

    def falling(images: Tensor, prompts: Sequence[str]) -> Tensor:
        return torch.full((len(prompts),), -float(calls[0]))

    settings: Any = {
        "updates": 6,
        "evaluation.every": 1,
        "evaluation.samples": 2,
        "evaluation.final_samples": 2,
        "checkpoint.every": 1,
        "checkpoint.keep": 1,
        "tracker": "none",
        "evaluation.stop_when_gamed": 2,
    }
    job, out = tiny.job(rewards={"rising": rising}, evaluators={"heldout": falling}), tmp_path / "run"
    summary = train(tiny.config(out, **settings), job)
    assert summary["updates"] == 3
    said = summary["stopped_when_gamed"]
    assert said.startswith("stopped after update 3: the score of the heldout evaluator fell at 2 evaluations in a row (")
    assert said.endswith(f"best evaluation after update 1: checkpoint {out / 'checkpoints' / '000001'}")
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["000001", "000003"]
    assert (out / "weights" / "diffusion_pytorch_model.safetensors").exists()
    assert json.loads((out / "summary.json").read_text())["stopped_when_gamed"] == said
    manifest = json.loads((out / "checkpoints" / "000003" / "manifest.json").read_text())
    assert [update for update, _, _ in manifest["meta"]["evaluations"]] == [1, 2, 3]


def test_a_run_with_a_server_that_is_away_for_a_while(tmp_path: Path) -> None:
    """What fails is counted and kept for the report, what is too much ends the run, and the checkpoint goes on."""
    calls = {"rollout": 0}

    def away(images: Tensor, prompts: Sequence[str]) -> Tensor:
        calls["rollout"] += 1
        if calls["rollout"] in broken:
            raise ConnectionError("connection refused")
        return images.mean((1, 2, 3))

    broken: set[int] = {4}  # the first call is the trial; a rollout of two groups is two
    few = {"evaluation.final_samples": 2, "evaluation.samples": 2, "evaluation.every": 0, "checkpoint.every": 1}
    groups = {"sampling": STEPS, "engine.micro_batch": 4, "rollout.max_invalid": 0.5}
    asked, it = tiny.config(tmp_path / "run", updates=3, tracker="none", **few, **groups), tiny.job(rewards={"it": away})
    with pytest.warns(UserWarning, match=r"^reward 'it' raised ConnectionError \(connection refused\) for prompt"):
        train(asked, it)
    records = launch.records(tmp_path / "run")
    assert [record["invalid"]["groups"] for record in records if "invalid" in record] == [0, 1, 0]
    assert "connection refused" in (tmp_path / "run" / "warnings.txt").read_text()
    calls["rollout"], broken = 0, {4, 5, 6, 7}
    asked = replace(asked, resume=True, updates=6)
    fails(r"connection refused.*; 2 of the 2 groups .*above rollout.max_invalid 0.5\nin the phase reward$", train, asked, it)
    calls["rollout"] = 100
    assert train(asked, it)["updates"] == 6


def test_update_by_update_is_the_run(tmp_path: Path) -> None:
    """The records and the exported weights of `train`, to the bit; nothing else is written."""
    asked = config(tmp_path / "run", optimizer=OptimizerConfig(ema_decay=0.5))
    train(asked, job())
    with Trainer(asked, job()) as trainer:
        records = [trainer.update(), *trainer]
        assert list(trainer) == []
        trainer.export(tmp_path / "own")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "own"}
    assert launch.weights(tmp_path / "own") == launch.weights(tmp_path / "run")
    known = [record for record in launch.records(tmp_path / "run") if "loss" in record]
    assert [*map(untimed, records)] == [*map(untimed, known)]


def test_a_request_to_stop_ends_the_iteration(tmp_path: Path) -> None:
    """After the update that was going on."""
    with Trainer(tiny.config(tmp_path, updates=9), tiny.job()) as trainer:
        done = []
        for record in trainer:
            done.append(record["update"])
            if len(done) == 2:
                trainer.stop.name = "asked"
        assert done == [1, 2, 3]
        assert trainer.stopping


def test_the_world_is_the_callers_where_there_is_one(tmp_path: Path) -> None:
    """A trainer closes the world that it opened, and no other; in either it computes as `engine.deterministic` says."""
    strict = tiny.config(tmp_path, **{"engine.deterministic": True})
    with init_world() as world:
        with Trainer(strict, tiny.job(), world) as trainer:
            assert torch.are_deterministic_algorithms_enabled()
            trainer.update()
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.distributed.is_initialized()
        refuses(
            r"a process group is open already: pass the world of init_world\(\)", Trainer, tiny.config(tmp_path), tiny.job()
        )
        assert torch.distributed.is_initialized()
    with Trainer(tiny.config(tmp_path), tiny.job()):
        assert torch.distributed.is_initialized()
    assert not torch.distributed.is_initialized()
    refuses("prompts is empty", lambda: Trainer(tiny.config(tmp_path), tiny.job(prompts=())))
    assert not torch.distributed.is_initialized()
