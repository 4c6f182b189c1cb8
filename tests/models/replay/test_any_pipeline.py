"""Pipelines without an adapter as models: they sample as diffusers does, train, export and refuse."""

import itertools
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from helpers import tiny_replayed
from helpers.marks import Folders, Patch, long
from helpers.refusals import refuses
from helpers.tiny_replayed import PROMPTS, ROWS, WITHOUT_ADAPTER, opened
from helpers.tolerances import Tolerance, rounding_tolerance
from torch import Tensor, nn

from fluvial.core.random import key
from fluvial.core.transitions import flow_sde
from fluvial.engines.data.records import as_prompts
from fluvial.engines.engine.world import World
from fluvial.engines.export.model_folder import export, write_lora
from fluvial.engines.sampling.generate import Guidance, Requests, Sampling, StochasticSteps, generate, move_schedule
from fluvial.models import is_recorded
from fluvial.models.lora import LoraConfig, add_lora
from fluvial.models.replay import any_pipeline
from fluvial.models.replay.any_pipeline import AnyPipeline
from fluvial.models.replay.recipe import RowInput
from fluvial.models.tiny.pipelines import find_call, save

STEPS = 4
CASES = [name if name == "sana" else long(name) for name in WITHOUT_ADAPTER]
without_adapter = pytest.mark.parametrize("name", CASES)
each = pytest.mark.parametrize("name", [*CASES, long("flux-guided")])


def pipeline(name: str, folder: Path) -> Any:
    """Return diffusers' pipeline. Its weights require no gradient, like the model's own VAE, so that both multiply alike."""
    pipe = tiny_replayed.load(name, folder)
    for part in networks(pipe):
        part.requires_grad_(False)
    return pipe


def networks(pipe: Any) -> list[nn.Module]:
    return [part for part in pipe.components.values() if isinstance(part, nn.Module)]


def theirs(name: str, pipe: Any, noise: Tensor, *, output: str) -> Tensor:
    options = {**ROWS[name].options, "output_type": output, "return_dict": False}
    options |= {"prompt": PROMPTS[: len(noise)], "num_inference_steps": STEPS, "latents": ROWS[name].latents(noise)}
    return pipe(**options)[0]


@pytest.mark.bits
@each
def test_samples_are_those_of_the_pipeline(name: str, replayed: Folders) -> None:
    """From the same noise, the ODE ends at the same latents and images, with guidance, for one sample and for three."""
    model = opened(name, replayed(name))
    module = model.build().eval()
    pipe = pipeline(name, replayed(name))
    grid = move_schedule(model.schedule(STEPS, model.known.shape), torch.device("cpu"))
    tolerances: dict[str, Tolerance] = {}
    for batch in (3, 1):
        noise = torch.randn(batch, *model.known.shape, generator=torch.Generator().manual_seed(batch))
        x, cond = noise, model.encode(PROMPTS[:batch])
        with torch.no_grad():
            for step in range(STEPS):
                level = grid.levels[step].expand(batch)
                v = model.predict(module, x, level, cond, timestep=grid.timesteps[step].expand(batch))
                x = x + (grid.levels[step + 1] - grid.levels[step]) * v
        outputs = {"pt": model.decode(x)} | ({"latent": x} if ROWS[name].returns_samples else {})
        made = {}
        for output, found in outputs.items():
            compute = partial(theirs, name, pipe, noise, output=output)
            made[output] = expected = compute()
            if output not in tolerances:
                tolerances[output] = rounding_tolerance(compute, networks(pipe), expected)
            torch.testing.assert_close(found, expected, **tolerances[output])
        if "latent" in made:
            assert torch.equal(model.decode(made["latent"]), made["pt"])


@each
def test_the_check_passes_with_the_real_transformer(name: str, replayed: Folders) -> None:
    model = opened(name, replayed(name))
    assert model.check(model.build().eval(), PROMPTS[:2]) < 1e-5
    assert is_recorded(model)
    assert type(model._load_pipeline().transformer).__name__ == "StandIn"  # which is put back


@each
def test_every_trained_parameter_has_a_gradient(name: str, replayed: Folders) -> None:
    model = opened(name, replayed(name))
    module = model.build()
    assert 1 <= len(model.blocks(module)) <= 8
    add_lora(module, LoraConfig(rank=2, alpha=2.0), model.lora_targets, seed=0)
    levels = model.schedule(STEPS, model.known.shape).levels[:-1]
    x = torch.randn(STEPS, *model.known.shape, generator=torch.Generator().manual_seed(0))
    for parameter in module.parameters():  # B starts at zero, and A has no gradient then
        if parameter.requires_grad:
            parameter.data += 0.1
    model.predict(module, x, levels, model.encode([PROMPTS[0]] * STEPS)).square().mean().backward()
    trained = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(bool(grad.isfinite().all()) for grad in trained.values() if grad is not None)
    assert [parameter for parameter, grad in trained.items() if grad is None or not grad.any()] == []


@each
def test_a_prompt_is_encoded_alone(name: str, replayed: Folders, tmp_path: Path) -> None:
    model = opened(name, replayed(name))
    together = optree.tree_leaves(model.encode(PROMPTS))
    for row, prompt in enumerate(PROMPTS):
        for one, all_of_them in zip(optree.tree_leaves(model.encode([prompt])), together, strict=True):
            assert torch.equal(one, all_of_them[row : row + 1])
    for _ in range(2):
        cached = opened(name, replayed(name), cache=tmp_path / "texts").encode(PROMPTS)
        assert all(map(torch.equal, optree.tree_leaves(cached), together))
    assert len(list((tmp_path / "texts").iterdir())) == len(PROMPTS)


def test_the_cache_depends_on_every_argument_of_the_call(replayed: Folders, tmp_path: Path) -> None:
    row = dict(ROWS["lumina2"].options)
    opened("lumina2", replayed("lumina2"), cache=tmp_path).encode(PROMPTS[:1])
    for options in ({"scale": 2.0}, {"steps": 3}, {"negative": "blurry"}, {"height": 64}):
        before = len(list(tmp_path.iterdir()))
        call = {name: row[name] for name in ("system_prompt", "max_sequence_length")}
        opened("lumina2", replayed("lumina2"), cache=tmp_path, **{"call": call, **options}).encode(PROMPTS[:1])
        assert len(list(tmp_path.iterdir())) == before + 1, options


@without_adapter
def test_a_rollout_is_on_policy_to_the_bit(name: str, replayed: Folders) -> None:
    model = opened(name, replayed(name))
    module = model.build().eval()
    guidance = Guidance(scale=float(ROWS[name].options["guidance_scale"]))
    grid = move_schedule(model.schedule(STEPS, model.known.shape), torch.device("cpu"))
    sampler = partial(flow_sde, eta=0.7, sigma_max=grid.levels[1])
    steps = StochasticSteps(sampler, range(2), keep_velocity=True)
    sampling = Sampling(model.known.shape, grid, guidance, stochastic=steps)
    (chunk,) = generate(model, module, Requests(as_prompts(PROMPTS), range(3), key(0)), sampling, micro_batch=3)
    trajectory = chunk.trajectory
    assert trajectory.velocity is not None
    with torch.no_grad():
        for position, step in enumerate(trajectory.steps[0].tolist()):
            x, level = trajectory.x[:, position].contiguous(), grid.levels[step].expand(3)
            v = model.predict(module, x, level, chunk.cond, timestep=grid.timesteps[step].expand(3))
            assert torch.equal(v, trajectory.velocity[:, position])
    assert chunk.images.shape[:2] == (3, 3)
    assert 0 <= float(chunk.images.min()) <= float(chunk.images.max()) <= 1


def test_a_transformer_that_mixes_the_samples_of_a_batch_is_refused(replayed: Folders) -> None:
    model = opened("sana", replayed("sana"))
    module = model.build().eval()

    def mix(_: nn.Module, inputs: Any, output: Any) -> Any:
        return (output[0] + output[0].mean(0, keepdim=True),)

    module.register_forward_hook(mix)
    refuses("SanaPipeline cannot be trained without an adapter: its transformer", model.check, module, PROMPTS[:2])


@without_adapter
def test_exports_open_in_the_pipeline(name: str, replayed: Folders, one: World, tmp_path: Path) -> None:
    """LoRA by the pipeline's load_lora_weights, merged weights in place of the transformer's folder."""
    model = opened(name, replayed(name))
    module = model.build()
    add_lora(module, LoraConfig(rank=2, alpha=3.0), model.lora_targets, seed=0)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    write_lora(module, tmp_path / "lora", world=one)
    shutil.copytree(replayed(name), tmp_path / "whole")
    export(module, tmp_path / "whole" / "transformer", merge=True, world=one)
    noise = torch.randn(2, *model.known.shape, generator=generator)
    before, whole = (
        theirs(name, pipeline(name, place), noise, output="pt") for place in (replayed(name), tmp_path / "whole")
    )
    pipe = pipeline(name, replayed(name))
    pipe.load_lora_weights(tmp_path / "lora")
    adapted = theirs(name, pipe, noise, output="pt")
    x, cond, levels = noise, model.encode(PROMPTS[:2]), model.schedule(STEPS, model.known.shape).levels
    with torch.no_grad():
        for now, later in itertools.pairwise(levels):
            x = x + (later - now) * model.predict(module, x, now.expand(2), cond)
    found = model.decode(x)
    torch.testing.assert_close(found, adapted, rtol=0, atol=1e-4)
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-4)
    assert (found - before).abs().max() > 1e-2


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("sana", {"call": {"colour": "red"}}, "SanaPipeline takes no colour, it takes prompt, "),
    ("sana", {"frames": 5}, "frames is 5, expected 1: SanaPipeline makes images"),
    ("lumina2", {"height": 30}, "divisible"),
    ("aura-flow", {"text_tokens": 0}, "text_tokens is 0"),
    ("sana", {"call": {"complex_human_instruction": 5}}, "SanaPipeline cannot be called with .*height=32"),
]


@pytest.mark.parametrize(("name", "options", "says"), REFUSED, ids=[says for *_, says in REFUSED])
def test_impossible_calls_are_refused(name: str, options: dict[str, Any], says: str, replayed: Folders) -> None:
    refuses(says, lambda: opened(name, replayed(name), **options).known)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({"_class_name": "KandinskyPipeline", "unet": ["diffusers", "UNet2DConditionModel"]}, "which has no adapter"),
        ({"_class_name": "TomorrowsPipeline", "transformer": ["diffusers", "X"]}, "TomorrowsPipeline, which diffusers"),
        ({"_class_name": "SanaPipeline", "transformer": ["diffusers", "X"]}, "names no vae"),
    ],
)
def test_unsuitable_folders_are_refused(index: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    refuses(says, AnyPipeline, tmp_path, height=32, width=32, steps=STEPS)


def test_a_solver_is_replaced_by_euler_steps_if_it_is_of_a_flow(replayed: Folders, tmp_path: Path) -> None:
    pipe = tiny_replayed.load("sana", replayed("sana"))
    shift = pipe.scheduler.config.shift
    pipe.scheduler = DPMSolverMultistepScheduler(use_flow_sigmas=True, flow_shift=shift, prediction_type="flow_prediction")
    pipe.save_pretrained(tmp_path)
    model, euler = opened("sana", tmp_path), opened("sana", replayed("sana"))
    assert torch.equal(model.known.schedule.levels, euler.known.schedule.levels)
    assert model.check(model.build().eval(), PROMPTS[:2]) < 1e-5
    pipe.scheduler = DPMSolverMultistepScheduler()
    pipe.save_pretrained(tmp_path)
    says = "DPMSolverMultistepScheduler, expected FlowMatchEulerDiscreteScheduler"
    refuses(says, lambda: opened("sana", tmp_path).known)


def test_another_size_number_of_steps_or_long_prompt_is_refused(replayed: Folders) -> None:
    model = opened("sana", replayed("sana"))
    refuses("as the pipeline was opened", model.latent_shape, 64, 64)
    refuses("as the pipeline was opened", model.schedule, STEPS + 1, model.known.shape)
    with pytest.raises(ValueError, match=r"no step at sigma 0\.123"):
        model.predict(model.build(), torch.zeros(1, *model.known.shape), torch.tensor([0.123]), model.encode(PROMPTS[:1]))
    model = opened("lumina2", replayed("lumina2"))
    refuses("expected at most 24", model.check_prompt, "x" * 40)
    model.check_prompt("a fox")


def test_prompts_of_other_shapes_are_refused(replayed: Folders, monkeypatch: Patch) -> None:
    model = opened("lumina2", replayed("lumina2"))
    encode: Any = type(model._load_pipeline()).encode_prompt

    def unpadded(self: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        found = encode(self, prompt, *args, **kwargs)
        length = 4 if "fox" in str(prompt) else 6
        return tuple(part if part is None else part[:, :length] for part in found)

    monkeypatch.setattr(type(model._load_pipeline()), "encode_prompt", unpadded)
    refuses("samples of both cannot be in one batch", model.encode, ["a red fox"])


def test_rows_by_coincidence_are_none(replayed: Folders, monkeypatch: Patch) -> None:
    """Of as many samples as FLUX has tokens of text, their positions, which are all 0, look like one row per sample."""
    call = {**ROWS["flux-guided"].options, "max_sequence_length": 3}
    del call["height"], call["width"], call["guidance_scale"]
    model = opened("flux-guided", replayed("flux-guided"), call=call)
    monkeypatch.setattr(any_pipeline, "COPIES", (3,))  # there is nothing to compare with
    refuses(r"FluxPipeline .* is given inputs of unlike kinds for 3 samples$", getattr, model, "known")
    model = opened("flux-guided", replayed("flux-guided"))
    monkeypatch.setattr(any_pipeline, "COPIES", (12, 5))
    assert model.known.model.ragged  # no two batches are alike, so that samples are made one by one
    monkeypatch.setattr(any_pipeline, "COPIES", (12, 5, 7))
    other = opened("flux-guided", replayed("flux-guided"))
    assert other.check(other.build().eval(), PROMPTS[:2]) < 1e-5


@pytest.mark.long
def test_inputs_of_the_prompts_length_belong_to_the_prompt(tmp_path: Path) -> None:
    """Bria FIBO's positions of text have no dimension of the batch, and are as many as the prompt's tokens."""
    asked = find_call("BriaFiboPipeline")
    save("BriaFiboPipeline", tmp_path / "fibo")
    settings: dict[str, Any] = {"scale": asked.scale, "negative": asked.negative, "call": asked.call, "example": PROMPTS[0]}
    model = AnyPipeline(tmp_path / "fibo", height=asked.size, width=asked.size, steps=STEPS, **settings).adapt_to(PROMPTS)
    assert model.check(model.build().eval(), PROMPTS) < 1e-5
    assert model.known.model.ragged
    (recipe,) = model.known.model.recipes
    assert [leaf for call in recipe.calls for leaf in call.leaves if isinstance(leaf, RowInput) and not leaf.repeats]


def test_the_stand_in_takes_no_memory(replayed: Folders) -> None:
    """Its parameters stay on the meta device, and the pipeline has its own scheduler again after each use."""
    model = opened("sana", replayed("sana"))
    model.encode(PROMPTS)
    model.decode(torch.zeros(2, *model.known.shape))
    pipe = model._load_pipeline()
    assert all(parameter.is_meta for parameter in pipe.transformer.parameters())
    assert type(pipe.scheduler) is FlowMatchEulerDiscreteScheduler
    assert not pipe.transformer._forward_hooks
