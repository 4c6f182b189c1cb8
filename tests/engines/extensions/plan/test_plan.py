"""Plans: parameter counts of published transformers, a small transformer measured, and the knobs that make a plan fit."""

import itertools
import json
import re
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from helpers import tiny_conditioned, tiny_modular, tiny_pipelines
from helpers.marks import long
from helpers.refusals import refuses

from fluvial.engines.engine.config import EngineConfig, OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.extensions.plan.check import build_case, compare
from fluvial.engines.extensions.plan.fit import plan_steps_to_fit
from fluvial.engines.extensions.plan.hours import count_run
from fluvial.engines.extensions.plan.memory import ActivationSpan, account
from fluvial.engines.extensions.plan.plan import (
    GIB,
    KNOBS,
    ImageSize,
    PlanConfig,
    Train,
    build_on_meta,
    find_flags_to_fit,
    plan,
)
from fluvial.engines.run.config import with_values
from fluvial.engines.run.passes.storages import LiveStorages
from fluvial.engines.run.recipes import RECIPES
from fluvial.models.lora import LoraConfig, add_lora, find_lora_layers
from fluvial.models.pipelines.folder import CONFIGURATIONS, read_settings
from fluvial.models.pipelines.open import open_model
from fluvial.models.quantised import FORMATS
from fluvial.models.shapes import MODELS, PassShape, find_model_shape, list_blocks
from fluvial.models.step_cache import FirstBlockCache, GuidanceCache, NoCache
from fluvial.models.tiny.modular import find_call

TRAINS: tuple[Train, Train] = ("full", "lora")


@pytest.mark.parametrize(
    ("name", "parameters", "units"),
    [long("sd3.5-medium", 2.5e9, 24), ("flux.1-dev", 11.9e9, 57), ("qwen-image", 20.4e9, 60)],
)
def test_published_transformers_have_their_size(name: str, parameters: float, units: int) -> None:
    """Within 3% of what their makers say, buffers included, nearly all of it in the blocks."""
    with torch.device("meta"):
        module = MODELS[name].build()
    count = sum(tensor.numel() for tensor in (*module.parameters(), *module.buffers()))
    assert count == pytest.approx(parameters, rel=0.03)
    repeated = list_blocks(MODELS[name], module)
    assert len(repeated) == units
    inside = sum(parameter.numel() for block in repeated for parameter in block.parameters())
    assert inside / sum(parameter.numel() for parameter in module.parameters()) > 0.97


COMMS, CHECKPOINTS = ("keep", "reshard"), ("none", "block", "selective")
LIES: list[dict[str, Any]] = [{"comm": comm, "checkpointing": each} for comm, each in product(COMMS, CHECKPOINTS)]
MORE_LIES: list[dict[str, Any]] = [{"grad_sync": "every"}, {"offload": "always"}]
MORE_LIES += [{"compute": "bfloat16"}, {"reduce": "bfloat16"}]
# Both ends are trained in either way, and so are all pairs of a way to train and one setting.
COMPARED: list[Any] = [
    *product(TRAINS, (LIES[0], LIES[-1])),
    *itertools.starmap(long, zip(TRAINS[::-1] * 2, LIES[1:-1], strict=True)),
]
COMPARED += itertools.starmap(long, product(TRAINS, MORE_LIES))


@pytest.mark.parametrize(("train", "lies"), COMPARED, ids=str)
def test_a_plan_is_what_an_update_takes(one: World, train: Any, lies: dict[str, Any]) -> None:
    """What is held to the byte; what an update allocates at its peak no more than planned, and nearly that."""
    engine, optimizer = EngineConfig(**lies), OptimizerConfig(ema_decay=0.9)
    config = PlanConfig(train=train, micro_batch=16, micro_batches=2, engine=engine, optimizer=optimizer)
    for row in compare(build_case("handwriting", config, one)):
        assert row.agrees, row
        assert row.measured > 0


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("flux.1-dev", {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 1}),
        ("qwen-image", {"num_layers": 1, "num_attention_heads": 1, "joint_attention_dim": 3584}),
    ],
)
def test_a_published_network_can_be_compared(
    one: World, monkeypatch: pytest.MonkeyPatch, name: str, settings: dict[str, Any]
) -> None:
    """Inputs that samples share, or that are lists, too; frozen weights are in the compute dtype, adapters in float32."""
    folder = next(path for path in CONFIGURATIONS.iterdir() if path.name.lower() == name)
    values = {**read_settings(folder / "transformer" / "config.json"), **settings}
    network = getattr(diffusers, values["_class_name"])
    small = f"small-{name}"  # a name of its own, because a plan keeps the networks that it has built
    monkeypatch.setitem(MODELS, small, MODELS[name]._replace(build=lambda: network.from_config(values)))
    engine = EngineConfig(compute="bfloat16")
    case = build_case(small, PlanConfig(micro_batch=2, micro_batches=2, pipeline=ImageSize(64, 64), engine=engine), one)
    assert torch.get_default_dtype() == torch.float32
    rows = compare(case)
    assert [row for row in rows if not row.agrees and row.kind != "allocated at the peak"] == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("train", "lies"),
    [
        *(("lora", {"base": base}) for base in FORMATS),
        ("lora", {"base": "nf4", "compute": "bfloat16", "checkpointing": "block"}),
        ("lora", {"base": "int8", "comm": "reshard", "checkpointing": "selective"}),
        ("full", {"masters": "bfloat16"}),
        ("full", {"masters": "bfloat16", "compute": "bfloat16", "reduce": "bfloat16"}),
        ("full", {"checkpointing": "block", "checkpointed": 2}),
    ],
    ids=str,
)
def test_what_each_setting_of_a_small_card_saves_is_measured(one: World, train: Any, lies: dict[str, Any]) -> None:
    """Weights, moments and gradients to the byte; the peak of an update within a tenth."""
    config = PlanConfig(train=train, micro_batch=16, micro_batches=2, engine=EngineConfig(**lies))
    for row in compare(build_case("handwriting", config, one)):
        assert row.agrees or row.planned == pytest.approx(row.measured, rel=0.1), row


LESS: list[dict[str, Any]] = [{}, {"comm": "reshard"}, {"grad_sync": "every"}, {"offload": "always"}]


@pytest.mark.parametrize("name", MODELS)
def test_more_gpus_never_take_more_on_each(name: str) -> None:
    """Whatever the settings; and no setting that is there to save memory takes more."""
    with torch.device("meta"):
        module = MODELS[name].build()

    def total(gpus: int, lies: dict[str, Any]) -> int:
        kept: dict[str, Any] = {"optimizer": OptimizerConfig(ema_decay=0.9), "device": torch.device("cuda")}
        kept |= {"engine": EngineConfig(**lies), "ranks": gpus, "activations": [ActivationSpan(0, 0)]}
        return account(module, list_blocks(MODELS[name], module), **kept).total

    totals = [[total(gpus, lies) for gpus in (1, 2, 8, 64)] for lies in LESS]
    for sizes in totals:
        assert all(more >= less for more, less in pairwise(sizes)), sizes
    for sizes in totals[1:]:
        assert all(saved <= plain for saved, plain in zip(sizes, totals[0], strict=True)), sizes


@pytest.mark.parametrize("train", [long("full"), "lora"])
def test_checkpointing_takes_less_the_more_there_is(train: Any) -> None:
    """Of the update; the rollout keeps nothing anyway. Offload in phases is for the rollout."""
    config = PlanConfig(train=train)
    none, selective, block = (
        plan("handwriting", replace(config, engine=EngineConfig(checkpointing=how)))
        for how in ("none", "selective", "block")
    )
    assert block.update.activations < selective.update.activations < none.update.activations
    assert block.rollout == selective.rollout == none.rollout
    assert none.rollout.activations < block.update.activations
    phases = plan("handwriting", replace(config, engine=EngineConfig(offload="phases")))
    assert phases.update == none.update
    assert phases.rollout.total < none.rollout.total


def test_what_references_guidance_and_resolutions_take() -> None:
    """A reference is in the computation's bfloat16, where what is trained in full has float32; LoRA's costs nothing.

    Both halves of guidance are in one forward pass, and each sample is stored with what it is guided away from.
    """
    full, lora = (plan("handwriting", PlanConfig(train=train, reference=True)).update for train in TRAINS)
    assert 2 * full.reference == full.parameters > 0
    assert lora.reference == 0
    for train in TRAINS:  # a teacher is a copy of the base whatever is trained
        assert plan("handwriting", PlanConfig(train=train, teachers=2)).update.reference == 2 * full.reference
    one, both = (plan("handwriting", PlanConfig(guidance=on)).update for on in (False, True))
    assert both.activations == pytest.approx(2 * one.activations, rel=0.02)
    assert both.trajectory - one.trajectory == 16 * 4 * (4 * 14 + 40)
    once, thrice = (plan("handwriting", PlanConfig(graphs=graphs, micro_batch=8)) for graphs in (1, 3))
    assert thrice.update.activations == plan("handwriting", PlanConfig(micro_batch=24)).update.activations
    assert thrice.rollout == once.rollout
    caches = NoCache(), GuidanceCache(), FirstBlockCache(), FirstBlockCache(order=2)
    held = [plan("handwriting", PlanConfig(guidance=True, micro_batch=3, step_cache=cache)) for cache in caches]
    sizes = [each.rollout.trajectory - held[0].rollout.trajectory for each in held]
    # A difference of each sample; the first block's tokens of image and text in bfloat16, and what the others add to them,
    # with two differences of that.
    tokens = 2 * (2 * 3) * (64 + 4) * 64
    assert sizes == [0, 3 * 4 * 8 * 32, 2 * tokens, 4 * tokens]
    assert all(each.update == held[0].update for each in held)
    apart, merged = (plan("handwriting", PlanConfig(merged=merged)) for merged in (False, True))
    layers = find_lora_layers(build_on_meta("handwriting", "lora", LoraConfig())).values()
    adapted = sum(layer.base_layer.weight.numel() for layer in layers)
    assert merged.rollout.trajectory - apart.rollout.trajectory == 2 * adapted > 0
    assert merged.update == apart.update
    graphed = EngineConfig(compile="reduce-overhead")
    once, graph = (
        plan("handwriting", PlanConfig(guidance=True, micro_batch=3, engine=each)) for each in (EngineConfig(), graphed)
    )
    # Sample and velocity; level, timestep and scale; tokens and pooled embeddings of both halves.
    assert graph.rollout.total - once.rollout.total == 3 * 4 * (2 * 8 * 32 + 3 + 2 * (4 * 14 + 40))
    assert graph.update == once.update
    for model in (model for model in MODELS.values() if model.resolution):
        small, large = (model.inputs(2, resolution) for resolution in (512, 1024))
        assert large["hidden_states"].numel() == 4 * small["hidden_states"].numel()
        assert large["encoder_hidden_states"].shape == small["encoder_hidden_states"].shape
        video = model.build_inputs(1, PassShape(64, 33))["hidden_states"]
        assert video.ndim != 5 or video.shape == (1, 16, 9, 8, 8)


def test_the_knobs_are_turned_from_the_cheapest() -> None:
    """With ever less memory the dearest knob that is turned gets dearer, until nothing helps."""
    start = PlanConfig(train="full", gpus=8, reserve_gib=0)
    ladder = []
    need = plan("handwriting", start).need
    for _ in range(40):
        flags, found = find_flags_to_fit("handwriting", replace(start, memory_gib=need / GIB))
        if not found.fits:
            break
        ladder.append(flags)
        need = found.need - 1
    assert ladder[0] == ""
    assert ladder[1] == "--engine.checkpointing block"
    order = list(KNOBS)
    ranks = [sum(2 ** order.index(knob) for knob in order if knob in flags) for flags in ladder]
    assert ranks == sorted(ranks)
    assert found.need <= need + 1  # of all that do not fit, the one that takes least


@pytest.mark.parametrize(("memory", "knobs"), [long(80.0, ""), long(48.0, "--engine.checkpointing block")])
def test_large_transformers_fit_with_what_the_plan_says(memory: float, knobs: str) -> None:
    """12 billion parameters, frozen in bfloat16, are adapted on one GPU of 80 GiB; in 48, with a second forward pass."""
    flags, found = find_flags_to_fit("flux.1-dev", PlanConfig(gpus=1, memory_gib=memory))
    assert flags == knobs
    assert found.fits
    assert 2 * 11.9e9 < found.update.parameters < 2.1 * 11.9e9


def test_a_memory_is_fitted_with_the_cheapest_settings() -> None:
    """Each row of the table is the plan with one more setting; the last fits, and the one before does not."""
    start = PlanConfig(reserve_gib=0)
    need = plan("handwriting", start).need
    config = replace(start, fit=f"{need / 2**20 / 2:.4f}MiB")
    steps = plan_steps_to_fit("handwriting", config)
    assert [flags for flags, _ in steps][:2] == ["as it is", "--engine.checkpointing block"]
    assert steps[0][1].need == need
    assert [found.fits for _, found in steps] == [False] * (len(steps) - 1) + [True]
    with pytest.raises(RunError, match=r"handwriting does not fit into 0.01MiB with 0 GiB kept free: the least is .* --"):
        plan_steps_to_fit("handwriting", replace(start, fit="0.01MiB"))


def test_no_knob_divides_weights_that_a_rollout_needs_whole() -> None:
    for changes in ({"merged": True}, {"engine": EngineConfig(compile="reduce-overhead")}):
        config = PlanConfig(gpus=8, **changes)
        turned = {flags for flags, turn in KNOBS.items() if turn(config) != config}
        bases = {"--engine.base int8", "--engine.base nf4"}
        assert turned & {"--engine.comm reshard", "--engine.offload blocks", "--engine.offload always", *bases} == (
            set() if "merged" in changes else bases
        )


def test_bases_and_masters_are_knobs_of_what_they_act_on() -> None:
    """A quantised base belongs to adapters and stays on the device; masters in bfloat16 belong to full fine-tuning."""
    lora, full = PlanConfig(), PlanConfig(train="full")
    assert KNOBS["--engine.base nf4"](lora).engine.base == "nf4"
    assert KNOBS["--engine.base nf4"](full) == full
    assert KNOBS["--engine.masters bfloat16"](full).engine.masters == "bfloat16"
    assert KNOBS["--engine.masters bfloat16"](lora) == lora
    adafactor = replace(full, optimizer=OptimizerConfig(name="adafactor"))
    assert KNOBS["--engine.masters bfloat16"](adafactor) == adafactor
    quantised = KNOBS["--engine.base int8"](lora)
    assert KNOBS["--engine.base nf4"](quantised) == KNOBS["--engine.offload always"](quantised) == quantised
    assert KNOBS["--train lora"](KNOBS["--engine.masters bfloat16"](full)).train == "full"


@pytest.mark.long
def test_twelve_billion_parameters_are_adapted_on_a_small_card() -> None:
    """With a second forward pass, beside 6 GiB for the rest, and a quantised base or blocks on the host."""
    for memory, flags in (("24GiB", "--engine.base int8"), ("16GiB", "--engine.offload 44")):
        steps = plan_steps_to_fit("flux.1-dev", PlanConfig(fit=memory))
        assert [each for each, _ in steps] == ["as it is", "--engine.checkpointing block", flags]


def test_a_pipelines_folder_is_planned_too(tmp_path: Path) -> None:
    """Its network has the number of parameters of the loaded one, and takes inputs of its widths."""
    for name in ("sd3", "flux"):
        folder = tiny_pipelines.save(tiny_pipelines.ROWS[name], tmp_path / name)
        found = plan(str(folder), PlanConfig(train="full", pipeline=ImageSize(64, 64), reserve_gib=0))
        held = open_model(folder).build(empty=True).parameters()
        assert found.update.parameters == 4 * sum(parameter.numel() for parameter in held)
        assert found.update.activations > 0


@pytest.mark.filterwarnings("ignore")  # of the networks' own norms
@pytest.mark.parametrize("name", ["Flux3", long("MiniMaxH3"), long("Wan22")])
def test_a_modular_pipeline_is_planned_by_its_own_blocks(name: str, tmp_path: Path) -> None:
    """Its pass has both halves of guidance, and a video as many frames as asked; both networks of Wan 2.2 count."""
    folder, asked = str(tiny_modular.folder_of(name, tmp_path / name)), find_call(f"{name}ModularPipeline")
    call = tuple(f"{option}={json.dumps(value)}" for option, value in asked.call.items())
    size, guided = ImageSize(asked.size, asked.size, asked.frames, call), asked.scale != 1
    config = PlanConfig(train="full", pipeline=size, schedule=4, guidance=guided)
    held = tiny_modular.opened(name, Path(folder)).build(empty=True).parameters()
    found = plan(folder, config)
    assert found.update.parameters == 4 * sum(parameter.numel() for parameter in held)
    assert found.update.activations > found.rollout.activations > 0
    if name == "Flux3":
        assert found.update.activations > 1.7 * plan(folder, replace(config, guidance=False)).update.activations
    with pytest.raises(UsageError, match=r"^the memory of \S+ cannot be computed: .*no_such_argument"):
        plan(folder, replace(config, pipeline=replace(config.pipeline, call=("no_such_argument=1",))))
    for what in ({"pipeline": ImageSize(call=("a=1",))}, {"schedule": 4}):
        with pytest.raises(UsageError, match="has no effect with handwriting, which is not a modular pipeline"):
            plan("handwriting", replace(PlanConfig(), **what))


@pytest.mark.filterwarnings("ignore")  # of the pipeline's own parts
def test_a_network_that_reads_values_is_left_to_a_dry_run(tmp_path: Path) -> None:
    folder = str(tiny_modular.folder_of("QwenImage21", tmp_path / "model"))
    config = PlanConfig(pipeline=ImageSize(32, 32))
    refuses(r"^the memory of \S+ cannot be computed: its network reads values, .* --dry-run", plan, folder, config)
    run = with_values(RECIPES["grpo"](folder), {"pipeline.height": 32, "pipeline.width": 32, "prompts": ("prompts.txt",)})
    refuses(r"^the operations of \S+ cannot be counted: its network reads values", count_run, run, folder)


def test_the_adapters_of_a_folder_are_those_of_a_run(tmp_path: Path) -> None:
    """Keys and values of CLIP embeddings, which some Wan networks have, are adapted, too."""
    folder = tiny_conditioned.save("wan-clip", tmp_path / "wan")
    shape, model = find_model_shape(str(folder)), open_model(folder)
    assert shape is not None
    counts = []
    for module, targets in ((shape.build(), shape.lora_targets), (model.build(empty=True), model.lora_targets)):
        add_lora(module, LoraConfig(rank=2), targets)
        counts.append(sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad))
        assert any(".add_k_proj.lora_A" in name for name, _ in module.named_parameters())
    assert counts[0] == counts[1] > 0


def test_what_cannot_be_planned_is_refused() -> None:
    wrong: dict[str, dict[str, Any]] = {
        "fit is '24', expected a number and a unit, e.g. 24GiB": {"fit": "24"},
        "fit is '0GiB', expected a number and a unit": {"fit": "0GiB"},
        "memory_gib has no effect with fit, which is the memory": {"fit": "24GiB", "memory_gib": 48.0},
        "are both set: set one of them": {"fit": "24GiB", "table": True},
    }
    for says, changes in wrong.items():
        with pytest.raises(UsageError, match=re.escape(says)) as error:
            PlanConfig(**changes)
        assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match="there is no transformer 'sd4'"):
        plan("sd4", PlanConfig())
    with pytest.raises(UsageError, match=r"pipeline.frames is 9.* makes only images"):
        plan("handwriting", PlanConfig(pipeline=ImageSize(frames=9)))
    with pytest.raises(UsageError, match="images of one size only"):
        plan("handwriting", PlanConfig(pipeline=ImageSize(64, 64)))


@pytest.mark.long
def test_decoding_is_beside_the_gathered_parameters() -> None:
    """The plan's third phase: the rollout's, with the VAE and its images in place of the network's activations."""
    config = PlanConfig(train="full", gpus=8, pipeline=ImageSize(64, 64))
    keep = plan("sd3.5-medium", config)
    reshard = plan("sd3.5-medium", replace(config, engine=EngineConfig(comm="reshard")))
    for found in (keep, reshard):
        assert found.decode is not None
        assert found.need == max(found.update.total, found.rollout.total, found.decode.total)
    assert keep.decode is not None
    assert keep.decode == keep.rollout._replace(activations=keep.decode.activations)
    graphed = plan("sd3.5-medium", replace(config, engine=replace(config.engine, compile="reduce-overhead")))
    assert graphed.decode is not None  # the pool of a graph is held as images are decoded
    assert graphed.decode.total - keep.decode.total == graphed.rollout.graph + keep.rollout.activations
    assert reshard.decode is not None
    assert keep.decode.gathered == keep.rollout.gathered > reshard.decode.gathered
    assert plan("handwriting", PlanConfig()).decode is None


@pytest.mark.long
def test_a_decoder_takes_what_is_measured() -> None:
    """Of images of 64 pixels, with real tensors; four images are decoded at a time, whatever the pass."""
    from diffusers import AutoencoderKL

    config = PlanConfig(pipeline=ImageSize(64, 64), micro_batch=4)
    expected = plan("sd3.5-medium", config).decode
    assert expected is not None
    assert plan("sd3.5-medium", replace(config, micro_batch=8)).decode == expected
    vae = AutoencoderKL.from_config(read_settings(CONFIGURATIONS / "stable-diffusion-3.5-medium" / "vae" / "config.json"))
    vae = vae.to(torch.bfloat16).requires_grad_(False).eval()
    latents = torch.zeros(4, 16, 8, 8)
    with LiveStorages(vae.parameters()) as measured:
        vae.decode(latents.to(torch.bfloat16), return_dict=False)
    weights = sum(parameter.nbytes for parameter in vae.parameters())
    assert expected.activations == pytest.approx(measured.peak + weights, rel=0.05)
