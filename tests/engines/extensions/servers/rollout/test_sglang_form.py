"""Replies in sglang's form, read by its own classes, replayed by its own controller and by the networks of diffusers.

A trainer reads them as miles_diffusion does (github.com/radixark/miles_diffusion at 019b606c). Each field of `denoising_env`
is a tensor or a list of tensors, joined and given a batch dimension (miles/utils/diffusion_rollout_response.py, lines 45 to
85, and configs/sd3.py in miles/backends/fsdp_utils, lines 34 to 50). Qwen-Image's mask is derived from `txt_seq_lens`, of
which there must be one (configs/qwen_image.py, lines 94 to 170).
"""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch
from helpers import asgi, real_sglang, tiny_pipelines
from helpers import rollout_servers as servers
from torch import Tensor, nn

from fluvial.engines.extensions.servers.rollout.policy import ServedPolicy, open_policy
from fluvial.engines.run.jobs.settings import PipelineConfig
from fluvial.engines.sampling.generate import Guidance

pytestmark = pytest.mark.long  # it installs a wheel

STEPS, SCALE, NOISE = 3, 3.0, 0.5
NEAR: Any = {"rtol": 1e-4, "atol": 5e-5}
# Guidance adds up the errors of SCALE times one prediction and SCALE - 1 times the other.
GUIDED: Any = {"rtol": 1e-4, "atol": (2 * SCALE - 1) * 5e-5}


def joined(value: Any) -> Tensor:
    return torch.cat([*value]).unsqueeze(0) if isinstance(value, list) else value.unsqueeze(0)


def sd3(module: nn.Module, x: Tensor, t: Tensor, env: dict[str, Any], guidance: Any) -> Tensor:
    texts = {name: joined(env[name]) for name in ("encoder_hidden_states", "pooled_projections")}
    return module(hidden_states=x, timestep=t, return_dict=False, **texts)[0]


def wan(module: nn.Module, x: Tensor, t: Tensor, env: dict[str, Any], guidance: Any) -> Tensor:
    tokens = joined(env["encoder_hidden_states"])
    return module(hidden_states=x, timestep=t, encoder_hidden_states=tokens, return_dict=False)[0]


def qwen(module: nn.Module, x: Tensor, t: Tensor, env: dict[str, Any], guidance: Any) -> Tensor:
    (length,), tokens = env["txt_seq_lens"], joined(env["encoder_hidden_states"])
    assert tokens.shape[1] == length
    mask, shapes = torch.arange(length)[None] < length, [[tuple(shape) for shape in each] for each in env["img_shapes"]]
    texts = {"encoder_hidden_states": tokens, "encoder_hidden_states_mask": mask}
    return module(hidden_states=x, timestep=t / 1000, img_shapes=shapes, return_dict=False, **texts)[0]


def flux(module: nn.Module, x: Tensor, t: Tensor, env: dict[str, Any], guidance: Any) -> Tensor:
    """Return v; the guidance of sglang is 1000 times that of diffusers, and positions are those of 16 x 24 pixels."""
    tokens = joined(env["encoder_hidden_states"])
    places = torch.cartesian_prod(torch.arange(4), torch.arange(6))
    scale = guidance[None] / 1000 if module.config["guidance_embeds"] else None  # type: ignore[index]
    texts = {"encoder_hidden_states": tokens, "pooled_projections": joined(env["pooled_projections"])}
    ids = {"img_ids": nn.functional.pad(places, (1, 0)), "txt_ids": torch.zeros(tokens.shape[1], 3)}
    return module(hidden_states=x, timestep=t / 1000, guidance=scale, return_dict=False, **texts, **ids)[0]


def z_image(module: nn.Module, x: Tensor, t: Tensor, env: dict[str, Any], guidance: Any) -> Tensor:
    """Return v; the tokens are filled up to a multiple of 32, and diffusers' network does that itself."""
    (tokens,) = env["encoder_hidden_states"]
    length = int(env["caption_valid_lens"])
    assert len(tokens) % 32 == 0
    assert torch.equal(tokens[length:], tokens[length - 1].expand_as(tokens[length:]))
    return -torch.stack(module([*x], (1000 - t) / 1000, [tokens[:length]], return_dict=False)[0])


REPLAYS = {"sd3": sd3, "flux": flux, "flux-schnell": flux, "qwen-image": qwen, "z-image": z_image, "wan": wan}
VIDEOS = {"qwen-image", "wan"}  # whose VAE is one of videos


def policy(name: str, folder: Path) -> ServedPolicy:
    row = tiny_pipelines.ROWS[name]
    height, width, *rest = row.sizes[1]
    config = PipelineConfig(height=height, width=width, frames=rest[0] if rest else 1, text_tokens=tiny_pipelines.TEXT)
    path = str(tiny_pipelines.save(row, folder / name))
    return open_policy(path, weights=None, steps=STEPS, guidance=Guidance(SCALE, "dull"), pipeline=config)


def samples(of: ServedPolicy, **fields: Any) -> list[Any]:
    """Return the response to sglang's own request, read by its own classes, tensors by its own function."""
    structs = real_sglang.part("entrypoints.post_training.io_struct")
    read = real_sglang.part("entrypoints.post_training.utils")._maybe_deserialize
    asked = structs.RolloutRequest(
        rollout_noise_level=NOISE, rollout_return_dit_trajectory=True, rollout_return_denoising_env=True, **fields
    )
    answer = asyncio.run(asgi.call(servers.served(of, micro_batch=2).app, "/rollout/generate", asked.model_dump()))
    assert answer.status == 200, answer.value
    found = [structs.RolloutResponse(**each) for each in msgpack.unpackb(answer.value)]
    return [SimpleNamespace(**{name: read(value) for name, value in each.model_dump().items()}) for each in found]


@pytest.mark.parametrize("name", REPLAYS)
@torch.no_grad()
def test_a_trainer_of_sglang_replays_our_samples(name: str, tmp_path: Path) -> None:
    """Its controller takes the same steps with the same log-probs; the network predicts the same from `denoising_env`."""
    of, kept = policy(name, tmp_path), [1, 2, 3]
    asked = {"prompt": tiny_pipelines.ROWS[name].prompts[0], "seed": 5, "num_outputs_per_prompt": 2}
    pairs = zip(samples(of, **asked), samples(of, **asked, rollout_return_step_indices=kept), strict=True)
    for whole, part in pairs:
        trajectory, env, debug = whole.dit_trajectory, whole.denoising_env, whole.rollout_debug_tensors
        latents = trajectory["latents"]
        _check_steps(latents, trajectory["sigmas"], debug, whole.rollout_log_probs, kept, part.dit_trajectory)
        for step in range(STEPS):
            x, t = latents[step][None], trajectory["timesteps"][step][None]
            v = REPLAYS[name](of.weights.module, x, t, env["pos_cond_kwargs"], env["guidance"])
            rest = REPLAYS[name](of.weights.module, x, t, env["neg_cond_kwargs"], env["guidance"])
            guided = rest + SCALE * (v - rest)
            if name == "qwen-image":  # sglang 0.5.23, configs/pipeline_configs/qwen_image.py, postprocess_cfg_noise
                guided = guided * (v.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))
            torch.testing.assert_close(guided[0], debug["rollout_model_outputs"][step], **GUIDED)
    assert whole.generated_output.ndim == (4 if name in VIDEOS else 3)
    assert env["image_kwargs"] is None
    assert (env["guidance"] is None) == (not name.startswith("flux"))


def _check_steps(
    latents: Tensor, sigmas: Tensor, debug: dict[str, Tensor], log_probs: Tensor, kept: list[int], part: dict[str, Tensor]
) -> None:
    """Take the steps of a sample again with sglang's controller, and compare all that it notes."""
    module = real_sglang.part("post_training.flow_rollout_controller")
    shape = (1, *latents.shape[1:])
    alone = {"shard_for_sp": lambda batch, tensor: tensor, "gather_for_sp": lambda batch, tensor: tensor}
    asked = {"sde_type": "sde", "noise_level": NOISE, "log_prob_no_const": False, "sde_step_indices": None}
    returned = {"debug_mode": True, "return_dit_trajectory": True, "return_step_indices": kept}
    controller = module.FlowRolloutController(
        **asked, **returned, **alone, generator=None, sigmas=sigmas, latents_shape=shape
    )
    for step in range(STEPS):
        noise = debug["rollout_variance_noises"][step][None]
        controller.noise_buffer, controller._rollout_variance_noise = noise, lambda batch, output, noise=noise: noise
        given = {"model_output": debug["rollout_model_outputs"][step][None], "sample": latents[step][None]}
        sigma, after = sigmas[step], sigmas[step + 1]
        levels = {"current_sigma": sigma, "next_sigma": after, "dt": after - sigma, "timestep": 1000 * sigma}
        after = controller.transition(batch=None, generator=None, step_index=step, **given, **levels)
        torch.testing.assert_close(after[0], latents[step + 1], **NEAR)
    controller.record_trajectory_step(latents=latents[-1:], timestep_value=sigmas.new_zeros(()), step_index=STEPS)
    torch.testing.assert_close(controller.collect_rollout_log_probs()[0], log_probs, **NEAR)
    theirs = controller.collect_rollout_debug_tensors(None)
    for name, tensor in debug.items():
        torch.testing.assert_close(getattr(theirs, name)[0], tensor, **NEAR)  # [T, 1] for the standard deviations
    torch.testing.assert_close(torch.stack(controller.step_timesteps), part["timesteps"], rtol=0, atol=1e-3)
    assert torch.equal(torch.cat(controller.step_latents), part["latents"])


def test_an_evaluation_has_sglangs_images(tmp_path: Path) -> None:
    """Without a trajectory; a request with fields of fluvial's own is answered in fluvial's form."""
    of = policy("qwen-image", tmp_path)
    (sample,) = samples(of, prompt="a", rollout=False)
    assert sample.generated_output.shape == (3, 1, 16, 24)
    assert sample.dit_trajectory is None
    assert sample.denoising_env is None
    (ours,) = samples(of, prompt="a", extra_sampling_params={"fluvial": {}})
    assert ours.generated_output.shape == (3, 16, 24)
    assert ours.dit_trajectory["latents"].shape == (STEPS + 1, *of.shape)
    assert len(ours.dit_trajectory["timesteps"]) == STEPS
    assert set(ours.denoising_env["pos_cond_kwargs"]) == {"tokens", "mask"}
