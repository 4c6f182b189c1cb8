"""A whole step of each of verl-omni's algorithms, in its workers' order of calls, against fluvial's own update."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import tiny_pipelines
import torch
import verl_runs
import verl_workers
from torch import Tensor

from fluvial.core.transitions import bind
from fluvial.engines.engine.config import EngineConfig, OptimizerConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.weights import gather
from fluvial.engines.engine.world import World
from fluvial.engines.methods import LossConfig
from fluvial.engines.methods.distill import Distill
from fluvial.engines.methods.dpo import Dpo
from fluvial.engines.methods.nft import Nft
from fluvial.engines.methods.table import Clipped
from fluvial.engines.sampling.items import NoisedSamples, Pairs, recorded_steps
from fluvial.models import LoraConfig, Schedule, add_lora
from fluvial.models.guidance import guided_velocity
from fluvial.models.lora import LowRank, copy_adapter, use_adapter

EPS = 1e-4  # of Adam: rounding in a gradient that is 0 in exact arithmetic moves no weight
SCALE = 2.5  # of guidance
BETA = 0.3
each_model = pytest.mark.parametrize("name", ["sd3", "qwen-image"])


class Own:
    """fluvial's own engine of a network, which an objective trains on items.

    Args:
        made: rollout of the network.
        world: process group.
        adapters: names of LoRA adapters; none train all weights.
    """

    def __init__(self, made: verl_runs.Made, world: World, adapters: tuple[str, ...] = ()) -> None:
        self.made, module = made, made.model.build()
        if adapters:
            lora = LoraConfig(rank=2, alpha=4, form=LowRank("gaussian"), targets=tuple(verl_runs.LORA["target_modules"]))
            add_lora(module, lora, (), adapters=adapters, seed=42)
        optimizer = OptimizerConfig(lr=1e-3, eps=EPS, max_grad_norm=1e6)
        self.engine = Engine(module, made.model.blocks(module), optimizer, world, sharding=EngineConfig())

    def predict(self, x: Tensor, items: Any, cond: Any) -> Tensor:
        """Return the prediction at each item, guided as the rollout; pairs `[P, 2, ...]` share level and conditioning."""
        each = x.shape[1] if isinstance(items, Pairs) else 1
        level, timestep, sample = (t.repeat_interleave(each) for t in (items.level, items.timestep, items.sample))
        own = optree.tree_map(lambda table: table[sample], cond)
        flat = x.flatten(0, 1) if isinstance(items, Pairs) else x
        v = guided_velocity(self.made.model, self.engine.module, flat, level, own, timestep=timestep, forwards="two")
        return v.view_as(x)

    def other(self, items: Any, cond: Any, adapter: str | None) -> Tensor:
        """Return the prediction of another adapter, or of the base model, at each item."""
        with torch.no_grad(), use_adapter(self.engine.module, adapter):
            return self.predict(items.x, items, cond)

    def update(self, items: Any, cond: Any, objective: Any, config: LossConfig, *, micro_batch: int = 4) -> float:
        """Take a step and return the loss."""
        self.before = self.weights()

        def loss(part: Any) -> Any:
            return objective.loss(self.predict(part.x, part, cond), part, config)

        size = len(items.level)
        return self.engine.update(items, loss, items.weight, count=size, micro_batch=micro_batch, pad_to=size).loss

    def weights(self) -> dict[str, Tensor]:
        """Return all parameters."""
        return {name: gather(p.detach()).clone() for name, p in self.engine.module.named_parameters()}

    def check_equal(self, engine: Any) -> None:
        """Check that the engine of verl has the same weights to 1e-6, and that the last step changed them."""
        expected = self.weights()
        for name, p in engine.module.named_parameters():
            torch.testing.assert_close(gather(p.detach()), expected[name], rtol=0, atol=1e-6)
        assert max(float((tensor - self.before[name]).abs().max()) for name, tensor in expected.items()) > 1e-4


def worker(name: str, folder: Path, kind: str, loss: Callable[..., Tensor], **model: Any) -> verl_workers.Worker:
    """Return an actor."""
    optimizer = verl_runs.optimizer_config(override_optimizer_config={"eps": EPS})
    config = verl_runs.model_config(name, folder, scale=SCALE, **model)
    return verl_workers.Worker(kind, config, verl_runs.engine_config(), optimizer, verl_workers.loss_of(loss))


def frozen(name: str, folder: Path, *, strategy: str = "fluvial", **model: Any) -> verl_workers.Worker:
    """Return the reference or a teacher as verl-omni makes them: with an optimizer config, and `forward_only`."""
    engine = verl_runs.engine_config(forward_only=True)
    object.__setattr__(engine, "strategy", strategy)
    config = verl_runs.model_config(name, folder, scale=SCALE, **model)
    return verl_workers.Worker("diffusion_model", config, engine, verl_runs.optimizer_config())


def noised(name: str, made: verl_runs.Made, timesteps: Tensor) -> tuple[NoisedSamples, Tensor]:
    """Return clean samples with noise on them at `[B, K]` timesteps, step by step, and the noise `[B, K, ...]`."""
    x0, (batch, each) = made.trajectory.final, timesteps.shape
    noise = torch.randn(batch, each, *x0.shape[1:], generator=torch.Generator().manual_seed(7))
    steps = noise.transpose(0, 1).flatten(0, 1)
    clean, level = x0.repeat(each, 1, 1, 1), timesteps.T.flatten() / 1000
    sigma = level[:, None, None, None]
    items = NoisedSamples(
        x=(1 - sigma) * clean + sigma * steps,
        level=level,
        timestep=timesteps.T.flatten(),
        sample=torch.arange(batch).repeat(each),
        signal=torch.rand(batch * each, generator=torch.Generator().manual_seed(8)),
        weight=torch.ones(batch * each),
        x0=clean,
        target=steps - clean,
        predictions={},
    )
    return items, noise


@each_model
def test_a_step_of_flow_grpo(folders: dict[str, Path], world: World, name: str) -> None:
    """Full fine-tuning with a reference worker: two mini-batches of clipped ratios and the KL."""
    made = verl_runs.rollout(name, folders[name], scale=SCALE)
    clipped = verl_runs.flow_grpo()

    def loss(output: dict[str, Tensor], data: Any) -> Tensor:
        value, _ = clipped(model_output=output, data=data, dp_group=None)
        whole = value * data["gradient_accumulation_steps"]
        return whole + verl_runs.KL * verl_workers.kl(output, data["ref_prev_sample_mean"])

    actor = worker(name, folders[name], "diffusion_model", loss)
    data = verl_runs.batch(name, made)
    data["ref_prev_sample_mean"] = frozen(name, folders[name]).infer(data)["prev_sample_mean"]
    metrics = actor.update(data, mini_batches=2)
    own = Own(made, world)
    flat = verl_runs.items(made)
    flat = flat._replace(predictions={"ref": own.other(flat, made.cond, None)})
    config = LossConfig(kl_coef=verl_runs.KL, kl_weight="rate")
    for i, rows in enumerate((torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7]))):
        part = optree.tree_map(lambda tensor, rows=rows: tensor[rows], flat)
        found = own.update(part, made.cond, Clipped(verl_runs.CLIP, verl_runs.CLIP), config)
        assert metrics[i]["loss"] == pytest.approx(found, rel=1e-5)
    own.check_equal(actor.engine)
    assert [step["lr"] for step in metrics] == [None, 1e-3]


@each_model
def test_a_step_of_diffusion_nft(folders: dict[str, Path], world: World, name: str) -> None:
    """LoRA with the adapter `old`, which the trainer copies and averages afterwards."""
    made = verl_runs.rollout(name, folders[name], scale=SCALE)

    def loss(output: dict[str, Tensor], data: Any) -> Tensor:
        return verl_workers.diffusion_nft(output, data, beta=BETA, clip=5.0, ref=verl_runs.KL)

    two = {**verl_runs.LORA, "policy_state_adapters": ("default", "old"), "algorithm": "diffusion_nft"}
    actor = worker(name, folders[name], "diffusion_nft_model", loss, **two)
    own = Own(made, world, ("default", "old"))
    for module in (actor.engine.module, own.engine.module):
        verl_runs.move(module)
    actor.engine.copy_adapter(source="default", target="old")
    copy_adapter(own.engine.module, "default", "old")
    for module in (actor.engine.module, own.engine.module):
        verl_runs.move(module, seed=4)  # three different policies
    timesteps = torch.tensor([[900.0, 300.0], [800.0, 200.0], [700.0, 100.0], [600.0, 50.0]])
    items, noise = noised(name, made, timesteps)
    pack = tiny_pipelines.packed if name == "qwen-image" else torch.clone
    data = verl_runs.batch(
        name,
        made,
        latents_clean=pack(made.trajectory.final),
        train_timesteps=timesteps,
        reward_prob=items.signal.view(2, 4).T.contiguous(),
        forward_noise=torch.stack([pack(noise[:, i]) for i in (0, 1)], 1),
    )
    predictions = {"old": own.other(items, made.cond, "old"), "ref": own.other(items, made.cond, None)}
    nft = Nft(beta=BETA, adv_clip=5.0, weight_min=1e-5)
    found = own.update(items._replace(predictions=predictions), made.cond, nft, LossConfig(kl_coef=verl_runs.KL))
    assert actor.update(data)[0]["loss"] == pytest.approx(found, rel=1e-5)
    own.check_equal(actor.engine)
    actor.engine.ema_update_adapter(source="default", target="old", decay=0.5)


@each_model
def test_a_step_of_dpo(folders: dict[str, Path], world: World, name: str) -> None:
    """LoRA, whose base is the reference: pairs of a prompt with the trainer's noise and timesteps."""
    made = verl_runs.rollout(name, folders[name], scale=SCALE)
    pairs = torch.tensor([0, 0, 2, 2])
    cond = optree.tree_map(lambda table: table[pairs], made.cond)

    def loss(output: dict[str, Tensor], data: Any) -> Tensor:
        return verl_workers.dpo(output, data, beta=10.0)

    more = {**verl_runs.LORA, "algorithm": "dpo"}
    actor = worker(name, folders[name], "diffusion_dpo_model", loss, **more)
    own = Own(made, world, ("default",))
    for module in (actor.engine.module, own.engine.module):
        verl_runs.move(module)
    timesteps = torch.tensor([[700.0], [700.0], [300.0], [300.0]])
    one, noise = noised(name, made, timesteps)
    noise = noise[[0, 0, 2, 2], 0]
    sigma = one.level[:, None, None, None]
    clean = made.trajectory.final
    pack = tiny_pipelines.packed if name == "qwen-image" else torch.clone
    data = verl_runs.batch(
        name,
        made._replace(cond=cond),
        latents_clean=pack(clean),
        noise=pack(noise),
        timesteps=timesteps[:, 0],
        sample_level_rewards=torch.tensor([1.0, 0.0, 3.0, 2.0]),
    )
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
    found = own.update(items, cond, Dpo(beta=10.0), LossConfig(), micro_batch=2)
    assert actor.update(data)[0]["loss"] == pytest.approx(found, rel=1e-5)
    own.check_equal(actor.engine)


@each_model
def test_a_step_of_distillation(folders: dict[str, Path], world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A teacher scores the student's trajectories; verl-omni wants its strategy to be fsdp2, and equal schedulers."""
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "fluvial")
    made = verl_runs.rollout(name, folders[name], scale=SCALE)
    made = made._replace(sampler=bind("dance_sde", verl_runs.ETA, made.schedule.levels))

    def loss(output: dict[str, Tensor], data: Any) -> Tensor:
        return verl_workers.kl(output, data["teacher_prev_sample_mean"])

    actor = worker(name, folders[name], "diffusion_model", loss, sde_type="dance_sde")
    own = Own(made, world)
    teacher = frozen(name, folders[name], strategy="fsdp2", sde_type="dance_sde", policy_state_adapters=("default", "old"))
    assert teacher.engine.scheduler.config == actor.engine.scheduler.config
    teacher.engine.module.requires_grad_(True)
    verl_runs.move(teacher.engine.module)  # other weights than the student's
    data = verl_runs.batch(name, made)
    data["teacher_prev_sample_mean"] = teacher.infer(data)["prev_sample_mean"]
    flat = recorded_steps(
        made.trajectory,
        made.schedule,
        made.sampler(made.schedule.levels[:-1], made.schedule.levels[1:]),
        made.advantage,
        torch.ones(4),
    )
    other = Own(made, world)
    verl_runs.move(other.engine.module)
    flat = flat._replace(predictions={"teacher": other.other(flat, made.cond, None)})
    found = own.update(flat, made.cond, Distill(), LossConfig())
    assert actor.update(data)[0]["loss"] == pytest.approx(found, rel=1e-5)
    own.check_equal(actor.engine)


def test_a_step_of_dance_grpo_on_videos(folders: dict[str, Path], world: World) -> None:
    """Wan: levels with verl-omni's shift, five frames, and old log-probs that the actor itself computes."""
    t = torch.tensor([1.0, 2 / 3, 1 / 3, 0.0])
    levels = 5 * t / (1 + 4 * t)
    schedule = Schedule(levels, 1000 * levels[:-1])
    made = verl_runs.rollout("wan", folders["wan"], scale=SCALE, size=(*verl_runs.SIZE, 5), schedule=schedule)
    made = made._replace(sampler=bind("dance_sde", verl_runs.ETA, levels))
    clipped = verl_runs.flow_grpo()

    def loss(output: dict[str, Tensor], data: Any) -> Tensor:
        return clipped(model_output=output, data=data, dp_group=None)[0] * data["gradient_accumulation_steps"]

    dance: dict[str, Any] = {"algorithm": "dance_grpo", "sde_type": "dance_sde", "frames": 5}
    actor = worker("wan", folders["wan"], "diffusion_model", loss, **dance)
    data = verl_runs.batch("wan", made)
    assert data["all_latents"].shape == (4, 3, 4, 3, 8, 8)
    data["old_log_probs"] = actor.infer(data)["log_probs"] + 0.05
    own = Own(made, world)
    flat = verl_runs.items(made)._replace(log_prob_old=data["old_log_probs"].T.flatten())
    found = own.update(flat, made.cond, Clipped(verl_runs.CLIP, verl_runs.CLIP), LossConfig())
    assert actor.update(data)[0]["loss"] == pytest.approx(found, rel=1e-5)
    own.check_equal(actor.engine)
