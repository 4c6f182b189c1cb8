"""Recorded pipelines: a replay gives the recorded velocities and trains; other pipelines are refused."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FlowMatchHeunDiscreteScheduler
from helpers import tiny_replayed
from helpers.marks import Folders, long
from helpers.refusals import refuses
from helpers.tiny_replayed import PROMPTS, ROWS, WITHOUT_ADAPTER
from torch import Tensor, nn

from fluvial.core import gaussian
from fluvial.core.advantages import group_advantages
from fluvial.core.random import Key, fold_in, key
from fluvial.core.step import policy_loss
from fluvial.models.lora import LoraConfig, add_lora
from fluvial.models.replay.capture import _match_sample, _trace_inputs, find_frozen_networks
from fluvial.models.replay.combinations import Combination, FittedSum, _list_known
from fluvial.models.replay.recipe import ControlOutput, RowInput, SampleInput, SharedInput
from fluvial.models.replay.recorded import Recording, check_replay, record, replay, strip_padding
from fluvial.models.replay.scheduler import RecordingScheduler

STEPS = 4
each = pytest.mark.parametrize("name", ROWS)


@pytest.fixture
def load(replayed: Folders) -> Callable[[str], Any]:
    return lambda name: tiny_replayed.load(name, replayed(name))


def recorded(pipe: Any, name: str, *, prompts: list[str] = PROMPTS, seed: int = 0, **options: Any) -> Recording:
    options = {"sampler": "flow_sde", "eta": 0.7, "key": key(seed), "steps": STEPS, **ROWS[name].options, **options}
    return record(pipe, prompts, **options)


def every_pair(recording: Recording) -> tuple[Tensor, Tensor]:
    steps = recording.trajectory.steps[0]
    batch = len(recording.trajectory.final)
    return torch.arange(batch).repeat(len(steps)), steps.repeat_interleave(batch)


def log_prob(recording: Recording, v: Tensor, sample: Tensor, step: Tensor) -> Tensor:
    position = torch.searchsorted(recording.trajectory.steps[0], step.contiguous())
    levels = recording.schedule.levels
    x, x_next = (getattr(recording.trajectory, name)[sample, position] for name in ("x", "x_next"))
    return gaussian.log_prob(recording.transition(levels[step], levels[step + 1]), x, v, x_next)


@pytest.mark.parametrize("name", [name if name == "flux" else long(name) for name in ROWS])
def test_the_pipeline_is_left_as_it_was(name: str, load: Callable[[str], Any]) -> None:
    pipe = load(name)
    own = pipe.scheduler
    recording = recorded(pipe, name, window=[0, 1])
    assert pipe.scheduler is own
    assert not pipe.transformer._forward_hooks
    assert not pipe.transformer._forward_pre_hooks
    pipe.scheduler = RecordingScheduler.from_config(own.config, sampler="flow_sde", eta=0.7)
    keys = fold_in(key(0), torch.arange(3))
    words = torch.stack([torch.as_tensor(word) for word in fold_in(keys, 0)])
    seeds = (words[0] | words[1] << 32).tolist()
    with pipe.scheduler.recording(key=fold_in(keys, 1), window=[0, 1]) as recorder:
        options = {**ROWS[name].options, "output_type": "pt", "return_dict": False}
        options["generator"] = [torch.Generator().manual_seed(seed) for seed in seeds]
        images = pipe(prompt=PROMPTS, num_inference_steps=STEPS, **options)[0]
    assert torch.equal(images, recording.images)
    assert images.shape[:2] == (3, 3)
    assert recording.trajectory.steps[0].tolist() == [0, 1]
    assert torch.equal(recorder.trajectory().log_prob, recording.trajectory.log_prob)
    assert torch.equal(pipe.scheduler.timesteps, recording.schedule.timesteps)


@pytest.mark.bits
@each
def test_replay_gives_what_was_recorded(name: str, load: Callable[[str], Any]) -> None:
    """To the bit in the batch of a step, so that the first ratio is exactly 1; up to rounding in other batches."""
    pipe = load(name)
    recording = recorded(pipe, name, window=[0, 2])
    trajectory = recording.trajectory
    assert trajectory.steps[0].tolist() == [0, 2]
    assert trajectory.velocity is not None
    for place, step in enumerate(trajectory.steps[0]):
        sample = torch.arange(3)
        v = replay(pipe.transformer, recording, sample, step.expand(3))
        assert torch.equal(v, trajectory.velocity[:, place])
        assert torch.equal(log_prob(recording, v, sample, step.expand(3)), trajectory.log_prob[:, place])
    scale = trajectory.velocity.abs().max().item()
    for pairs in ([[2, 0], [2, 2]], [[1], [0]], [[0, 1, 2, 0, 2], [2, 0, 2, 0, 0]]):
        i, s = torch.tensor(pairs)
        v = replay(pipe.transformer, recording, i, s)
        want = trajectory.velocity[i, s // 2]
        torch.testing.assert_close(v, want, rtol=0, atol=5e-6 * scale)
    assert check_replay(pipe.transformer, recording, micro_batch=4) < 5e-6
    trajectory.velocity[0, 0] = torch.nan  # in the last micro-batch alone, whose error comes after others that are fine
    refuses("misses the recorded velocity by nan of its norm", check_replay, pipe.transformer, recording, micro_batch=1)


def test_only_inputs_that_differ_by_step_are_stored_per_step(load: Callable[[str], Any]) -> None:
    """Sana has a mask, text and time for both halves of guidance; the positions of FLUX belong to no sample."""
    pipe = load("sana")
    recording = recorded(pipe, "sana")
    (recipe,) = recording.model.recipes
    leaves = recipe.calls[0].leaves
    assert sum(isinstance(leaf, SampleInput) for leaf in leaves) == 1
    assert sorted(leaf.each_step for leaf in leaves if isinstance(leaf, RowInput)) == [False, False, True]
    assert sorted(tuple(leaf.shape) for leaf in recording.cond[0]) == [(3, 2, 24), (3, 2, 24, 16), (3, STEPS, 2)]
    pipe = load("flux")
    leaves = recorded(pipe, "flux").model.recipes[0].calls[0].leaves
    shared = [leaf.value for leaf in leaves if isinstance(leaf, SharedInput) and isinstance(leaf.value, Tensor)]
    assert sorted(tuple(tensor.shape) for tensor in shared) == [(12, 3), (16, 3)]


COMBINATIONS: dict[str, dict[str, Any]] = {
    "sana": {"cond": 1, "scale": 4.5, "negative": False, "norm": "own"},
    "lumina2": {"cond": 0, "scale": 4.0, "negative": True, "norm": "kept"},
    "aura-flow": {"cond": 1, "scale": 3.5, "negative": False, "norm": "own"},
    "flux2": {"cond": 0, "scale": 4.0, "negative": False, "norm": "own"},
    "sd3": {"cond": 1, "scale": 5.0, "negative": False, "norm": "own"},
    "flux": {"cond": None, "negative": False},
    "flux-guided": {"cond": 0, "scale": 3.0, "negative": False, "norm": "own"},
}


@each
def test_the_combination_of_each_pipeline_is_found(name: str, load: Callable[[str], Any]) -> None:
    (recipe,) = recorded(load(name), name).model.recipes
    combination = recipe.combination
    assert isinstance(combination, Combination)
    found = combination._asdict()
    assert {field: found[field] for field in COMBINATIONS[name]} == COMBINATIONS[name]
    if name in ("sana", "lumina2"):  # without guidance there is one part, Sana's the velocity, Lumina's its negative
        (recipe,) = recorded(load(name), name, guidance_scale=1.0).model.recipes
        assert isinstance(recipe.combination, Combination)
        assert (recipe.combination.cond, recipe.combination.negative) == (None, name == "lumina2")


def test_recipes_differ_by_step(load: Callable[[str], Any]) -> None:
    pipe = load("lumina2")
    recording = recorded(pipe, "lumina2", cfg_trunc_ratio=0.5)
    assert [recipe.positions for recipe in recording.model.recipes] == [(0, 1), (2, 3)]
    assert [len(recipe.calls) for recipe in recording.model.recipes] == [2, 1]
    assert check_replay(pipe.transformer, recording, micro_batch=5) < 5e-6
    sample, step = torch.tensor([0, 2, 1, 1]), torch.tensor([3, 0, 2, 1])
    mixed = replay(pipe.transformer, recording, sample, step)
    assert recording.trajectory.velocity is not None
    torch.testing.assert_close(mixed, recording.trajectory.velocity[sample, step], rtol=1e-4, atol=1e-5)
    pipe = load("sana")
    forward = pipe.transformer.forward

    def taking(*args: Any, attention_kwargs: dict[str, Any], **others: Any) -> Any:
        attention_kwargs.pop("shared", None)
        return forward(*args, **others)

    pipe.transformer.forward = taking
    recording = recorded(pipe, "sana", attention_kwargs={"shared": 1})
    assert [recipe.positions for recipe in recording.model.recipes] == [(0,), (1, 2, 3)]


@pytest.mark.parametrize("kind", [int, torch.tensor], ids=["number", "tensor"])
def test_shared_inputs_may_differ_by_step(kind: Callable[[int], Any], load: Callable[[str], Any]) -> None:
    pipe = load("sana")

    def move(pipe: Any, step: int, timestep: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        pipe._attention_kwargs = {"shared": kind((step + 1) % 2)}
        return tensors

    recording = recorded(pipe, "sana", attention_kwargs={"shared": kind(0)}, callback_on_step_end=move)
    assert [recipe.positions for recipe in recording.model.recipes] == [(0, 2), (1, 3)]
    assert check_replay(pipe.transformer, recording, micro_batch=5) < 5e-6


def test_a_shifted_schedule_and_low_precision_are_recorded(load: Callable[[str], Any]) -> None:
    pipe = load("sana")
    pipe.scheduler.set_shift(7.0)
    recording = recorded(pipe, "sana")
    pipe.scheduler.set_timesteps(STEPS)
    assert torch.equal(recording.schedule.levels, pipe.scheduler.sigmas)
    assert torch.equal(recording.schedule.timesteps, pipe.scheduler.timesteps)
    pipe = load("sana")
    pipe.transformer.to(torch.bfloat16)
    recording = recorded(pipe, "sana")
    assert recording.trajectory.x.dtype == torch.float32
    (recipe,) = recording.model.recipes
    assert isinstance(recipe.combination, Combination)
    assert recipe.combination.dtype == torch.float32
    v = replay(pipe.transformer, recording, torch.arange(3), torch.ones(3, dtype=torch.int64))
    assert recording.trajectory.velocity is not None
    assert torch.equal(v, recording.trajectory.velocity[:, 1])


def test_a_sample_depends_on_its_key_alone(load: Callable[[str], Any]) -> None:
    """Initial noise and noise of the steps are the same in any batch, also with several samples per prompt."""
    pipe = load("sana")
    keys = fold_in(key(4), torch.tensor([10, 11, 12]))
    three = recorded(pipe, "sana", key=keys)
    one = recorded(pipe, "sana", prompts=PROMPTS[2:], key=Key(keys.low[2:], keys.high[2:]))  # type: ignore[index]
    assert torch.equal(three.trajectory.x[2:, 0], one.trajectory.x[:, 0])
    torch.testing.assert_close(three.trajectory.final[2:], one.trajectory.final, rtol=1e-4, atol=1e-5)
    assert not torch.equal(three.trajectory.x[0, 0], three.trajectory.x[1, 0])
    four = recorded(pipe, "sana", prompts=PROMPTS[:2], num_images_per_prompt=2)
    assert len(four.images) == 4
    assert not torch.equal(four.images[0], four.images[1])
    latents = torch.zeros_like(three.trajectory.x[:, 0])
    assert torch.equal(recorded(pipe, "sana", latents=latents).trajectory.x[:, 0], latents)


@pytest.mark.bits
@pytest.mark.parametrize("name", WITHOUT_ADAPTER)
def test_two_updates_move_the_weights(name: str, load: Callable[[str], Any]) -> None:
    """LoRA with the clipped surrogate and AdamW: first ratios of 1, gradients everywhere, and a better policy."""
    pipe = load(name)
    # FLUX.2 is guided away from the empty prompt alone.
    away: dict[str, Any] = {} if name == "flux2" else {"negative_prompt": "bad"}
    module: nn.Module = pipe.transformer
    add_lora(module, LoraConfig(rank=2, alpha=4.0), ROWS[name].targets)
    recording = recorded(pipe, name, prompts=["a red fox"] * 4, window=[0, 1], **away)
    assert check_replay(module, recording, micro_batch=4) < 1e-5
    trained = {part: parameter for part, parameter in module.named_parameters() if parameter.requires_grad}
    assert trained
    before = {part: parameter.detach().clone() for part, parameter in trained.items()}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    reward = recording.images.mean((1, 2, 3))
    advantage = group_advantages(reward, torch.zeros(4, dtype=torch.int64))
    trajectory, levels = recording.trajectory, recording.schedule.levels
    sample, step = every_pair(recording)
    for update in range(2):
        seen = []
        for rows in torch.arange(len(sample)).split(4):
            i, s = sample[rows], step[rows]
            loss, info = policy_loss(
                recording.transition(levels[s], levels[s + 1]),
                trajectory.x[i, s],
                replay(module, recording, i, s),
                trajectory.x_next[i, s],
                log_prob_old=trajectory.log_prob[i, s],
                advantage=advantage[i],
                clip_low=0.2,
                clip_high=0.2,
            )
            (loss.sum() / len(sample)).backward()
            seen.append(info.ratio)
        ratio = torch.cat(seen)
        assert torch.equal(ratio, torch.ones(len(sample))) == (update == 0)
        if update == 1:
            for part, parameter in trained.items():
                assert parameter.grad is not None, part
                assert 0 < parameter.grad.abs().max() < torch.inf, part
            assert ((ratio - 1) * advantage[sample]).mean() > 0  # what was good is likelier
        optimizer.step()
        optimizer.zero_grad()
    assert all(not torch.equal(before[part], parameter) for part, parameter in trained.items())


def test_the_gradient_is_that_of_the_pipeline(load: Callable[[str], Any]) -> None:
    """With respect to sample and weights, through both halves of guidance: compared with Sana written by hand."""
    pipe = load("sana")
    recording = recorded(pipe, "sana")
    module, weight = pipe.transformer, pipe.transformer.proj_out.weight
    x = recording.trajectory.x[:, 2].clone().requires_grad_()
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    v = replay(module, recording, torch.arange(3), torch.full((3,), 2), x=x)
    got = torch.autograd.grad((v * direction).sum(), (x, weight))
    text, mask, negative, negative_mask = pipe.encode_prompt(PROMPTS, max_sequence_length=24)
    u, c = module(
        torch.cat([x, x]),
        encoder_hidden_states=torch.cat([negative, text]),
        encoder_attention_mask=torch.cat([negative_mask, mask]),
        timestep=recording.schedule.timesteps[2].expand(6),
    )[0].chunk(2)
    want = torch.autograd.grad(((u + 4.5 * (c - u)) * direction).sum(), (x, weight))
    for left, right in zip(got, want, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


def changed(pipe: Any, change: Callable[[Tensor, Tensor], Tensor]) -> Any:
    step = RecordingScheduler.step

    class Changing(type(pipe)):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "scheduler" and isinstance(value, RecordingScheduler):
                value.step = lambda v, t, x, **options: step(value, change(v, x), t, x, **options)  # type: ignore[method-assign]
            super().__setattr__(name, value)

    made = Changing(**pipe.components)
    made.set_progress_bar_config(disable=True)
    return made


def hooked(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that changes what the last layer of a pipeline's transformer returns."""

    def change(pipe: Any) -> Any:
        pipe.transformer.train().proj_out.register_forward_hook(lambda module, args, output: hook(output))
        return pipe

    return change


def masked(pipe: Any) -> Any:
    pipe.transformer.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    return pipe


def heun(pipe: Any) -> Any:
    pipe.scheduler = FlowMatchHeunDiscreteScheduler()
    return pipe


def shared(pipe: Any) -> Any:
    pipe.transformer.register_forward_hook(lambda module, args, output: (output[0][:: len(PROMPTS)],))
    return changed(pipe, lambda v, x: v.expand_as(x))


def interrupted(pipe: Any) -> Any:
    pipe.__class__ = type("Interrupted", (type(pipe),), {"interrupt": True})
    return pipe


def altered(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any], Any]:
    return partial(changed, change=change)


REFUSED: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str]] = {
    "changed": (
        altered(lambda v, x: v.sin()),
        {},
        r"Changing .* at step 0 its velocity is no known combination of 2 outputs",
    ),
    "swapped": (altered(lambda v, x: v.roll(1, 0)), {}, "Changing .* no known combination"),
    "endless": (altered(lambda v, x: v / 0), {}, "Changing .* at step 0 its velocity is not finite"),
    "coupled": (hooked(lambda y: y + y.mean(0, keepdim=True)), {}, "SanaPipeline .* misses the recorded velocity"),
    "random": (hooked(nn.functional.dropout), {}, "SanaPipeline cannot be trained .* misses the recorded velocity"),
    "masked": (masked, {}, "SanaPipeline .* step 0 the transformer is called without the sample"),
    "shared": (shared, {}, "Changing .* at step 0 the transformer does not return one output per sample"),
    "interrupted": (interrupted, {}, "^Interrupted cannot be trained without an adapter: its scheduler takes no step"),
    "component": (lambda pipe: pipe, {"component": "unet"}, "SanaPipeline has no unet to train"),
    "uncalled": (lambda pipe: pipe, {"component": "vae"}, "SanaPipeline .* at step 0 the vae is not called"),
    "option": (lambda pipe: pipe, {"hight": 32}, "SanaPipeline cannot be called with these arguments: .*hight"),
    "scheduler": (heun, {}, "the config is of FlowMatchHeunDiscreteScheduler"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unfaithful_replays_are_refused_in_one_line(case: str, load: Callable[[str], Any]) -> None:
    change, options, message = REFUSED[case]
    pipe = change(load("sana"))
    own = pipe.scheduler
    refuses(message, recorded, pipe, "sana", **options)
    assert pipe.scheduler is own


def test_a_weighted_sum_that_no_formula_gives_is_fitted(load: Callable[[str], Any]) -> None:
    """Of both halves of guidance and the sample, with the weights of the change, and it replays the recorded velocities."""
    pipe = changed(load("sana"), lambda v, x: 0.9 * v + 0.25 * x)
    recording = recorded(pipe, "sana")
    (recipe,) = recording.model.recipes
    assert isinstance(recipe.combination, FittedSum)
    unconditional, conditional = recipe.combination.weights
    assert (unconditional, conditional) == pytest.approx((0.9 * (1 - 4.5), 0.9 * 4.5), rel=1e-6)
    assert recipe.combination.of_sample == pytest.approx(0.25, rel=1e-6)
    assert check_replay(pipe.transformer, recording, micro_batch=2) < 1e-4


@pytest.mark.parametrize("norm", ["kept", "capped"])
def test_the_norm_of_guidance_is_told_apart(norm: str, load: Callable[[str], Any]) -> None:
    """LongCat-Image's guided velocity is at most as long as that of the prompt, Lumina 2's exactly so."""
    prompt, other, v = (torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    combination = Combination(cond=0, scale=3.0, norm=norm)  # type: ignore[arg-type]
    level = torch.ones(3)
    made = combination([prompt, other], v, level)
    wanted, plain = (part.norm(dim=-1) for part in (prompt, combination._replace(norm="own")([prompt, other], v, level)))
    torch.testing.assert_close(made.norm(dim=-1), wanted if norm == "kept" else torch.minimum(wanted, plain))
    close = prompt + 0.1 * other  # guidance away from it makes some rows shorter
    found = [
        one
        for one in _list_known([prompt, close], v, [3.0])
        if torch.equal(one([prompt, close], v, level), combination([prompt, close], v, level))
    ]
    assert found == [combination]


def test_inputs_without_their_padding_lie_as_the_pipelines() -> None:
    """A view of padded rows has other strides, with which products in bfloat16 have other bits (Bria FIBO)."""
    padded = torch.randn(1, 2, 6, 4)
    ((row,),) = strip_padding(((padded,),), [2, 4, 3])
    assert torch.equal(row, padded[:, :, :4, :3])
    assert row.is_contiguous()


def test_control_networks_are_told_from_inputs_and_share_no_layers() -> None:
    x, first, second = (torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    made = [[first.bfloat16(), first], [second]]
    given = ((x,), {"residuals": [second.clone(), first, second + 1], "scale": 0.5})
    kinds, rows, _ = _trace_inputs(given, x, made, False, partial(_match_sample, single=False, known=()))
    assert kinds[:3] == [SampleInput(x.dtype, 1), ControlOutput(x.dtype, 1, 0), ControlOutput(x.dtype, 0, 1)]
    assert [type(kind) for kind in kinds[3:]] == [RowInput, SharedInput]
    assert torch.equal(rows[0][:, 0], second + 1)
    pipe = SimpleNamespace(transformer=nn.Linear(2, 2), controlnet=nn.Sequential(nn.Linear(2, 2)))
    assert set(find_frozen_networks(pipe)) == {"controlnet"}
    pipe.controlnet.append(pipe.transformer)
    refuses("a network beside the transformer shares layers with it, which are trained", find_frozen_networks, pipe)


def test_other_weights_are_found_before_the_first_update(load: Callable[[str], Any]) -> None:
    pipe = load("aura-flow")
    recording = recorded(pipe, "aura-flow")
    with torch.no_grad():
        pipe.transformer.proj_out.weight.mul_(1.01)
    refuses(r"AuraFlowPipeline cannot be trained .* other weights", check_replay, pipe.transformer, recording, micro_batch=3)
    assert check_replay(pipe.transformer, recording, micro_batch=3, tolerance=0.1) > 1e-3


def test_what_a_recording_cannot_tell_is_refused(load: Callable[[str], Any]) -> None:
    """A level of no recorded step, guidance away from the prompt itself, and as many samples as tokens, like rows."""
    pipe = load("sana")
    recording = recorded(pipe, "sana", window=[0, 1])
    for call, says in (
        (
            lambda: replay(pipe.transformer, recording, torch.tensor([0]), torch.tensor([2])),
            "the recording of SanaPipeline has no step at sigma",
        ),
        (
            lambda: recorded(load("flux"), "flux-guided", prompts=["bad"] * 3, negative_prompt=["bad"] * 3),
            "FluxPipeline .* several combinations .* use prompts other than the negative",
        ),
        (
            lambda: recorded(load("flux"), "flux", prompts=[f"{number} foxes" for number in range(16)], steps=2),
            "FluxPipeline cannot be trained",
        ),
    ):
        refuses(says, call)
