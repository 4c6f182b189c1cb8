"""The fields of verl-omni's batches: other layouts of the same rollout, clean samples with noise, and what is wrong."""

import re
from typing import Any

import pytest
import torch
from helpers import real_verl, verl_runs
from torch import Tensor

from fluvial.engines.errors import UsageError
from fluvial.engines.gathered import gather

TWO = {**verl_runs.LORA, "policy_state_adapters": ("default", "old")}


def log_probs(engine: Any, data: Any) -> Tensor:
    return verl_runs.infer(engine, data)["log_probs"]


def without(data: Any, *names: str, **more: Tensor) -> Any:
    data = data.exclude(*names)
    data.update(more)
    return data


def test_other_layouts_of_a_batch_give_the_same_log_probs() -> None:
    """Jagged embeddings, no mask, steps that are not contiguous, the size of the images in the batch."""
    made = verl_runs.rollout("qwen-image")
    engine = verl_runs.build("qwen-image")
    data = verl_runs.batch(made)
    expected = log_probs(engine, data)
    latents = data["all_latents"]
    apart = without(data, "all_latents", all_latents=latents[:, :-1].clone(), all_next_latents=latents[:, 1:].clone())
    assert torch.equal(log_probs(engine, apart), expected)
    mask, tokens = data["prompt_embeds_mask"].bool(), data["prompt_embeds"]
    rows = torch.nested.as_nested_tensor([row[own] for row, own in zip(tokens, mask, strict=True)], layout=torch.jagged)
    ones = torch.nested.as_nested_tensor([own[own] for own in mask], layout=torch.jagged)
    jagged = without(data, "prompt_embeds", "prompt_embeds_mask", prompt_embeds=rows, prompt_embeds_mask=ones)
    torch.testing.assert_close(log_probs(engine, jagged), expected, rtol=0, atol=2e-6)
    unmasked = without(data, "prompt_embeds", "prompt_embeds_mask", prompt_embeds=rows)
    torch.testing.assert_close(log_probs(engine, unmasked), expected, rtol=0, atol=2e-6)
    sized = verl_runs.batch(made, height=16, width=16)
    engine.settings.__dict__["size"] = (32, 32, 1)  # that of the batch counts
    assert torch.equal(log_probs(engine, sized), expected)


@pytest.mark.parametrize("name", ["sd3", "qwen-image"])
def test_mini_batches_of_verl_have_the_log_probs_of_their_samples(name: str) -> None:
    """verl's own iterator of `train_mini_batch` makes jagged rows without a cached maximum; padding follows the longest."""
    utils = real_verl.part("verl.utils.tensordict_utils")
    made = verl_runs.rollout(name)
    engine = verl_runs.build(name)
    data = verl_runs.batch(made)
    expected, tokens = log_probs(engine, data), data["prompt_embeds"]
    masked = name == "qwen-image"  # SD3 attends to padding, so its rows are as long as in the rollout
    mask = data["prompt_embeds_mask"].bool() if masked else torch.ones(tokens.shape[:2], dtype=torch.bool)
    rows = torch.nested.as_nested_tensor([row[own] for row, own in zip(tokens, mask, strict=True)], layout=torch.jagged)
    jagged = without(data, "prompt_embeds", "prompt_embeds_mask", prompt_embeds=rows)
    halves = utils.make_iterator(jagged, mini_batch_size=2, epochs=1)
    found = torch.cat([log_probs(engine, half) for half in halves])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("kind", "form"), [("cps", "unscaled"), ("dance_sde", "density")])
def test_samplers_have_verl_omnis_log_probs(kind: str, form: str) -> None:
    """cps scores without constants, and the std of both is that of the step."""
    made = verl_runs.rollout("sd3")
    engine = verl_runs.build("sd3", sde_type=kind)
    found = verl_runs.infer(engine, verl_runs.batch(made))
    x_next, mean, std = made.trajectory.x_next, found["prev_sample_mean"], found["std_dev_t"]
    squared = (x_next - mean).square()
    expected = (
        -squared if form == "unscaled" else -squared / (2 * std**2) - std.log() - 0.5 * torch.log(torch.tensor(2 * torch.pi))
    )
    torch.testing.assert_close(found["log_probs"], expected.flatten(2).mean(-1), rtol=1e-5, atol=1e-6)
    levels = made.schedule.levels
    step = levels[1:3] * torch.sin(torch.tensor(verl_runs.ETA * torch.pi / 2))
    step = step if kind == "cps" else verl_runs.ETA * torch.sqrt(levels[:2] - levels[1:3])
    torch.testing.assert_close(std.flatten(2)[0, :, 0], step)


def test_nft_draws_noise_where_there_is_none_and_wants_the_old_adapter() -> None:
    """With noise of the batch, see `test_steps.py`; gradients are cleared at the end of `train_mode`."""
    made = verl_runs.rollout("sd3")
    engine = verl_runs.build("sd3", **TWO, kind="diffusion_nft_model")
    timesteps = torch.tensor([[900.0, 300.0]]).repeat(4, 1)
    data = verl_runs.batch(
        made, latents_clean=made.trajectory.final, train_timesteps=timesteps, reward_prob=torch.ones(4, 2)
    )

    def loss(*, model_output: dict[str, Tensor], data: Any, dp_group: Any) -> tuple[Tensor, dict[str, float]]:
        return model_output["forward_prediction"].square().mean() / data["gradient_accumulation_steps"], {}

    with engine.train_mode():
        found = engine.forward_backward_batch(data, loss)["model_output"]
        assert max(float(gather(p.grad).abs().max()) for p in engine.module.parameters() if p.grad is not None) > 0
    assert all(p.grad is None for p in engine.module.parameters())
    level = found["t_expanded"]
    noise = (found["xt"] - (1 - level) * found["x0"]) / level
    assert torch.allclose(noise.flatten(2).std(-1), torch.ones(4, 2), atol=0.3)
    assert not torch.allclose(noise[:, 0], noise[:, 1], atol=0.1)
    with pytest.raises(UsageError, match="diffusion_nft_model compares with the adapter old: set model"):
        verl_runs.build("sd3", **verl_runs.LORA, kind="diffusion_nft_model")


def test_preferences_share_noise_and_stay_together() -> None:
    """Diffusion-DPO: pairs of neighbours, their rewards and groups; noise and timesteps are drawn where there are none."""
    made = verl_runs.rollout("sd3")
    engine = verl_runs.build("sd3", **verl_runs.LORA, kind="diffusion_dpo_model")
    verl_runs.move(engine.module)
    clean, rewards = made.trajectory.final, torch.tensor([1.0, 0.0, 3.0, 2.0])
    data = verl_runs.batch(made, latents_clean=clean, sample_level_rewards=rewards, micro_batch_size_per_gpu=2)
    drawn = engine.infer_batch(data)["model_output"]
    assert drawn["noise_pred"].shape == (4, 1, *clean.shape[1:])
    assert torch.equal(drawn["noise"][0::2], drawn["noise"][1::2])
    assert torch.equal(drawn["timesteps"][0::2], drawn["timesteps"][1::2])
    assert len(drawn["timesteps"].unique()) == 2
    with engine.disable_adapter():
        data["noise"], data["timesteps"] = drawn["noise"][:, 0], drawn["timesteps"][:, 0]
        data["ref_noise_pred"] = engine.infer_batch(data)["model_output"]["noise_pred"]
    from tensordict.tensorclass import NonTensorData, NonTensorStack

    data["uid"] = NonTensorStack.from_list([NonTensorData(uid) for uid in ("a", "a", "b", "b")])
    calls: list[Any] = []

    def loss(*, model_output: dict[str, Tensor], data: Any, dp_group: Any) -> tuple[Tensor, dict[str, float]]:
        target = model_output["noise"] - model_output["latent"]
        errors = [(data[key] - target).square().flatten(1).mean(1) for key in ("ref_noise_pred",)]
        own = (model_output["noise_pred"] - target).square().flatten(1).mean(1) - errors[0]
        calls.append((data["uid"], data["sample_level_rewards"].tolist(), data["gradient_accumulation_steps"]))
        margin = own[0::2] - own[1::2]
        return -torch.nn.functional.logsigmoid(-margin).mean() / data["gradient_accumulation_steps"], {"margin": 0.0}

    with engine.train_mode():
        result = engine.train_batch(data, loss)
    assert calls == [(["a", "a"], [1.0, 0.0], 2), (["b", "b"], [3.0, 2.0], 2)]
    assert result["metrics"]["grad_norm"] > 0
    data["micro_batch_size_per_gpu"] = NonTensorData(3)
    with pytest.raises(UsageError, match="micro_batch_size_per_gpu is 3, expected a multiple of 2"):
        engine.infer_batch(data)
    with pytest.raises(UsageError, match="the batch has 3 samples, expected pairs"):
        engine.infer_batch(data[:3])
    with pytest.raises(UsageError, match="the batch has noise and no timesteps, expected both or neither"):
        engine.infer_batch(without(data, "timesteps"))
    data["timesteps"][1] += 1
    with pytest.raises(UsageError, match="timesteps differs between the two samples of a pair"):
        engine.infer_batch(data)
    data["noise"][1] += 1
    with pytest.raises(UsageError, match="noise differs between the two samples of a pair"):
        engine.infer_batch(data)


# The field that is left out or replaced, what replaces it, and the message.
WRONG: tuple[tuple[str, Tensor | None, str], ...] = (
    ("all_timesteps", None, "the batch has no tensor all_timesteps: it holds advantages, all_latents"),
    ("prompt_embeds", None, "the batch has no tensor prompt_embeds: it holds"),
    ("pooled_prompt_embeds", None, "the batch has no tensor pooled_prompt_embeds"),
    ("negative_prompt_embeds", None, "the batch has no tensor negative_prompt_embeds"),
    ("old_log_probs", None, "the batch has no tensor old_log_probs"),
    ("all_latents", torch.zeros(4, 2, 4, 8, 8), "all_latents has shape [4, 2, 4, 8, 8], expected [4, 3, 4, 8, 8"),
    ("all_latents", torch.zeros(4, 3, 4, 9, 8), "all_latents has shape [4, 3, 4, 9, 8], expected [4, 3, 4, 8, 8"),
    ("all_latents", torch.zeros(4, 3, 4, 8, 8, 2), "all_latents has shape [4, 3, 4, 8, 8, 2], expected [4, 3, 4, 8, 8]"),
    ("advantages", torch.zeros(4), "advantages has shape [4], expected [4, 2, ...]: one value per sample and step"),
    ("advantages", torch.full((4, 2), torch.nan), "advantages holds a number that is not finite"),
    ("advantages", torch.full((4, 2), torch.inf), "advantages holds a number that is not finite"),
    ("old_log_probs", torch.zeros(4, 3), "old_log_probs has shape [4, 3], expected [4, 2, ...]"),
    ("old_log_probs", torch.zeros(4, 2, 3), "old_log_probs has shape [4, 2, 3], expected [4, 2]"),
    ("all_timesteps", torch.tensor([[999.0, 500.0]] * 4), "is not one of the 3 timesteps of the schedule"),
)


@pytest.fixture(scope="module")
def guided() -> verl_runs.Made:
    return verl_runs.rollout("sd3", scale=2.0)


def test_wrong_batches_are_one_line(guided: verl_runs.Made) -> None:
    """Missing fields, wrong shapes, timesteps of another schedule, NaN; each line names the field."""
    engine = verl_runs.build("sd3", scale=2.0)
    for name, value, message in WRONG:
        data = without(verl_runs.batch(guided), name, **({} if value is None else {name: value}))
        with pytest.raises(UsageError, match=re.escape(message)) as error, engine.train_mode():
            engine.train_batch(data, verl_runs.flow_grpo())
        assert "\n" not in str(error.value)


def test_wrong_loss_functions_and_micro_batches_are_one_line(guided: verl_runs.Made) -> None:
    """What a loss function returns is checked, and a batch may lack the micro-batch only if the config has it."""
    engine = verl_runs.build("sd3", scale=2.0, engine={"micro_batch_size_per_gpu": None})
    data = verl_runs.batch(guided)

    def returns(value: Any) -> Any:
        return lambda *, model_output, data, dp_group: value

    size, grpo = "micro_batch_size_per_gpu", verl_runs.flow_grpo()
    for message, given, loss in (
        ("the loss function returned a Tensor, expected a loss and its metrics", data, returns(torch.zeros(()))),
        ("returned a loss of [4], expected a tensor with one number", data, returns((torch.zeros(4), {}))),
        ("the loss function returned a loss of float", data, returns((1.0, {}))),
        ("loss_function is None", data, None),
        (f"{size} is 0, expected at least 1", verl_runs.batch(guided, micro_batch_size_per_gpu=0), grpo),
        (f"{size} is not set", data.exclude(size), grpo),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            engine.forward_backward_batch(given, loss)
    rows = [torch.zeros(length, 16) for length in (3, 4, 5, 6)]
    jagged = without(data, "prompt_embeds", prompt_embeds=torch.nested.as_nested_tensor(rows, layout=torch.jagged))
    with pytest.raises(UsageError, match="prompt_embeds has rows of 3 to 6 tokens, and the model attends to padding"):
        engine.infer_batch(jagged)
