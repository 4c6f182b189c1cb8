"""Dry runs of every recipe and adapter, on 1 and 8 ranks: nothing fails, and what fluvial promises holds."""

import io
import json
import sys
import threading
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_conditioned, tiny_modular, tiny_pipelines, tiny_replayed
from helpers.dry_runs import between, check, gathers, reductions, simulations
from helpers.marks import long
from helpers.refusals import refuses
from rich.console import Console

from fluvial.engines.cli.main import run as command_line
from fluvial.engines.engine.config import EngineConfig
from fluvial.engines.extensions.dryrun.passes import PassRepeater
from fluvial.engines.extensions.dryrun.report import draw
from fluvial.engines.extensions.dryrun.run import _complete, dry_run
from fluvial.engines.extensions.plan.fit import to_plan_config
from fluvial.engines.extensions.plan.plan import PlanConfig, plan
from fluvial.engines.extensions.simulate.device import GIB, Accelerator
from fluvial.engines.extensions.simulate.mode import SimulatedMode, describe_call
from fluvial.engines.methods import Distill, HeadGan
from fluvial.engines.run.config import PipelineConfig, TrainConfig, with_values
from fluvial.engines.run.job import open_configured
from fluvial.engines.run.recipes import RECIPES
from fluvial.engines.sampling.config import SamplingConfig, Truncate
from fluvial.engines.sampling.generate import Guidance
from fluvial.engines.sampling.window import AllSteps, RandomWindow
from fluvial.models.handwriting import BASE
from fluvial.models.lora import Dora, Lokr, LoraConfig, LowRank
from fluvial.models.step_cache import GuidanceCache, NoCache
from fluvial.models.tiny.modular import find_call

pytestmark = pytest.mark.simulated
UNITS = {"handwriting": 5, "handwriting-unet": 7, "words": 5, "edit-words": 5}
SMALL = {"engine.micro_batch": 2, "engine.update_micro_batch": "rollout"}


def recipe(name: str) -> TrainConfig:
    """Return a recipe, whose teachers, which other runs make, are the base model."""
    config = RECIPES[name]()
    if not isinstance(config.method, Distill):
        return config
    parts = [word.rpartition("=") for word in config.method.teacher]
    return with_values(config, {"teacher": tuple(f"{source}{sign}{BASE}" for source, sign, _ in parts)})


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_runs(name: str, ranks: int) -> None:
    """With one read-back per update (GARDO reads features), no blocking copy, and one read of how diverse samples are."""
    with simulations() as found:
        read_backs = {
            "dmd2": [6],
            "ac-dmd": [6],
            "tdm": [2],
            "rtdmd": [2],
            "tdm-r1": [3],
            "gardo": [1, 1],
            "adjoint": [1, 1],
        }.get(name, [1])
        check(dry_run(recipe(name), ranks=ranks), read_backs=read_backs)
    waits = {(wait.operation, wait.line.split(":")[0]): times for wait, times in between(found[0]).items()}
    assert waits in ({}, {("_local_scalar_dense", "engines/sampling/generate.py"): 1}), waits


@pytest.mark.parametrize("name", ["grpo", "nft", "dmd2"])
def test_a_copy_of_a_built_in_method_is_planned_and_tried_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No name of a method has a case of its own: networks, reads, collectives and bytes are the same."""
    config = recipe(name)
    copy: Any = dataclass(frozen=True)(type("Copy", (type(config.method),), {"__module__": __name__}))
    monkeypatch.setattr(sys.modules[__name__], "Copy", copy, raising=False)
    method: Any = config.method
    again = replace(config, method=copy(**{each.name: getattr(method, each.name) for each in fields(method)}))
    assert again.method.method_name == f"{__name__}:Copy"
    plans = [to_plan_config(each, "handwriting", 8, torch.device("cpu")) for each in (config, again)]
    assert plans[0] == plans[1]
    phases = [dry_run(each, ranks=8).as_dict()["phases"] for each in (config, again)]
    checked = {"before", "peak", "after", "lines", "operations"}  # its first loss is checked on copies
    same = [{name: {k: v for k, v in phase.items() if k not in checked} for name, phase in each.items()} for each in phases]
    assert same[0] == same[1]


def test_text_encoders_are_repeated_on_paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped: list[Any] = []

    def record(repeater: PassRepeater, encode: Any) -> Any:
        wrapped.append(encode)
        return encode

    monkeypatch.setattr(PassRepeater, "wrap_text", record)
    dry_run(adapter("sd3", tmp_path), ranks=1)
    assert len(wrapped) == 1


@pytest.mark.long
def test_an_adversary_runs() -> None:
    """The network with the head, the images, and the gradient with respect to samples, on full weights of 8 ranks."""
    check(dry_run(with_values(recipe("dmd2"), {"gan": HeadGan(), "train": "full"}), ranks=8), read_backs=[6])


def test_items_that_move_between_ranks_are_of_known_samples(tmp_path: Path) -> None:
    """Minibatches that do not divide among the ranks send items of which this rank's stand-in knows no values."""
    uneven = {"sampling.prompts": 4, "sampling.group": 5, "passes.minibatches": 5}
    check(dry_run(with_values(adapter("sd3", tmp_path), uneven), ranks=8))


def adapter(name: str, folder: Path, recipe: str | None = None) -> TrainConfig:
    """Return the run of a tiny pipeline that is saved into a folder, by default by a policy gradient."""
    saved = tiny_pipelines.save(tiny_pipelines.ROWS[name], folder / name)
    height, width, *frames = tiny_pipelines.ROWS[name].sizes[0]
    config = RECIPES[recipe or ("ddpo" if name in ("sd1", "sdxl") else "grpo")](str(saved))
    pipeline = PipelineConfig(height=height, width=width, frames=(*frames, 1)[0], text_cache=folder / "texts")
    return with_values(config, {"train": "lora", "pipeline": pipeline, **SMALL})


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("name", [*(name for name, row in tiny_pipelines.ROWS.items() if not row.variant), "wan-experts"])
def test_every_adapter_runs(name: str, ranks: int, tmp_path: Path) -> None:
    """Its text encoders, network and VAE, from their settings; lengths of prompts and timesteps are known to the host."""
    config = adapter(name, tmp_path)
    with simulations() as found:
        report = dry_run(config, ranks=ranks)
    check(report)
    assert config.pipeline.text_cache is not None
    assert not config.pipeline.text_cache.exists(), "prompts without values are in the run's own cache"
    reads = [wait for wait in between(found[0]) if "models/pipelines/" not in wait.line]  # prompts that are encoded
    assert [wait.line.split(":")[0] for wait in reads] == ["engines/sampling/generate.py"], reads
    assert report.find_phase("decode").operations > 0
    assert report.find_phase("rollout").flops > 0


@pytest.mark.filterwarnings("ignore")  # of diffusers' own parts
@pytest.mark.parametrize(
    ("name", "ranks"), [("sana", 8), long("aura-flow", 1), ("Flux3", 8), long("MiniMaxH3", 1), ("Wan22", 2)]
)
def test_pipelines_without_an_adapter_run(name: str, ranks: int, tmp_path: Path) -> None:
    """Recorded and modular ones are read on the host, with values; what their network is given is on the device.

    No pass waits for it. The closed form is near the trace of a modular one; of recorded ones it says what to do.
    """
    size: dict[str, Any] = {}
    if name in tiny_replayed.ROWS:
        options = dict(tiny_replayed.ROWS[name].options)
        height, width, scale = (options.pop(option) for option in ("height", "width", "guidance_scale"))
        tiny_replayed.load(name, tmp_path / name)
    else:
        asked = find_call(f"{name}ModularPipeline")
        options, height, width, scale = dict(asked.call), asked.size, asked.size, asked.scale
        size = {"pipeline.frames": asked.frames}
        tiny_modular.folder_of(name, tmp_path / name)
    (tmp_path / "prompts.txt").write_text("a red fox\ntwo cats\na blue cup\n")
    prompts = (str(tmp_path / "prompts.txt"),)
    config = replace(RECIPES["grpo"](str(tmp_path / name)), prompts=prompts, rewards=("jpeg",))
    call = tuple(f"{option}={json.dumps(value)}" for option, value in options.items())
    rollout = SamplingConfig(prompts=2, group=2, steps=3, window=AllSteps(), guidance=Guidance(scale))
    changes: dict[str, Any] = {"pipeline.height": height, "pipeline.width": width, "pipeline.call": call}
    passes: dict[str, Any] = {"updates": 1, "passes.minibatches": 1, **SMALL}
    config = with_values(config, {"train": "lora", "sampling": rollout, **passes, **changes, **size})
    with simulations() as found:
        report = dry_run(config, ranks=ranks)
    check(report)
    waits = [wait for wait in between(found[0]) if wait.line.startswith("models/")]
    assert not waits, waits
    assert report.find_phase("rollout").flops > 0
    if name in tiny_replayed.ROWS:
        refuses("has no adapter, so that .* fluvial train --dry-run", plan, str(tmp_path / name), PlanConfig())
    elif name == "Flux3":  # tables of places, which the plan leaves out, are as large as the network of the others
        planned = plan(str(tmp_path / name), to_plan_config(config, str(tmp_path / name), ranks, torch.device("cuda")))
        assert 0.85 < planned.update.total / report.find_phase("update").peak < 1.0
    assert any("they are on the host here" in note for note in report.notes)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of diffusers' own parts
def test_keys_of_the_prompt_are_held_and_leave_out_operations(tmp_path: Path) -> None:
    """Of Qwen-Image 2.1 in blocks; and passes of CUDA graphs, which run as written, are among what is not simulated."""
    asked, folder = find_call("QwenImage21ModularPipeline"), tiny_modular.folder_of("QwenImage21", tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a red fox\ntwo cats\na blue cup\n")
    rollout = SamplingConfig(prompts=2, group=2, steps=4, window=AllSteps(), guidance=Guidance(asked.scale))
    changes: dict[str, Any] = {"train": "lora", "sampling": rollout, "pipeline.height": 32, "pipeline.width": 32, **SMALL}
    changes |= {"updates": 1, "passes.minibatches": 1, "correction": Truncate(), "prompts": (str(tmp_path / "prompts.txt"),)}
    config = with_values(replace(RECIPES["grpo"](str(folder)), rewards=("jpeg",)), changes)
    whole, kept = (dry_run(with_values(config, {"rollout.reuse": reuse})) for reuse in ("exact", "keys"))
    assert whole.error is None, whole.error
    assert kept.error is None, kept.error
    for phase in ("rollout", "update"):  # diffusers' network reads values on the host; kept keys add none
        held, before = (sum(wait.times for wait in each.find_phase(phase).waits) for each in (kept, whole))
        assert 0 < held <= before
    assert kept.find_phase("update").flops == whole.find_phase("update").flops
    assert kept.find_phase("rollout").flops < 0.7 * whole.find_phase("rollout").flops
    assert kept.find_phase("rollout").peak > whole.find_phase("rollout").peak
    graphs = with_values(config, {"engine.compile": "reduce-overhead"})
    assert any(note.startswith("CUDA graphs of rollout passes") for note in dry_run(graphs).notes)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["wan", "wan-clip", "wan-first-frame", "qwen-edit", "sd-image", "xl-image", "sd-inpaint", "xl-inpaint"]
)
def test_adapters_with_images_run(name: str, tmp_path: Path) -> None:
    """The image of each prompt is read; the encoders of images have no values."""
    row, folder = tiny_conditioned.EDITS.get(name), str(tiny_conditioned.save(name, tmp_path / name))
    takes, shape = (("image",), (16, 16)) if row is None else (row.media, tiny_conditioned.SIZE)
    records = [
        {"prompt": text, **{argument: f"{argument}-{text}.png" for argument in takes}} for text in ("foxes", "owls", "cats")
    ]
    for number, record in enumerate(records):
        for argument in takes:
            tiny_conditioned.draw_image(tmp_path / record[argument], number, shape)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    size: dict[str, Any] = {"height": 32, "width": 32} if name == "qwen-edit" else {"height": 16, "width": 32, "frames": 5}
    config = RECIPES["grpo" if row is None else "ddpo"](folder)
    if row is not None:
        call = tuple(f"{argument}={value}" for argument, value in row.call.items())
        size = {"height": shape[0], "width": shape[1], "call": call}
    pipeline = PipelineConfig(**size, text_cache=tmp_path / "texts")
    given: dict[str, Any] = {"prompts": (str(tmp_path / "prompts.jsonl"),), "rewards": ("jpeg",)}
    given |= {"train": "lora", "pipeline": pipeline}
    report = dry_run(with_values(config, {**given, **SMALL}), ranks=2)
    check(report)
    assert report.find_phase("rollout").flops > 0


ENGINES = {"comm": "reshard", "checkpointing": "block", "offload": "always", "replicas": 2, "grad_sync": "every"}


@pytest.mark.parametrize(("field", "value"), [*ENGINES.items(), ("offload", "phases")])
def test_every_setting_of_the_engine_runs(field: str, value: Any) -> None:
    report = dry_run(with_values(RECIPES["grpo"](), {f"engine.{field}": value}), ranks=8)
    assert report.error is None
    assert report.fits
    if value == "phases":  # the optimizer's state is on the host during the rollout
        assert (
            report.find_phase("rollout").before < report.find_phase("update").before or report.find_phase("rollout").peak > 0
        )


@pytest.mark.parametrize("base", ["auto", "int8"])
def test_blocks_on_the_host_are_copied_beside_the_passes(base: Any) -> None:
    """No copy stops the host, and their bytes are those of the plan, after two blocks to begin with."""
    config = with_values(RECIPES["grpo"](), {"train": "lora", "engine.base": base, "engine.checkpointing": "block"})
    swapped = dry_run(with_values(config, {"engine.offload": "blocks"}), ranks=8)
    check(swapped)
    plain = dry_run(config, ranks=8)
    whole, planned = (
        plan("handwriting", PlanConfig(engine=replace(EngineConfig(), base=base, offload=offload))).update
        for offload in ("none", "blocks")
    )
    more = swapped.find_phase("update").copied - plain.find_phase("update").copied
    passes = min(swapped.micro_batches, 2)
    assert more == pytest.approx(passes * planned.copied + planned.gathered - whole.gathered, rel=0.05)
    assert swapped.find_phase("rollout").copied > more
    assert swapped.find_phase("update").peak < plain.find_phase("update").peak


@pytest.mark.parametrize("base", ["auto", "nf4"])
@pytest.mark.parametrize("form", [LowRank(), Dora(), Lokr()], ids=str)
def test_every_form_of_an_adapter_runs(form: Any, base: Any) -> None:
    config = replace(RECIPES["grpo"](), train="lora", lora=LoraConfig(rank=4, form=form))
    report = dry_run(with_values(config, {"engine.base": base}), ranks=8)
    check(report)
    assert report.find_phase("update").count_waits("read") == 1


@pytest.mark.parametrize("offload", ["none", "phases", "always"])
@pytest.mark.parametrize("comm", ["keep", "reshard"])
def test_buffers_of_a_pipeline_are_on_the_device(comm: str, offload: str, tmp_path: Path) -> None:
    """SD3 stores the embedding of positions as a buffer, which FSDP2 does not move; offload="always" is for parameters."""
    config = adapter("sd3", tmp_path)
    settings: dict[str, Any] = {"comm": comm, "offload": offload, "replicas": 1}
    engine = replace(config.engine, **settings)
    report = dry_run(with_values(config, {"engine": engine}), ranks=8)
    assert report.error is None, report.error


def test_ranks_that_share_a_sample_send_its_tokens(tmp_path: Path) -> None:
    config = adapter("qwen-image", tmp_path)
    alone = dry_run(config, ranks=8)
    shared = dry_run(with_values(config, {"engine.context_parallel": 2}), ranks=8)
    assert shared.error is None
    assert any(each.ranks == 2 for each in shared.find_phase("rollout").communication)
    assert shared.find_phase("rollout").flops < alone.find_phase("rollout").flops
    ring = dry_run(with_values(adapter("wan", tmp_path, "nft"), {"engine.context_parallel": 2, "engine.ring": 2}), ranks=2)
    assert ring.error is None
    assert {each.name for each in ring.find_phase("rollout").communication if each.ranks == 2} == {"all_gather"}


def test_steps_that_take_over_half_of_guidance_have_half_of_its_operations() -> None:
    """Eight of ten steps are no window, and every second one of them computes one half."""
    changes = {"guidance": Guidance(2.0), "steps": 10, "window": RandomWindow(2, high=2)}
    config = with_values(RECIPES["grpo"](), {f"sampling.{name}": value for name, value in changes.items()})
    whole, kept = (
        dry_run(with_values(config, {"rollout.step_cache": cache}), ranks=1).find_phase("rollout").flops
        for cache in (NoCache(), GuidanceCache())
    )
    assert kept == pytest.approx(whole * (1 - 4 / 20), rel=0.01)


def test_rollouts_ahead_of_the_updates_run_beside_them() -> None:
    """Their thread is simulated too, and their peak is added to the update's."""
    config = with_values(RECIPES["nft"](), {"rollout.ahead": 1})
    alone, ahead = dry_run(RECIPES["nft"](), ranks=2), dry_run(config, ranks=2)
    assert ahead.error is None
    assert ahead.concurrent > 0
    assert ahead.peak > alone.peak
    assert ahead.find_phase("rollout").flops > 0


def test_timesteps_that_are_drawn_on_the_device_are_read_once_per_update(tmp_path: Path) -> None:
    """By networks that choose their parts by them, whatever the number of passes; those of recorded steps are known."""
    report = dry_run(adapter("wan-experts", tmp_path, "nft"), ranks=2)
    assert report.error is None, report.error
    assert report.micro_batches > 1
    reads = {wait.line.split(":")[0]: wait.times for wait in report.find_phase("update").waits if wait.kind == "read"}
    assert reads == {"models/host_values.py": 1, "engines/engine/engine.py": 1}


def test_rollouts_ahead_ask_no_other_rank_from_their_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could meet one of another rank's main thread, whose passes agree on which of two experts run."""
    collective, found = SimulatedMode._run_collective, list[tuple[str, str]]()

    def noted(mode: SimulatedMode, func: Any, args: tuple, kwargs: dict[str, Any], *, fake: bool) -> Any:
        if (call := describe_call(func, args, kwargs)) is not None:
            found.append((threading.current_thread().name, call.name))
        return collective(mode, func, args, kwargs, fake=fake)

    monkeypatch.setattr(SimulatedMode, "_run_collective", noted)
    config = adapter("wan-experts", tmp_path)
    config = with_values(config, {"rollout.ahead": 1, "correction": Truncate()})
    report = dry_run(config, ranks=8)
    assert report.error is None
    assert report.find_phase("rollout").flops > 0
    assert "rollouts" not in {thread for thread, _ in found}
    update = [each for each in report.find_phase("update").communication if each.line.startswith("models/routing.py")]
    assert [each.name for each in update] == ["all_reduce"]
    assert update[0].calls >= 2  # of two micro-batches, and of the correction's passes


def test_a_decode_beside_gathered_parameters_says_what_it_costs(tmp_path: Path) -> None:
    """The chunks of a rollout are decoded while the parameters are gathered for the next one; comm=reshard frees them."""
    config = adapter("sd3", tmp_path)
    sharded = replace(config, train="full", optimizer=replace(config.optimizer, lr=1e-4))
    keep, reshard = (
        dry_run(with_values(sharded, {"engine.comm": comm}), ranks=8).find_phase("decode") for comm in ("keep", "reshard")
    )
    assert keep.peak > reshard.peak
    held = sum(line.bytes for line in keep.lines if "fsdp" in line.line)
    assert held > 0.5 * (keep.peak - reshard.peak)


def test_gathers_of_an_update_are_those_promised() -> None:
    """One per block and one for the rest, on 8 ranks, with two micro-batches as with one."""
    config = with_values(RECIPES["grpo"](), {"engine.update_micro_batch": 8})
    config = with_values(config, {"engine.replicas": 1, "engine.compute": "bfloat16"})  # sharded by FSDP2
    report = dry_run(config, ranks=8)
    assert report.micro_batches > 1
    check(report, units=UNITS["handwriting"])
    resharded = dry_run(with_values(config, {"engine.comm": "reshard"}), ranks=8)
    assert gathers(resharded.find_phase("update")) > 2 * UNITS["handwriting"]


COMPARING: list[tuple[str, dict[str, Any]]] = [
    *(("grpo", kl) for kl in ({"coef": 0.1}, {"ema_coef": 0.1}, {"coef": 0.1, "ema_coef": 0.1})),
    *((name, {"coef": 0.1}) for name in ("dppo", "guard", "nft", "dgpo")),
    *((name, {}) for name in ("nft", "awm", "dgpo", "crd", "dpo")),
]


def comparing(base: str, kl: dict[str, Any]) -> TrainConfig:
    """Return a run that compares policies, sharded by FSDP2, with one update per rollout."""
    config = RECIPES[base]()
    config = with_values(config, {f"passes.{field.name}": 1 for field in fields(config.method.passes)})
    engine = replace(config.engine, replicas=1, compute="bfloat16")
    return with_values(config, {**{f"kl.{k}": v for k, v in kl.items()}, "engine": engine})


@pytest.mark.parametrize(("base", "kl"), COMPARING, ids=str)
def test_an_update_that_compares_policies_gathers_each_unit_once(base: str, kl: dict[str, Any]) -> None:
    """For the predictions of the other policies and its own passes together; gradients are reduced once, too."""
    report = dry_run(comparing(base, kl), ranks=8)
    check(report, units=UNITS["handwriting"])
    assert reductions(report.find_phase("update")) == UNITS["handwriting"]
    if (base, kl) == COMPARING[0]:  # a reference of its own is gathered once besides the policy
        check(dry_run(replace(comparing(base, kl), train="full"), ranks=8), units=2 * UNITS["handwriting"])


def test_a_report_is_a_table_json_and_an_image(tmp_path: Path) -> None:
    report = dry_run(RECIPES["grpo"](), ranks=8)
    names = ["build", "rollout", "decode", "rewards", "update", "evaluation", "checkpoint"]
    assert [phase.name for phase in report.phases] == names
    console = Console(width=200, record=True, file=io.StringIO())
    report.show(console)
    text = console.export_text()
    assert all(name in text for name in (*names, "Not simulated", "NCCL", "overlap", "values on the device", "allocator"))
    record = json.loads(json.dumps(report.as_dict()))
    assert set(record["phases"]) == set(names)
    assert record["checkpoint"]["bytes_of_rank"] < record["checkpoint"]["bytes"]
    draw(report, tmp_path / "memory.svg")
    assert "<svg" in (tmp_path / "memory.svg").read_text()


def test_passes_on_paper_count_like_those_that_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak, FLOPs, collectives and host waits, with text encoders and parameters that are gathered in every pass."""
    config = adapter("sd3", tmp_path)
    config = with_values(config, {"train": "full", "engine.comm": "reshard"})
    short = dry_run(config, ranks=2)
    monkeypatch.setattr(PassRepeater, "_run", lambda self, kind, call: call())
    whole = dry_run(config, ranks=2)
    for phase in ("rollout", "update", "evaluation"):
        found, expected = short.find_phase(phase), whole.find_phase(phase)
        assert (found.flops, found.calls, found.sent) == (expected.flops, expected.calls, expected.sent)
        # Keys of the prompt are not kept on paper, which are much of what a network as small as this one holds.
        assert found.peak == pytest.approx(expected.peak, rel=0.08)
        assert sorted(found.waits) == sorted(expected.waits)
    assert short.find_phase("rollout").calls > 0


def test_samples_that_are_not_made_are_added(tmp_path: Path) -> None:
    """A run of ten times as many samples holds ten times as many trajectories."""
    config = RECIPES["grpo"]()
    few = with_values(config, {**SMALL, "engine.micro_batch": 4, "sampling.prompts": 2, "sampling.group": 4})
    many = with_values(few, {"sampling.prompts": 20})
    reports = [dry_run(each) for each in (few, many)]
    stored = [report.find_phase("update").stored for report in reports]
    assert stored[0] == 0
    assert stored[1] > 0
    assert reports[1].micro_batches == pytest.approx(10 * reports[0].micro_batches, rel=0.5)


def test_a_reward_that_needs_other_prompts_is_named(tmp_path: Path) -> None:
    """Where a run names none, prompts are stand-ins, without records that some rewards need; other errors end the run."""

    def needs_records(images: Any, prompts: Any) -> Any:
        raise KeyError("objects")

    def broken(images: Any, prompts: Any) -> Any:
        raise RuntimeError("a tensor on another device")

    config = adapter("sd3", tmp_path)
    for reward, ends in ((needs_records, False), (broken, True)):
        given = _complete(config, tmp_path, [])
        report = dry_run(replace(given, rewards=()), replace(open_configured(given), rewards={"mine": reward}))
        assert (report.error is not None) == ends
        assert any("the reward mine, which needs other prompts ('objects')" in note for note in report.notes) != ends


def test_the_command_says_whether_it_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 where it does not; the report is written either way."""
    words = ["train", "grpo", "--dry-run", "--as-gpus", "8", "--report", str(tmp_path)]
    assert command_line(words) == 0
    shown = capsys.readouterr().out
    assert "It fits into 80 GiB" in shown
    assert "about 0 GPU hours at 40%" in shown
    assert json.loads((tmp_path / "dry-run.json").read_text())["ranks"] == 8
    assert (tmp_path / "memory.svg").is_file()
    assert command_line([*words, "--gpu-memory-gib", "6.05"]) == 1
    assert "does not fit" in capsys.readouterr().err
    small, large = (dry_run(RECIPES["grpo"](), accelerator=Accelerator(memory=size)) for size in (2**20, 80 * GIB))
    assert (small.peak == large.peak, small.fits, large.fits) == (True, False, True)
