"""Updates in verl's order of calls, and a whole step of each of verl-omni's algorithms, against fluvial's own updates."""

from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import pytest
import torch
from helpers import tiny_pipelines, verl_runs, verl_workers
from helpers.marks import long
from torch import Tensor

from fluvial.core.transitions import bind
from fluvial.engines.engine.world import World
from fluvial.engines.methods import KLConfig, StepKLConfig
from fluvial.engines.methods.distill import Distill
from fluvial.engines.methods.dpo import Dpo
from fluvial.engines.methods.nft import Nft
from fluvial.engines.methods.table import Grpo
from fluvial.engines.sampling.items import NoisedSamples, Pairs, make_recorded_steps
from fluvial.engines.sampling.score import score
from fluvial.models import Schedule
from fluvial.models.lora import copy_adapter

SCALE = 2.5  # of guidance
BETA = 0.3
each_model = pytest.mark.parametrize("name", ["sd3", "qwen-image"])


def worker(name: str, kind: str, loss: Callable[..., Tensor], **model: Any) -> verl_workers.Worker:
    optimizer = verl_runs.optimizer_config(override_optimizer_config={"eps": verl_runs.EPS})
    config = verl_runs.model_config(name, scale=SCALE, **model)
    return verl_workers.Worker(kind, config, verl_runs.engine_config(), optimizer, verl_workers.loss_of(loss))


def frozen(name: str, *, strategy: str = "fluvial", **model: Any) -> verl_workers.Worker:
    """Return the reference or a teacher as verl-omni makes them: with an optimizer config, and `forward_only`."""
    engine = verl_runs.engine_config(forward_only=True)
    object.__setattr__(engine, "strategy", strategy)
    config = verl_runs.model_config(name, scale=SCALE, **model)
    return verl_workers.Worker("diffusion_model", config, engine, verl_runs.optimizer_config())


def noised(name: str, made: verl_runs.Made, timesteps: Tensor) -> tuple[NoisedSamples, Tensor]:
    """Return clean samples with noise on them at `[B, K]` timesteps, step by step, and the noise `[B, K, ...]`."""
    x0, (batch, each) = made.trajectory.final, timesteps.shape
    noise = torch.randn(batch, each, *x0.shape[1:], generator=torch.Generator().manual_seed(7))
    steps = noise.transpose(0, 1).flatten(0, 1)
    clean, level = x0.repeat(each, 1, 1, 1), timesteps.T.flatten() / 1000
    sigma = level[:, None, None, None]
    signal = torch.rand(batch * each, generator=torch.Generator().manual_seed(8))
    of_rows = {"sample": torch.arange(batch).repeat(each), "signal": signal, "weight": torch.ones(batch * each)}
    places = {"x": (1 - sigma) * clean + sigma * steps, "level": level, "timestep": timesteps.T.flatten()}
    return NoisedSamples(**places, **of_rows, x0=clean, target=steps - clean, predictions={}), noise


@each_model
def test_a_step_of_flow_grpo(world: World, name: str) -> None:
    """Full fine-tuning with a reference worker: two mini-batches of clipped ratios and the KL."""
    made = verl_runs.rollout(name, scale=SCALE)
    clipped = verl_runs.flow_grpo()

    def loss(output: dict[str, Tensor], data: Any) -> Tensor:
        value, _ = clipped(model_output=output, data=data, dp_group=None)
        whole = value * data["gradient_accumulation_steps"]
        return whole + verl_runs.KL * verl_workers.kl(output, data["ref_prev_sample_mean"])

    actor = worker(name, "diffusion_model", loss)
    data = verl_runs.batch(made)
    data["ref_prev_sample_mean"] = frozen(name).infer(data)["prev_sample_mean"]
    metrics = actor.update(data, mini_batches=2)
    own = verl_runs.Own(made, world)
    flat = verl_runs.items(made)
    flat = flat._replace(predictions={"ref": own.other(flat, made.cond, None)})
    method = Grpo(clip_low=verl_runs.CLIP, clip_high=verl_runs.CLIP, kl=StepKLConfig(verl_runs.KL, weight="rate"))
    for i, rows in enumerate((torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7]))):
        part = optree.tree_map(lambda tensor, rows=rows: tensor[rows], flat)
        found = own.update(part, made.cond, method)
        assert metrics[i]["loss"] == pytest.approx(found, rel=1e-5)
    own.check_equal(actor.engine)
    assert [step["lr"] for step in metrics] == [None, 1e-3]


@each_model
def test_a_step_of_diffusion_nft(world: World, name: str) -> None:
    """LoRA with the adapter `old`, which the trainer copies and averages afterwards."""
    made = verl_runs.rollout(name, scale=SCALE)
    loss = partial(verl_workers.diffusion_nft, beta=BETA, clip=5.0, ref=verl_runs.KL)
    two = {**verl_runs.LORA, "policy_state_adapters": ("default", "old"), "algorithm": "diffusion_nft"}
    actor = worker(name, "diffusion_nft_model", loss, **two)
    own = verl_runs.Own(made, world, ("default", "old"))
    for module in (actor.engine.module, own.engine.module):
        verl_runs.move(module)
    actor.engine.copy_adapter(source="default", target="old")
    copy_adapter(own.engine.module, "default", "old")
    for module in (actor.engine.module, own.engine.module):
        verl_runs.move(module, seed=4)  # three different policies
    timesteps = torch.tensor([[900.0, 300.0], [800.0, 200.0], [700.0, 100.0], [600.0, 50.0]])
    items, noise = noised(name, made, timesteps)
    pack = tiny_pipelines.packed if name == "qwen-image" else torch.clone
    forward = torch.stack([pack(noise[:, i]) for i in (0, 1)], 1)
    given: dict[str, Any] = {
        "latents_clean": pack(made.trajectory.final),
        "train_timesteps": timesteps,
        "forward_noise": forward,
    }
    data = verl_runs.batch(made, reward_prob=items.signal.view(2, 4).T.contiguous(), **given)
    predictions = {"old": own.other(items, made.cond, "old"), "ref": own.other(items, made.cond, None)}
    nft = Nft(beta=BETA, adv_clip=5.0, weight_min=1e-5, kl=KLConfig(verl_runs.KL))
    found = own.update(items._replace(predictions=predictions), made.cond, nft)
    assert actor.update(data)[0]["loss"] == pytest.approx(found, rel=1e-5)
    own.check_equal(actor.engine)
    actor.engine.ema_update_adapter(source="default", target="old", decay=0.5)


@each_model
def test_a_step_of_dpo(world: World, name: str) -> None:
    """LoRA, whose base is the reference: pairs of a prompt with the trainer's noise and timesteps."""
    made = verl_runs.rollout(name, scale=SCALE)
    pairs = torch.tensor([0, 0, 2, 2])
    cond = optree.tree_map(lambda table: table[pairs], made.cond)
    actor = worker(name, "diffusion_dpo_model", partial(verl_workers.dpo, beta=10.0), **verl_runs.LORA, algorithm="dpo")
    own = verl_runs.Own(made, world, ("default",))
    for module in (actor.engine.module, own.engine.module):
        verl_runs.move(module)
    timesteps = torch.tensor([[700.0], [700.0], [300.0], [300.0]])
    one, noise = noised(name, made, timesteps)
    noise = noise[[0, 0, 2, 2], 0]
    sigma = one.level[:, None, None, None]
    clean = made.trajectory.final
    pack = tiny_pipelines.packed if name == "qwen-image" else torch.clone
    given: dict[str, Any] = {"latents_clean": pack(clean), "noise": pack(noise), "timesteps": timesteps[:, 0]}
    rewards = torch.tensor([1.0, 0.0, 3.0, 2.0])
    data = verl_runs.batch(made._replace(cond=cond), sample_level_rewards=rewards, **given)
    data["ref_noise_pred"] = actor.infer(data, no_lora_adapter=True)["noise_pred"]
    items = Pairs(
        x=((1 - sigma) * clean + sigma * noise).unflatten(0, (2, 2)),
        level=one.level[::2],
        timestep=one.timestep[::2] if one.timestep is not None else None,
        sample=torch.tensor([0, 2]),
        weight=torch.ones(2),
        target=(noise - clean).unflatten(0, (2, 2)),
        predictions={},
    )
    items = items._replace(predictions={"ref": own.other(items, cond, None)})
    found = own.update(items, cond, Dpo(beta=10.0), micro_batch=2)
    assert actor.update(data)[0]["loss"] == pytest.approx(found, rel=1e-5)
    own.check_equal(actor.engine)


@each_model
def test_a_step_of_distillation(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A teacher scores the student's trajectories; verl-omni wants its strategy to be fsdp2, and equal schedulers."""
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "fluvial")
    made = verl_runs.rollout(name, scale=SCALE)
    made = made._replace(sampler=bind("dance_sde", verl_runs.ETA, made.schedule.levels))

    def loss(output: dict[str, Tensor], data: Any) -> Tensor:
        return verl_workers.kl(output, data["teacher_prev_sample_mean"])

    actor = worker(name, "diffusion_model", loss, sde_type="dance_sde")
    own = verl_runs.Own(made, world)
    teacher = frozen(name, strategy="fsdp2", sde_type="dance_sde", policy_state_adapters=("default", "old"))
    assert teacher.engine.scheduler.config == actor.engine.scheduler.config
    teacher.engine.module.requires_grad_(True)
    verl_runs.move(teacher.engine.module)  # other weights than the student's
    data = verl_runs.batch(made)
    data["teacher_prev_sample_mean"] = teacher.infer(data)["prev_sample_mean"]
    transition = made.sampler(made.schedule.levels[:-1], made.schedule.levels[1:])
    flat = make_recorded_steps(made.trajectory, made.schedule, transition, made.advantage, torch.ones(4))
    other = verl_runs.Own(made, world)
    verl_runs.move(other.engine.module)
    flat = flat._replace(predictions={"teacher": other.other(flat, made.cond, None)})
    found = own.update(flat, made.cond, Distill())
    assert actor.update(data)[0]["loss"] == pytest.approx(found, rel=1e-5)
    own.check_equal(actor.engine)


def test_a_step_of_dance_grpo_on_videos(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wan: the levels of verl-omni's adapter, five frames, and old log-probs that the actor itself computes."""
    from fluvial.engines.extensions.verl import plugin

    monkeypatch.setattr(plugin.ENGINES["diffusion_model"], "hooks", lambda config: verl_workers.WanAdapter)
    t = torch.tensor([1.0, 2 / 3, 1 / 3, 0.0])
    levels = 5 * t / (1 + 4 * t)
    schedule = Schedule(levels, 1000 * levels[:-1])
    made = verl_runs.rollout("wan", scale=SCALE, size=(*verl_runs.SIZE, 5), schedule=schedule)
    made = made._replace(sampler=bind("dance_sde", verl_runs.ETA, levels))
    clipped = verl_runs.flow_grpo()

    def loss(output: dict[str, Tensor], data: Any) -> Tensor:
        return clipped(model_output=output, data=data, dp_group=None)[0] * data["gradient_accumulation_steps"]

    dance: dict[str, Any] = {"algorithm": "dance_grpo", "sde_type": "dance_sde", "frames": 5}
    actor = worker("wan", "diffusion_model", loss, **dance)
    data = verl_runs.batch(made)
    assert data["all_latents"].shape == (4, 3, 4, 3, 8, 8)
    data["old_log_probs"] = actor.infer(data)["log_probs"] + 0.05
    own = verl_runs.Own(made, world)
    flat = verl_runs.items(made)._replace(log_prob_old=data["old_log_probs"].T.flatten())
    found = own.update(flat, made.cond, Grpo(clip_low=verl_runs.CLIP, clip_high=verl_runs.CLIP))
    assert actor.update(data)[0]["loss"] == pytest.approx(found, rel=1e-5)
    own.check_equal(actor.engine)


@pytest.mark.bits
@pytest.mark.parametrize(
    ("name", "lora", "kl", "scale"),
    [
        ("sd3", False, verl_runs.KL, 2.5),
        long("sd3", True, 0.0, 1.0),
        ("qwen-image", False, 0.0, 1.0),
        ("qwen-image", True, verl_runs.KL, 2.5),
        long("qwen-image", True, 0.0, 2.5),
        long("sd3", True, verl_runs.KL, 1.0),
    ],
)
def test_gradients_are_those_of_fluvials_own_update(world: World, name: str, lora: bool, kl: float, scale: float) -> None:
    """With and without LoRA, KL and guidance: gradients, loss and norm, to 1e-6."""
    made = verl_runs.rollout(name, scale=scale)
    theirs = verl_runs.build(name, scale=scale, **(verl_runs.LORA if lora else {}))
    own = verl_runs.Own(made, world, ("default",) if lora else ())
    data, items = verl_runs.batch(made), verl_runs.items(made)
    if kl:
        items = items._replace(predictions={"ref": own.other(items, made.cond, None)})
        with theirs.disable_adapter():
            data["ref_prev_sample_mean"] = verl_runs.infer(theirs, data)["prev_sample_mean"]
    verl_runs.move(theirs.module)
    verl_runs.move(own.engine.module)
    config = StepKLConfig(kl, weight="rate" if kl else "auto")
    method = Grpo(clip_low=verl_runs.CLIP, clip_high=verl_runs.CLIP, kl=config)
    loss, expected = own.update(items, made.cond, method), own.gradients()
    with theirs.train_mode():
        theirs.optimizer_zero_grad()
        result = theirs.forward_backward_batch(data, verl_runs.flow_grpo(kl=kl))
        found = verl_runs.gradients(theirs)
    assert sum(result["loss"]) == pytest.approx(loss, rel=1e-6)
    assert found.keys() <= expected.keys()
    # A parameter whose output the model drops has no gradient.
    away = sum(float((found.get(key, 0) - tensor).square().sum()) for key, tensor in expected.items())
    assert away**0.5 < 1e-6 * sum(float(tensor.square().sum()) for tensor in expected.values()) ** 0.5


def test_loss_functions_are_called_as_verl_calls_them() -> None:
    """One call per micro-batch and step; losses add up to the mean, smaller parts weigh less; full_determinism holds.

    A pass holds several steps: ceil(B T / micro_batch) of them, where a loop over both has T ceil(B / micro_batch).
    """
    made, passes, losses = verl_runs.rollout("sd3"), list[int](), list[float]()
    engine = verl_runs.build("sd3", engine={"full_determinism": True})
    engine.module.register_forward_hook(lambda module, args, output: passes.append(1))
    whole, parts, halves = [(4, 2)] * 2, [(3, 8 / 3), (1, 8), (2, 4), (2, 4)], [(2, 4)] * 4
    for size, expected, count in ((8, whole, 1), (4, whole, 2), (3, parts, 3), (2, halves, 4)):
        passes.clear()
        calls: list[Any] = []
        data = verl_runs.batch(made, micro_batch_size_per_gpu=size)
        with engine.train_mode():
            result = engine.forward_backward_batch(data, verl_runs.flow_grpo(calls=calls))
        assert [call[:2] for call in calls] == expected
        assert {call[2:] for call in calls} == {(1, engine.get_data_parallel_group(), True)}
        assert not torch.are_deterministic_algorithms_enabled()
        assert len(result["metrics"]["actor/ratio_mean"]) == len(result["loss"]) == len(calls)
        assert len(passes) == count
        losses.append(sum(result["loss"]))
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)


@pytest.mark.bits
@pytest.mark.parametrize("name", ["sd3", "qwen-image"])
def test_infer_batch_returns_the_log_probs_of_given_trajectories(name: str) -> None:
    """Of the base model these are the rollout's own, and `score` returns the same."""
    made = verl_runs.rollout(name, scale=2.5)
    engine = verl_runs.build(name, scale=2.5)
    found = verl_runs.infer(engine, verl_runs.batch(made))
    assert engine.mode is None
    with engine.engine.inference() as module:
        of_rollout = {"model": made.model, "cond": made.cond, "schedule": made.schedule, "sampler": made.sampler}
        scored = score(made.trajectory, module, forwards="two", **of_rollout)
    torch.testing.assert_close(found["log_probs"], made.trajectory.log_prob, rtol=0, atol=2e-6)
    torch.testing.assert_close(scored, made.trajectory.log_prob, rtol=0, atol=2e-6)
    shape = verl_runs.batch(made)["all_latents"].shape
    assert found["prev_sample_mean"].shape == (4, verl_runs.RECORDED, *shape[2:])
    assert found["std_dev_t"].shape == (4, verl_runs.RECORDED, *[1] * len(shape[2:]))
    levels = made.schedule.levels
    sqrt_dt = torch.sqrt(levels[:2] - levels[1:3])
    torch.testing.assert_close(found["sqrt_dt"], sqrt_dt.expand(4, 2))
    std = made.sampler(levels[:2], levels[1:3]).std
    torch.testing.assert_close(found["std_dev_t"].flatten(2)[..., 0] * sqrt_dt, std.expand(4, 2))
