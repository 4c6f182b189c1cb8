"""Models that `fluvial serve` opens: built-in ones, pipelines of diffusers, a user-defined one, the export of a run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import rollout_servers as servers
from helpers import tiny_pipelines

from fluvial.core.random import key
from fluvial.engines.data.records import Prompt
from fluvial.engines.errors import UsageError
from fluvial.engines.extensions.remote.push_folder import PushFolder
from fluvial.engines.extensions.servers.rollout.policy import ServedPolicy, open_policy
from fluvial.engines.extensions.wire.tensors import unpack_tree
from fluvial.engines.run.jobs.settings import PipelineConfig
from fluvial.engines.sampling.generate import NO_GUIDANCE, Guidance, Requests, Sampling, StochasticSteps, generate
from fluvial.engines.sampling.samplers import SAMPLERS
from fluvial.models.handwriting import BASE

STEPS = 3


def policy(name: str, **options: Any) -> ServedPolicy:
    settings = {"weights": None, "steps": STEPS, "guidance": NO_GUIDANCE, "pipeline": PipelineConfig(), **options}
    return open_policy(name, **settings)


@pytest.mark.parametrize(("name", "tokens"), [("sd3", None), ("qwen-image", 32), ("wan", None)])
def test_a_pipeline_is_served(name: str, tokens: int | None, tmp_path: Path) -> None:
    """With guidance, a size, padded prompts and videos; samples are those of generate, in whatever batch."""
    row = tiny_pipelines.ROWS[name]
    height, width, *rest = row.sizes[1]
    frames = rest[0] if rest else 1
    config = PipelineConfig(height=row.sizes[0][0], width=row.sizes[0][1], frames=frames, text_tokens=tiny_pipelines.TEXT)
    of = policy(str(tiny_pipelines.save(row, tmp_path / name)), guidance=Guidance(3.0, "dull"), pipeline=config)
    # The bits of a product depend on where its operands lie, and in a file weights lie anywhere.
    assert all(parameter.data_ptr() % 64 == 0 for parameter in of.weights.module.parameters())
    server = servers.served(of, micro_batch=2)
    own = {"key": [7, 0], "ids": [5, 6, 8], "text_tokens": tokens}
    asked = {"prompt": row.prompts[0], "num_outputs_per_prompt": 3, "width": width, "height": height, "num_frames": frames}
    asked |= {"rollout_sde_step_indices": [0, 1], "rollout_noise_level": 0.5, "rollout_video_dtype": "uint8"}
    returned = dict.fromkeys(("rollout_return_dit_trajectory", "rollout_return_denoising_env"), True)
    found = server.samples(**asked, **returned, extra_sampling_params={"fluvial": own})
    shape = of.model.latent_shape(height, width, frames)
    schedule = of.schedule(STEPS, shape)
    stochastic = StochasticSteps(SAMPLERS["flow_sde"].bind(0.5, schedule.levels), (0, 1))
    sampling = Sampling(shape, schedule, Guidance(3.0, "dull"), text_tokens=tokens, stochastic=stochastic)
    requests = Requests([Prompt(row.prompts[0])] * 4, [5, 6, 8, 8], key(7))
    chunks = list(generate(of.model, of.weights.module, requests, sampling, micro_batch=2))
    images = torch.cat([chunk.images for chunk in chunks]).float()
    for number, sample in enumerate(found):
        trajectory = chunks[number // 2].trajectory
        assert torch.equal(servers.trajectory(sample).latents[-1], trajectory.final[number % 2])
        assert torch.equal(servers.log_probs(sample)[:2], trajectory.log_prob[number % 2])
        expected = (images[number] * 255).round().to(torch.uint8) if images[number].ndim == 4 else images[number]
        assert torch.equal(sample.generated_output, expected)
        assert isinstance(sample.denoising_env, bytes)
        env = unpack_tree(sample.denoising_env)
        assert env["guidance"] == 3.0
        assert all(tensor.shape[0] == 1 for tensor in env["pos_cond_kwargs"].values())
    status, problem = server.problem(prompt="a", width=3, height=5)
    assert (status, "3" in problem) == (400, True)
    if tokens is None:  # it keeps its padding
        status, problem = server.problem(prompt="a", extra_sampling_params={"fluvial": {"text_tokens": 8}})
        assert (status, problem[:16]) == (400, "text_tokens is 8")


@pytest.mark.parametrize(("name", "sampler"), [("handwriting", "flow_sde"), ("handwriting-unet", "ddim")])
def test_a_built_in_model_is_served(name: str, sampler: str) -> None:
    """Trained weights are open to gradients, as in a run that trains all of them."""
    of = policy(name)
    (sample,) = servers.served(of, micro_batch=1).samples(
        prompt="0427", seed=1, extra_sampling_params={"fluvial": {"sampler": sampler}}
    )
    assert sample.generated_output.shape == (1, 8, 32)
    assert all(parameter.requires_grad for parameter in of.weights.module.parameters())
    assert not of.weights.module.training


def test_the_export_of_a_run_is_served(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "config.json").write_text(json.dumps({"model": "handwriting"}))
    with pytest.raises(UsageError, match="without exported weights"):
        policy(str(tmp_path))
    (tmp_path / "weights").symlink_to(BASE)
    with pytest.raises(UsageError, match="is a run with its own weights: remove it"):
        policy(str(tmp_path), weights=BASE)
    base, run = policy("handwriting").weights, policy(str(tmp_path)).weights
    assert base.list_checksums() == run.list_checksums()


def test_a_network_in_bfloat16_keeps_its_buffers(tmp_path: Path) -> None:
    row = tiny_pipelines.ROWS["sd3"]
    folder = str(tiny_pipelines.save(row, tmp_path / "sd3"))
    of = policy(folder, pipeline=PipelineConfig(height=16, width=16), dtype="bfloat16")
    assert {parameter.dtype for parameter in of.weights.module.parameters()} == {torch.bfloat16}
    assert torch.bfloat16 not in {buffer.dtype for buffer in of.weights.module.buffers()}
    (sample,) = servers.served(of, micro_batch=2).samples(prompt="a", seed=1)
    assert servers.log_probs(sample).isfinite().all()


def test_what_a_dead_trainer_left_is_removed(tmp_path: Path) -> None:
    dead, alive = (PushFolder(tmp_path / name) for name in ("dead", "alive"))
    os.close(dead._lock)  # as the system does
    (dead.path / "bucket-0").write_bytes(b"half")
    policy("handwriting", roots=[tmp_path / "dead", tmp_path / "alive"])
    assert [dead.path.exists(), alive.path.exists()] == [False, True]
    alive.close()
