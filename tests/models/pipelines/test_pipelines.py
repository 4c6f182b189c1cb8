"""The adapters over diffusers: every property runs over every row of the table of tiny pipelines."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from diffusers import DiffusionPipeline
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_model import perturb
from tiny_pipelines import ROWS, TEXT, Row, save, wan
from torch import Tensor, nn

import fluvial.models.pipelines.base as common
from fluvial.core import gaussian, transitions
from fluvial.core.random import fold_in, key, normal
from fluvial.core.rollout import Trajectory, rollout
from fluvial.core.transitions import Sampler
from fluvial.engines.fsdp.export import export, write_lora
from fluvial.engines.fsdp.module import ShardedModule
from fluvial.engines.fsdp.parallelize import EngineConfig
from fluvial.engines.fsdp.world import World, init_world
from fluvial.models import DiffusionModel, Schedule
from fluvial.models.guidance import Guided, guided_velocity
from fluvial.models.lora import LoraConfig, add_lora
from fluvial.models.pipelines.base import Pipeline, check_size
from fluvial.models.pipelines.experts import EXPERTS
from fluvial.models.pipelines.flux import Flux
from fluvial.models.pipelines.open import open_model
from fluvial.models.pipelines.sd3 import SD3

STEPS = 3
SCHEDULER = "scheduler/scheduler_config.json"
each_row = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if row.variant else name for name, row in ROWS.items()]
)


@pytest.fixture(scope="module")
def one() -> Iterator[World]:
    """The world of this process."""
    with init_world() as world:
        yield world


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a row's pipeline, saved once; nothing may be written there."""
    saved: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in saved:
            saved[name] = save(ROWS[name], tmp_path_factory.mktemp(name))
        return saved[name]

    return folder


def opened(name: str, folder: Path, **options: Any) -> Pipeline:
    """A row's adapter."""
    return open_model(folder, **{"text_tokens": TEXT, "device": "cpu", **ROWS[name].options, **options})


def theirs(row: Row, folder: Path) -> Any:
    """A row's pipeline, as diffusers opens it."""
    index = json.loads((folder / "model_index.json").read_text())
    absent = {name: None for name, entry in index.items() if entry == [None, None]}
    pipeline = DiffusionPipeline.from_pretrained(folder, local_files_only=True, **absent)
    if row.scheduler is not None:
        pipeline.scheduler = row.scheduler(pipeline.scheduler.config)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def images_of(row: Row, pipeline: Any, model: Pipeline, x: Tensor, prompts: Sequence[str], scale: float) -> Tensor:
    """What diffusers' pipeline makes of initial noise."""
    size = [model.vae_scale * side for side in x.shape[-2:]]
    given = {"prompt": list(prompts), "height": size[0], "width": size[1], "latents": row.latents(x)}
    options = {"num_inference_steps": STEPS, "output_type": "pt"}
    return row.images(pipeline(**given, **options, **row.asked(x), **row.call(scale)))


def conditions(model: Pipeline, prompts: Sequence[str], scale: float) -> Any:
    """The conditioning of prompts, guided away from none if the scale is not 1."""
    cond = model.encode(prompts)
    if scale == 1:
        return cond
    return Guided(cond, model.encode([""] * len(prompts)), torch.full((len(prompts),), scale))


def walk(
    model: Pipeline, module: nn.Module, x: Tensor, cond: Any, schedule: Schedule, *, eta: float | None = None, **options: Any
) -> Trajectory:
    """A rollout of a model: without noise, or with it, and then it records its steps."""

    def velocity(x: Tensor, sigma: Tensor, step: int) -> Tensor:
        timestep = schedule.timesteps[step].expand(len(x))
        return guided_velocity(model, module, x, sigma, cond, timestep=timestep, **options)

    deterministic = transitions.ode if model.prediction == "velocity" else partial(transitions.ddim, eta=0.0)
    sampler = deterministic if eta is None else noisy(model, schedule, eta)
    steps = () if eta is None else range(STEPS - 1)
    sampling: dict[str, Any] = {"transition": sampler, "deterministic": deterministic, "window": steps, "record": steps}
    with torch.no_grad():
        return rollout(velocity, x, schedule.levels, key=key(1), **sampling)


def noisy(model: Pipeline, schedule: Schedule, eta: float) -> Sampler:
    """The sampler with noise of a model's prediction."""
    if model.prediction == "epsilon":
        return partial(transitions.ddim, eta=eta)
    return partial(transitions.flow_sde, eta=eta, sigma_max=float(schedule.levels[1]))


def start(model: Pipeline, count: int, size: tuple[int, ...]) -> Tensor:
    """Initial noise."""
    return normal(fold_in(key(0), torch.arange(count)), (count, *model.latent_shape(*size)))


@each_row
@pytest.mark.parametrize("scale", [1.0, 3.5])
def test_the_ode_makes_the_images_of_the_pipeline(name: str, scale: float, folders: Callable[[str], Path]) -> None:
    """From the same noise, prompts and guidance: to the bit where both compute in batches of the same size."""
    row, folder = ROWS[name], folders(name)
    model, pipeline = opened(name, folder), theirs(row, folder)
    module = model.build()
    for count in (1, 3):
        for size in row.sizes[:1] if row.variant else row.sizes:
            x, prompts = start(model, count, size), row.prompts[:count]
            schedule = model.schedule(STEPS, tuple(x.shape[1:]))
            expected = images_of(row, pipeline, model, x, prompts, scale)
            assert torch.equal(schedule.levels, levels_of(pipeline.scheduler))
            assert torch.equal(schedule.timesteps, pipeline.scheduler.timesteps)
            assert expected.std() > 0.05
            assert len(torch.unique(expected.flatten(1)[:, 0])) == count
            for forwards in ("one",) if scale == 1 else ("one", "two"):
                latents = walk(model, module, x, conditions(model, prompts, scale), schedule, forwards=forwards).final
                found = model.decode(latents)
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
                assert (count, scale, row.exact) != (1, 1.0, True) or torch.equal(found, expected)


def levels_of(scheduler: Any) -> Tensor:
    """What diffusers' scheduler steps through, noise levels or signal powers."""
    if type(scheduler).__name__ != "DDIMScheduler":
        return scheduler.sigmas
    before = scheduler.timesteps - 1000 // STEPS
    assert torch.equal(before[:-1], scheduler.timesteps[1:])
    assert before[-1] < 0
    return torch.cat([scheduler.alphas_cumprod[scheduler.timesteps], scheduler.final_alpha_cumprod[None]])


@each_row
def test_what_guidance_and_prompt_say_is_seen(name: str, folders: Callable[[str], Path]) -> None:
    """So that images that agree do not agree because nothing mattered."""
    row, model = ROWS[name], opened(name, folders(name))
    module, x = model.build(), start(model, 2, row.sizes[0])
    schedule = model.schedule(STEPS, tuple(x.shape[1:]))
    finals = [
        walk(model, module, x, conditions(model, prompts, scale), schedule).final
        for prompts, scale in ((row.prompts[:2], 1.0), (row.prompts[:2], 3.5), (row.prompts[1:3], 1.0))
    ]
    for i, j in ((0, 1), (0, 2)):
        assert (finals[i] - finals[j]).abs().flatten(1).amax(1).min() > 1e-3


@each_row
@pytest.mark.parametrize("scale", [1.0, 3.5])
def test_on_policy_the_ratio_is_exactly_one(name: str, scale: float, folders: Callable[[str], Path]) -> None:
    """The log-probs of a rollout, computed again from what it stored."""
    row, model = ROWS[name], opened(name, folders(name))
    module, x = model.build(), start(model, 3, row.sizes[1])
    schedule, cond = model.schedule(STEPS, tuple(x.shape[1:])), conditions(model, row.prompts[:3], scale)
    eta = 0.7 if model.prediction == "velocity" else 1.0
    trajectory = walk(model, module, x, cond, schedule, eta=eta)
    levels = schedule.levels
    for place, step in enumerate(trajectory.steps.tolist()):
        sigma, sigma_next = (levels[at].expand(3).contiguous() for at in (step, step + 1))
        before, after = trajectory.x[:, place], trajectory.x_next[:, place]
        timestep = schedule.timesteps[step].expand(3)
        v = guided_velocity(model, module, before, sigma, cond, timestep=timestep)
        coefficients = noisy(model, schedule, eta)(sigma, sigma_next)
        again = gaussian.log_prob(coefficients, before, v, after)
        assert torch.equal(again, trajectory.log_prob[:, place])
        assert again.requires_grad
    assert trajectory.log_prob.isfinite().all()


@each_row
@pytest.mark.parametrize("lora", [False, True])
def test_every_trained_parameter_gets_a_gradient(name: str, lora: bool, folders: Callable[[str], Path]) -> None:
    """Finite and not zero, but for what the architecture throws away, and then none."""
    row, model = ROWS[name], opened(name, folders(name))
    module = model.build()
    if lora:
        add_lora(module, LoraConfig(rank=2), model.lora_targets)
        perturb(module)
    x, cond = start(model, 3, row.sizes[1]), model.encode(row.prompts)
    v = model.predict(module, x, torch.tensor([0.9, 0.5, 0.2]), cond)
    assert v.shape == x.shape
    (v * torch.randn(v.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    trained = {each: parameter for each, parameter in module.named_parameters() if parameter.requires_grad}
    assert len(trained) > (5 if lora else 20)
    for each, parameter in trained.items():
        gradient = parameter.grad
        if each.startswith(row.idle):
            assert gradient is None or not gradient.any(), each
        else:
            assert gradient is not None, each
            assert gradient.isfinite().all(), each
            assert gradient.any(), each


@each_row
def test_lora_targets_name_layers_of_every_block(name: str, folders: Callable[[str], Path]) -> None:
    """None of them is left without, and the blocks are all there are."""
    model = opened(name, folders(name))
    module = model.build()
    kinds = {type(block) for block in model.blocks(module)}
    assert sum(type(each) in kinds for each in module.modules()) == len(model.blocks(module)) > 1
    add_lora(module, LoraConfig(rank=2), model.lora_targets)
    for block in model.blocks(module):
        assert any(".lora_A." in each for each, _ in block.named_parameters())


@each_row
def test_a_trained_adapter_makes_the_same_images_in_the_pipeline(
    name: str, tmp_path: Path, one: World, folders: Callable[[str], Path]
) -> None:
    """One step of LoRA, exported, opened by the pipeline's own load_lora_weights."""
    row, folder = ROWS[name], folders(name)
    model, pipeline = opened(name, folder), theirs(row, folder)
    module, x = model.build(), start(model, 2, row.sizes[0])
    prompts, schedule = row.prompts[:2], model.schedule(STEPS, tuple(x.shape[1:]))
    cond = model.encode(prompts)
    before = images_of(row, pipeline, model, x, prompts, 1.0)
    add_lora(module, LoraConfig(rank=2, alpha=3.0), model.lora_targets)
    perturb(module)
    optimizer = torch.optim.AdamW([each for each in module.parameters() if each.requires_grad], lr=0.05)
    model.predict(module, x, torch.tensor([0.9, 0.4]), cond).square().sum().backward()
    optimizer.step()
    write_lora(module, tmp_path, world=one)
    row.load_lora(pipeline, tmp_path)
    expected = images_of(row, pipeline, model, x, prompts, 1.0)
    found = model.decode(walk(model, module, x, cond, schedule).final)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (expected - before).abs().max() > 1e-2


@each_row
def test_a_full_export_opens_in_the_pipeline(name: str, tmp_path: Path, one: World, folders: Callable[[str], Path]) -> None:
    """In the place of the network's folder; every weight is the changed one."""
    row, folder = ROWS[name], folders(name)
    model = opened(name, folder)
    module = model.build()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.1)
    shutil.copytree(folder, tmp_path / "trained")
    export(module, tmp_path / "trained" / ("" if isinstance(module, nn.ModuleDict) else model.part), world=one)
    trained, x = opened(name, tmp_path / "trained"), start(model, 1, row.sizes[0])
    again = trained.build().state_dict()
    assert all(torch.equal(tensor, again[each]) for each, tensor in module.state_dict().items())
    schedule = model.schedule(STEPS, tuple(x.shape[1:]))
    expected = images_of(row, theirs(row, tmp_path / "trained"), model, x, row.prompts[:1], 1.0)
    found = model.decode(walk(model, module, x, model.encode(row.prompts[:1]), schedule).final)
    torch.testing.assert_close(found, expected, rtol=0, atol=0 if row.exact else 1e-5)


@each_row
def test_an_empty_network_is_filled_from_the_folder(name: str, one: World, folders: Callable[[str], Path]) -> None:
    """Shard by shard, as the engine does it: parameters and buffers, to the bit."""
    model = opened(name, folders(name))
    whole, empty = model.build(), model.build(empty=True)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert not any(parameter.is_meta for parameter in whole.parameters())
    filled = ShardedModule(empty, model.blocks(empty), one, EngineConfig(), weights=model.weights)
    x, cond = start(model, 2, ROWS[name].sizes[0]), model.encode(ROWS[name].prompts[:2])
    sigma = torch.tensor([0.3, 0.9])
    with filled.inference() as module:
        assert torch.equal(model.predict(module, x, sigma, cond), model.predict(whole, x, sigma, cond))


@each_row
def test_padding_counts_unless_it_is_masked(name: str, folders: Callable[[str], Path]) -> None:
    """A prompt that is padded more gives the same velocity where the network has a mask, and only there."""
    row, folder = ROWS[name], folders(name)
    short, long = (opened(name, folder, text_tokens=tokens) for tokens in (TEXT, TEXT + 9))
    module, x, sigma = short.build(), start(short, 3, row.sizes[0]), torch.tensor([0.9, 0.5, 0.1])
    conds = [model.encode(row.prompts) for model in (short, long)]
    assert [tensor.shape for tensor in optree.tree_leaves(conds[0])] != [each.shape for each in optree.tree_leaves(conds[1])]
    found, padded = (model.predict(module, x, sigma, cond) for model, cond in zip((short, long), conds, strict=True))
    far = (found - padded).abs().max()
    assert far < 1e-5 if row.masks else far > 1e-4


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.masks])
def test_what_pads_a_prompt_never_changes_a_velocity(name: str, folders: Callable[[str], Path]) -> None:
    """Padded more, with anything, or cut to the longest prompt of the batch: its length alone says what is read."""
    row, model = ROWS[name], opened(name, folders(name))
    module, x, sigma = model.build(), start(model, 3, row.sizes[0]), torch.tensor([0.9, 0.5, 0.1])
    cond: Any = model.encode(row.prompts)
    lengths = cond.mask.sum(1) if hasattr(cond, "mask") else cond.lengths
    with torch.no_grad():
        v = model.predict(module, x, sigma, cond)

    @settings(max_examples=8, deadline=None, derandomize=True)
    @given(tokens=st.integers(int(lengths.max()), 2 * TEXT), junk=st.floats(-100, 100), seed=st.integers(0, 9))
    def holds(tokens: int, junk: float, seed: int) -> None:
        own = torch.arange(tokens) < lengths[:, None]
        padding = junk * torch.randn(3, tokens, cond.tokens.shape[2], generator=torch.Generator().manual_seed(seed))
        kept = min(tokens, cond.tokens.shape[1])
        padding[:, :kept] = torch.where(own[:, :kept, None], cond.tokens[:, :kept], padding[:, :kept])
        padded = cond._replace(tokens=padding, **({"mask": own} if hasattr(cond, "mask") else {}))
        with torch.no_grad():
            torch.testing.assert_close(model.predict(module, x, sigma, padded), v, rtol=1e-4, atol=1e-5)

    holds()


@each_row
def test_a_velocity_is_pure_and_per_sample(name: str, folders: Callable[[str], Path]) -> None:
    """The same twice; it depends on no other sample; without a timestep it is that of the schedule; inputs are cast."""
    row, model = ROWS[name], opened(name, folders(name))
    module, x, cond = model.build(), start(model, 3, row.sizes[1]), model.encode(row.prompts)
    schedule = model.schedule(STEPS, tuple(x.shape[1:]))
    sigma = schedule.levels[:STEPS]
    v = model.predict(module, x, sigma, cond)
    assert torch.equal(v, model.predict(module, x, sigma, cond))
    torch.testing.assert_close(v, model.predict(module, x, sigma, cond, timestep=schedule.timesteps), rtol=1e-5, atol=1e-5)
    alone = model.predict(module, x[1:2], sigma[1:2], optree.tree_map(lambda tensor: tensor[1:2], cond))
    torch.testing.assert_close(v[1:2], alone, rtol=1e-4, atol=1e-5)
    half, low = torch.bfloat16, model.build().bfloat16()
    cast = optree.tree_map(lambda tensor: tensor.to(half) if tensor.ndim > 1 else tensor, cond)
    assert torch.equal(model.predict(low, x.to(half), sigma, cond), model.predict(low, x.to(half), sigma, cast))


@each_row
def test_a_prompt_is_encoded_alone(name: str, folders: Callable[[str], Path]) -> None:
    """To one shape for all prompts, and to the same bits in any batch; repeats are encoded once."""
    row, model = ROWS[name], opened(name, folders(name))
    prompts = [row.prompts[0], "", row.prompts[1], row.prompts[0]]
    together = optree.tree_leaves(model.encode(prompts))
    for place, prompt in enumerate(prompts):
        for mine, tensor in zip(optree.tree_leaves(model.encode([prompt])), together, strict=True):
            assert torch.equal(mine[0], tensor[place])
            assert tensor.device.type == "cpu"
            assert not tensor.requires_grad
            assert not tensor.is_inference()


@each_row
def test_encoded_prompts_are_kept_on_disk(
    name: str, tmp_path: Path, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, by prompt and by what encodes it; the encoders are then not even loaded."""
    row, folder = ROWS[name], folders(name)
    monkeypatch.setattr(common, "EDGE", 64)  # so that the weights are large
    plain = opened(name, folder).encode(row.prompts)
    first = opened(name, folder, cache=tmp_path / "texts")
    first.encode(row.prompts)
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "texts").iterdir()}
    assert len(files) == len(row.prompts)
    again = opened(name, folder, cache=tmp_path / "texts")
    monkeypatch.setattr(again, "_load", None)
    cached = again.encode(row.prompts)
    assert type(cached) is type(plain)
    assert all(
        torch.equal(mine, other) for mine, other in zip(optree.tree_leaves(cached), optree.tree_leaves(plain), strict=True)
    )
    assert {file: file.stat().st_mtime_ns for file in files} == files
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    others = [file for file in changed.rglob("*.safetensors") if "text_encoder" in str(file)]
    others[-1].write_bytes(others[-1].read_bytes()[:-1] + b"\x01")
    for other in (opened(name, changed, cache=first.cache), opened(name, folder, cache=first.cache, text_tokens=TEXT + 1)):
        other.encode(row.prompts[:1])
    assert len(list((tmp_path / "texts").iterdir())) == len(files) + 2
    for file in files:
        file.write_bytes(b"short")
    with pytest.raises(ValueError, match=r"the encoded prompt .* cannot be read: .*; delete the file"):
        again.encode(row.prompts)


@each_row
def test_frozen_parts_are_loaded_when_they_are_used(name: str, folders: Callable[[str], Path]) -> None:
    """In evaluation mode and in their own dtype; what encodes prompts can be dropped, and comes back."""
    row, model = ROWS[name], opened(name, folders(name), dtype=torch.bfloat16)
    model.check_prompt(row.prompts[0])
    assert (model._text, model._vae) == (None, None)
    first = model.encode(row.prompts)
    text: Any = model._text
    encoders = [part for each, part in text.components.items() if part is not None and "encoder" in each]
    assert encoders
    assert text.vae is None
    assert model.decode(start(model, 1, row.sizes[0])).dtype == torch.float32
    for part in (*encoders, model.vae):
        assert part.dtype == torch.bfloat16
        assert not part.training
        assert not any(parameter.requires_grad for parameter in part.parameters())
    model.release()
    assert model._text is None
    assert all(map(torch.equal, optree.tree_leaves(first), optree.tree_leaves(model.encode(row.prompts))))


@each_row
def test_images_are_decoded_in_chunks(name: str, folders: Callable[[str], Path]) -> None:
    """The same as one at a time; in [0, 1]; gradients reach the latents."""
    row, model = ROWS[name], opened(name, folders(name), decode_chunk=2)
    latents = (3 * start(model, 3, row.sizes[0])).requires_grad_()
    sizes: list[int] = []
    handle = model.vae.decoder.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    found = model.decode(latents)
    handle.remove()
    assert list(dict.fromkeys(sizes)) == [2, 1]  # of a video, several times
    assert found.shape == (3, 3, *row.sizes[0][2:], *row.sizes[0][:2])
    assert 0 <= found.min() < found.max() <= 1
    torch.testing.assert_close(found, torch.cat([model.decode(one) for one in latents.split(1)]), rtol=0, atol=1e-5)
    found.sum().backward()
    assert latents.grad is not None
    assert latents.grad.any()


@each_row
def test_a_long_prompt_is_refused(name: str, folders: Callable[[str], Path]) -> None:
    """In one line, with the number of its tokens; the longest that fits is taken; encoding refuses it too."""
    model = opened(name, folders(name))
    tokenizer, most = model.longest(model._load("tokenizer"))
    words = "b " * 90
    lengths = [length for length in range(1, 90) if fits(model, words[: 2 * length])]
    assert lengths == list(range(1, lengths[-1] + 1))
    taken, refused = (len(tokenizer(words[: 2 * length]).input_ids) for length in (lengths[-1], lengths[-1] + 1))
    assert taken <= most < refused
    for ask in (model.check_prompt, lambda prompt: model.encode([prompt])):
        with pytest.raises(
            ValueError, match=rf"the prompt 'b b .*'\.\.\. has \d+ tokens, expected at most {most}"
        ) as caught:
            ask(words)
        assert "\n" not in str(caught.value)


def fits(model: Pipeline, prompt: str) -> bool:
    """Whether a prompt is taken."""
    try:
        model.check_prompt(prompt)
    except ValueError:
        return False
    return True


def test_a_template_around_a_prompt_is_counted(folders: Callable[[str], Path]) -> None:
    """The longest prompt that is taken fills the tokens to the last, and none of them is cut off."""
    for name in ("qwen-image", "z-image"):
        model = opened(name, folders(name))
        counts = []
        for length in range(1, TEXT):
            if fits(model, prompt := "b " * length):
                cond: Any = model.encode([prompt])
                counts.append(int(cond.mask.sum() if name == "qwen-image" else cond.lengths))
        assert counts == list(range(TEXT + 1 - len(counts), TEXT + 1)), name
        assert len(counts) > 20, name


@each_row
def test_a_size_that_does_not_divide_is_refused(name: str, folders: Callable[[str], Path]) -> None:
    """With the nearest that does; so are videos, or of so many frames."""
    model = opened(name, folders(name))
    with pytest.raises(ValueError, match=r"the size is 17x23, expected multiples of 4.*: the nearest is 16x24"):
        model.latent_shape(17, 23)
    assert model.latent_shape(16, 24)[-2:] == (16 // model.vae_scale, 24 // model.vae_scale)
    with pytest.raises(ValueError, match="frames is 4, expected 1"):
        model.latent_shape(16, 24, 4)


def test_a_size_beyond_the_positions_of_sd3_is_refused(folders: Callable[[str], Path]) -> None:
    """The transformer would fail on it."""
    model = opened("sd3", folders("sd3"))
    assert model.latent_shape(64, 64) == (4, 32, 32)
    with pytest.raises(ValueError, match="expected multiples of 4, at most 64: the nearest is 16x64"):
        model.latent_shape(16, 68)


@pytest.mark.parametrize(("size", "near"), [((1, 1), "16x16"), ((24, 1000), "32x1008"), ((512, 15), "512x16")])
def test_the_nearest_size_is_named(size: tuple[int, int], near: str) -> None:
    """Never zero; a tie goes up."""
    with pytest.raises(ValueError, match=f"the nearest is {near}$"):
        check_size(*size, multiple=16)


def test_the_table_of_adapters_picks_by_the_pipeline(folders: Callable[[str], Path]) -> None:
    """And each row is of the protocol."""
    for name, row in ROWS.items():
        model: DiffusionModel = opened(name, folders(name))
        assert type(model) is row.adapter


def test_flux_hands_its_guidance_to_a_distilled_network_alone(folders: Callable[[str], Path]) -> None:
    """As a number a sample; a network without that input takes none."""
    for name, matters in (("flux", True), ("flux-schnell", False)):
        model = opened(name, folders(name), embedded_guidance=1.5)
        module, x, cond = model.build(), start(model, 2, (16, 16)), model.encode(ROWS[name].prompts[:2])
        assert cond.guidance.tolist() == [1.5, 1.5]
        other = cond._replace(guidance=torch.tensor([1.5, 4.0]))
        a, b = (model.predict(module, x, torch.tensor([0.5, 0.5]), each) for each in (cond, other))
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1]) != matters
    with pytest.raises(ValueError, match="embedded_guidance is -1"):
        Flux(folders("flux"), embedded_guidance=-1.0)


def test_a_timestep_a_token_is_a_timestep_a_sample(tmp_path: Path) -> None:
    """Wan 2.2's small network is given one a token by its pipeline, all the same for videos from text."""
    row = ROWS["wan"]._replace(make=lambda: wan(a_token=True))
    folder = save(row, tmp_path / "wan")
    model, pipeline = opened("wan", folder), theirs(row, folder)
    x = start(model, 2, row.sizes[0])
    schedule = model.schedule(STEPS, tuple(x.shape[1:]))
    expected = images_of(row, pipeline, model, x, row.prompts[:2], 3.5)
    found = model.decode(walk(model, model.build(), x, conditions(model, row.prompts[:2], 3.5), schedule).final)
    assert pipeline.config.expand_timesteps
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_each_expert_computes_its_side(folders: Callable[[str], Path]) -> None:
    """Alone where the batch is on one side of the boundary, which belongs to the first; gradients go to who computed."""
    model = opened("wan-experts", folders("wan-experts"))
    experts: Any = model.build()
    x, cond = start(model, 3, (16, 16)), model.encode(ROWS["wan-experts"].prompts)
    one = opened("wan", folders("wan"))
    first, second = (one.predict(experts[part], x, torch.tensor([0.9, 0.8, 0.3]), cond) for part in EXPERTS)
    ran: list[str] = []
    for part in EXPERTS:
        experts[part].register_forward_hook(lambda module, args, out, part=part: ran.append(part))
    mixed = model.predict(experts, x, torch.tensor([0.9, 0.8, 0.3]), cond)
    assert ran == list(EXPERTS)
    assert torch.equal(mixed, torch.cat([first[:2], second[2:]]))
    for level, part in ((0.8, EXPERTS[0]), (0.7, EXPERTS[1])):
        ran.clear()
        experts.zero_grad()
        model.predict(experts, x, torch.full((3,), level), cond).sum().backward()
        assert ran == [part]
        for each in EXPERTS:
            assert (experts[each].proj_out.weight.grad is None) == (each != part)


@pytest.mark.parametrize(
    ("name", "file", "changes", "message"),
    [
        ("wan", "model_index.json", {"boundary_ratio": 0.5}, "only one of transformer_2 and boundary_ratio"),
        ("wan-experts", "model_index.json", {"boundary_ratio": None}, "only one of transformer_2 and boundary_ratio"),
        ("wan", SCHEDULER, {"use_flow_sigmas": False}, "UniPCMultistepScheduler without use_flow_sigmas"),
        ("sd1", SCHEDULER, {"prediction_type": "sample"}, "PNDMScheduler of sample, expected a scheduler with betas"),
        ("sd1", SCHEDULER, {"timestep_spacing": "trailing", "beta_start": 0.5, "beta_end": 1.0}, "has no 3 steps"),
        ("sd1", SCHEDULER, {"steps_offset": 0}, "scheduler has no 3 steps whose alpha_bar rises"),
    ],
)
def test_a_schedule_of_another_kind_is_refused(
    name: str, file: str, changes: dict[str, Any], message: str, tmp_path: Path, folders: Callable[[str], Path]
) -> None:
    """When the model is opened, or when the schedule is asked for."""
    with pytest.raises(ValueError, match=message) as caught:
        opened(name, edited(folders(name), tmp_path, file, **changes)).schedule(STEPS, (4, 4, 4))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("steps", [0, 1000, 1001])
def test_more_steps_than_timesteps_are_refused(steps: int, folders: Callable[[str], Path]) -> None:
    """A UNet's spacing begins one above; 999 are the most."""
    model = opened("sd1", folders("sd1"))
    assert len(model.schedule(999, (4, 4, 4)).timesteps) == 999
    with pytest.raises(ValueError, match=f"has no {steps} steps"):
        model.schedule(steps, (4, 4, 4))


def test_frames_of_films_are_one_and_a_multiple(folders: Callable[[str], Path]) -> None:
    """Of what the VAE joins into one."""
    model = opened("wan", folders("wan"))
    assert [model.latent_shape(16, 16, frames)[1] for frames in (1, 3, 5)] == [1, 2, 3]
    for frames in (0, 2, 4):
        with pytest.raises(ValueError, match=f"frames is {frames}, expected 1 plus a multiple of 2"):
            model.latent_shape(16, 16, frames)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_tokens": 0}, "text_tokens is 0, expected 1 to 512"),
        ({"text_tokens": 513}, "text_tokens is 513, expected 1 to 512"),
        ({"decode_chunk": 0}, "decode_chunk is 0, expected at least 1"),
    ],
)
def test_an_option_out_of_range_is_refused(options: dict[str, Any], message: str, folders: Callable[[str], Path]) -> None:
    """By name."""
    with pytest.raises(ValueError, match=message):
        SD3(folders("sd3"), **options)


def edited(folder: Path, tmp_path: Path, file: str, **changes: Any) -> Path:
    """A copy of a pipeline with entries of one of its json files changed."""
    shutil.copytree(folder, tmp_path / "copy")
    path = tmp_path / "copy" / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return tmp_path / "copy"


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (
            "model_index.json",
            {"_class_name": "KandinskyPipeline"},
            "holds a KandinskyPipeline, which there is no adapter for",
        ),
        ("model_index.json", {"vae": [None, None]}, "names no vae: save or download the whole pipeline"),
        ("transformer/config.json", {"_class_name": "FluxTransformer2DModel"}, "expected a SD3Transformer2DModel"),
    ],
)
def test_another_pipeline_is_refused(
    file: str, changes: dict[str, Any], message: str, tmp_path: Path, folders: Callable[[str], Path]
) -> None:
    """It says what it is and what is known."""
    with pytest.raises(ValueError, match=message) as caught:
        open_model(edited(folders("sd3"), tmp_path, file, **changes))
    assert "\n" not in str(caught.value)


def test_another_scheduler_is_refused(tmp_path: Path, folders: Callable[[str], Path]) -> None:
    """Its schedule would not be that of a flow."""
    folder = edited(folders("sd3"), tmp_path, "model_index.json", scheduler=["diffusers", "DDIMScheduler"])
    with pytest.raises(ValueError, match="has the scheduler DDIMScheduler, expected FlowMatchEulerDiscreteScheduler"):
        open_model(folder).schedule(4, (4, 8, 8))


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("model_index.json", "holds no pipeline: model_index.json is missing; expected a folder as diffusers saves one"),
        ("transformer", "transformer is incomplete: there is no such folder; save or download the pipeline again"),
        ("transformer/config.json", "transformer is incomplete: there is no config.json"),
        ("vae/diffusion_pytorch_model.safetensors", "vae is incomplete: there is no diffusion_pytorch_model.saf"),
        ("text_encoder_2/model.safetensors", "text_encoder_2 is incomplete: there is no diffusion_pytorch"),
        ("tokenizer", "tokenizer is incomplete: there is no such folder"),
        ("scheduler", "scheduler is incomplete: there is no such folder"),
    ],
)
def test_what_is_missing_is_named(gone: str, message: str, tmp_path: Path, folders: Callable[[str], Path]) -> None:
    """When the model is opened, not when it is first asked for."""
    shutil.copytree(folders("sd3"), tmp_path / "copy")
    path = tmp_path / "copy" / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(ValueError, match=message) as caught:
        open_model(tmp_path / "copy")
    assert "\n" not in str(caught.value)


def test_a_variant_alone_is_refused(tmp_path: Path, folders: Callable[[str], Path]) -> None:
    """Weights in float16 are named so, and would be found by who asks for them by that name alone."""
    shutil.copytree(folders("sd3"), tmp_path / "copy")
    part = tmp_path / "copy" / "transformer"
    (part / "diffusion_pytorch_model.safetensors").rename(part / "diffusion_pytorch_model.fp16.safetensors")
    with pytest.raises(ValueError, match=r"or model\.safetensors, only diffusion_pytorch_model\.fp16\.safetensors; save"):
        open_model(tmp_path / "copy")


def test_a_missing_shard_is_named(tmp_path: Path, folders: Callable[[str], Path]) -> None:
    """Of a network in several files; with all of them it opens."""
    shutil.copytree(folders("sd3"), tmp_path / "copy")
    network: Any = opened("sd3", folders("sd3")).build()
    shutil.rmtree(tmp_path / "copy" / "transformer")
    network.save_pretrained(tmp_path / "copy" / "transformer", max_shard_size="30KB")
    assert all(map(torch.equal, opened("sd3", tmp_path / "copy").build().parameters(), network.parameters()))
    shard = sorted((tmp_path / "copy" / "transformer").glob("*-of-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=f"transformer is incomplete: there is no {shard.name}"):
        opened("sd3", tmp_path / "copy")


def test_a_hub_id_is_downloaded(folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """By diffusers, into its cache; when that fails one line says so."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options))
        if name != "somebody/model":
            raise OSError("We couldn't connect.\nMore lines.")
        return str(folders("sd3"))

    monkeypatch.setattr(DiffusionPipeline, "download", download)
    model = open_model("somebody/model")
    assert isinstance(model, SD3)
    assert model.weights == folders("sd3") / "transformer"
    assert asked == [("somebody/model", {"use_safetensors": True, "trust_remote_code": False})]
    with pytest.raises(
        ValueError, match="no-one/model is not a folder, and cannot be downloaded from the Hub: We couldn't"
    ) as why:
        open_model("no-one/model")
    assert "\n" not in str(why.value)
