"""One `train_batch` in verl's order of calls, with verl's own BaseEngine and registry, against fluvial's own update."""

from pathlib import Path
from typing import Any

import pytest
import torch
import verl_runs

from fluvial.engines.engine.config import EngineConfig, OptimizerConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.weights import gather
from fluvial.engines.engine.world import World
from fluvial.engines.sampling.score import score
from fluvial.models import LoraConfig, add_lora
from fluvial.models.lora import LowRank


def own_engine(made: verl_runs.Made, world: World, *, lora: bool) -> Engine:
    """Return fluvial's own engine of the same network."""
    module = made.model.build()
    if lora:
        targets = tuple(verl_runs.LORA["target_modules"])
        add_lora(module, LoraConfig(rank=2, alpha=4, form=LowRank("gaussian"), targets=targets), (), seed=42)
    config = OptimizerConfig(lr=1e-3, max_grad_norm=1e6)
    return Engine(module, made.model.blocks(module), config, world, sharding=EngineConfig())


@pytest.mark.bits
@pytest.mark.parametrize(
    ("name", "lora", "kl", "scale"),
    [
        ("sd3", False, verl_runs.KL, 2.5),
        ("sd3", True, 0.0, 1.0),
        ("qwen-image", False, 0.0, 1.0),
        ("qwen-image", True, verl_runs.KL, 2.5),
        ("qwen-image", True, 0.0, 2.5),
        ("sd3", True, verl_runs.KL, 1.0),
    ],
)
def test_gradients_are_those_of_fluvials_own_update(
    folders: dict[str, Path], world: World, name: str, lora: bool, kl: float, scale: float
) -> None:
    """With and without LoRA, KL and guidance: gradients, loss and norm, to 1e-6."""
    made = verl_runs.rollout(name, folders[name], scale=scale)
    theirs = verl_runs.build(verl_runs.model_config(name, folders[name], scale=scale, **(verl_runs.LORA if lora else {})))
    own = own_engine(made, world, lora=lora)
    reference = verl_runs.reference(own.module, made, adapters=lora) if kl else None
    data = verl_runs.batch(name, made)
    if kl:
        with theirs.eval_mode(), theirs.disable_adapter():
            before = theirs.infer_batch(verl_runs.batch(name, made))
        data["ref_prev_sample_mean"] = before["model_output"]["prev_sample_mean"]
    verl_runs.move(theirs.module)
    verl_runs.move(own.module)
    loss, expected = verl_runs.own_update(own, made, kl=kl, v_ref=reference)
    with theirs.train_mode():
        theirs.optimizer_zero_grad()
        result = theirs.forward_backward_batch(data, verl_runs.flow_grpo(kl=kl))
        found = verl_runs.gradients(theirs)
    assert sum(result["loss"]) == pytest.approx(loss, rel=1e-6)
    assert found.keys() <= expected.keys()
    # A parameter whose output the model drops has no gradient.
    away = sum(float((found.get(key, 0) - tensor).square().sum()) for key, tensor in expected.items())
    assert away**0.5 < 1e-6 * sum(float(tensor.square().sum()) for tensor in expected.values()) ** 0.5


def test_train_batch_updates_as_fluvials_own_update(folders: dict[str, Path], world: World) -> None:
    """verl's own `train_batch` calls it all; weights after the step, the gradient norm and the learning rate agree."""
    made = verl_runs.rollout("sd3", folders["sd3"])
    theirs = verl_runs.build(verl_runs.model_config("sd3", folders["sd3"], **verl_runs.LORA))
    own = own_engine(made, world, lora=True)
    verl_runs.move(theirs.module)
    verl_runs.move(own.module)
    verl_runs.own_update(own, made)
    with theirs.train_mode():
        result = theirs.train_batch(verl_runs.batch("sd3", made), verl_runs.flow_grpo())
        assert theirs.mode == "train"
    assert theirs.mode is None
    assert result["metrics"]["grad_norm"] > 0
    assert theirs.lr_scheduler_step() == 1e-3
    after: Any = dict(own.module.named_parameters())
    for name, parameter in theirs.module.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(gather(parameter), gather(after[name]), rtol=1e-5, atol=1e-6)
    assert all(p.grad is None for p in theirs.module.parameters())


def test_loss_functions_are_called_as_verl_calls_them(folders: dict[str, Path], world: World) -> None:
    """One call per micro-batch and step; losses add up to the mean, smaller parts weigh less; full_determinism holds."""
    made = verl_runs.rollout("sd3", folders["sd3"])
    config = verl_runs.engine_config(full_determinism=True)
    engine = verl_runs.build(verl_runs.model_config("sd3", folders["sd3"]), engine=config)
    losses = []
    whole, parts = [(4, 2)] * 2, [(3, 8 / 3), (1, 8), (2, 4), (2, 4)]
    for size, expected in ((8, whole), (4, whole), (3, parts)):
        calls: list[Any] = []
        data = verl_runs.batch("sd3", made, micro_batch_size_per_gpu=size)
        with engine.train_mode():
            result = engine.forward_backward_batch(data, verl_runs.flow_grpo(calls=calls))
        assert [call[:2] for call in calls] == expected
        assert {call[2:] for call in calls} == {(1, engine.get_data_parallel_group(), True)}
        assert not torch.are_deterministic_algorithms_enabled()
        assert len(result["metrics"]["actor/ratio_mean"]) == len(result["loss"]) == len(calls)
        losses.append(sum(result["loss"]))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_a_loss_may_average_over_a_step(folders: dict[str, Path], world: World) -> None:
    """GRPO-Guard scales ratios by the mean std of what it is given, so a pass over several steps does not mix them."""
    made = verl_runs.rollout("sd3", folders["sd3"])
    engine = verl_runs.build(verl_runs.model_config("sd3", folders["sd3"]))

    def loss(*, model_output: dict[str, Any], data: Any, dp_group: Any) -> tuple[torch.Tensor, dict[str, float]]:
        scale = model_output["std_dev_t"].mean() * model_output["sqrt_dt"].mean()
        gain = (model_output["log_probs"] - data["old_log_probs"]) * data["advantages"]
        return (scale * gain).mean() / data["gradient_accumulation_steps"], {}

    losses = []
    for size in (8, 4, 3):
        with engine.train_mode():
            result = engine.forward_backward_batch(verl_runs.batch("sd3", made, micro_batch_size_per_gpu=size), loss)
        losses.append(sum(result["loss"]))
    assert losses == pytest.approx([losses[1]] * 3, rel=1e-5)


def test_a_forward_pass_may_hold_several_steps(folders: dict[str, Path], world: World) -> None:
    """ceil(B T / micro_batch) passes, where a loop over micro-batches and steps has T ceil(B / micro_batch)."""
    made = verl_runs.rollout("sd3", folders["sd3"])
    engine = verl_runs.build(verl_runs.model_config("sd3", folders["sd3"]))
    counted: list[int] = []
    engine.module.register_forward_hook(lambda module, args, output: counted.append(1))
    for size, passes in ((8, 1), (5, 2), (2, 4)):
        counted.clear()
        with engine.train_mode():
            engine.forward_backward_batch(verl_runs.batch("sd3", made, micro_batch_size_per_gpu=size), verl_runs.flow_grpo())
        assert len(counted) == passes


@pytest.mark.bits
@pytest.mark.parametrize("name", ["sd3", "qwen-image"])
def test_infer_batch_returns_the_log_probs_of_given_trajectories(folders: dict[str, Path], world: World, name: str) -> None:
    """Of the base model these are the rollout's own, and `score` returns the same."""
    made = verl_runs.rollout(name, folders[name], scale=2.5)
    engine = verl_runs.build(verl_runs.model_config(name, folders[name], scale=2.5))
    with engine.eval_mode():
        found = engine.infer_batch(verl_runs.batch(name, made))["model_output"]
    assert engine.mode is None
    with engine.engine.inference() as module:
        scored = score(
            made.trajectory,
            module,
            model=made.model,
            cond=made.cond,
            schedule=made.schedule,
            sampler=made.sampler,
            forwards="two",
        )
    torch.testing.assert_close(found["log_probs"], made.trajectory.log_prob, rtol=0, atol=2e-6)
    torch.testing.assert_close(scored, made.trajectory.log_prob, rtol=0, atol=2e-6)
    shape = verl_runs.batch(name, made)["all_latents"].shape
    assert found["prev_sample_mean"].shape == (4, verl_runs.RECORDED, *shape[2:])
    assert found["std_dev_t"].shape == (4, verl_runs.RECORDED, *[1] * len(shape[2:]))
    levels = made.schedule.levels
    sqrt_dt = torch.sqrt(levels[:2] - levels[1:3])
    torch.testing.assert_close(found["sqrt_dt"], sqrt_dt.expand(4, 2))
    std = made.sampler(levels[:2], levels[1:3]).std
    torch.testing.assert_close(found["std_dev_t"].flatten(2)[..., 0] * sqrt_dt, std.expand(4, 2))
