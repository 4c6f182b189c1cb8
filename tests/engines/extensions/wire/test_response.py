"""Responses keep their numbers to the bit, and one that breaks the schema is one line."""

import base64
import json
from dataclasses import fields, replace
from typing import Any

import msgpack
import optree
import pytest
import torch
from torch import Tensor

from fluvial.engines.extensions.wire.decode import WireError
from fluvial.engines.extensions.wire.response import JSON, DitTrajectory, RolloutSample, read_response, write_response
from fluvial.engines.extensions.wire.tensors import pack, unpack_tree

STEPS = 4


def envelope(tensor: Tensor) -> Any:
    return msgpack.unpackb(pack(tensor))


SAMPLE = RolloutSample(
    request_id="r1",
    prompt="a fox",
    seed=7,
    generated_output=torch.rand(3, 4, 6),
    rollout_log_probs=torch.tensor([-1.5, 0.0, -2.0, 0.0]),
    rollout_debug_tensors={"rollout_model_outputs": torch.randn(STEPS, 2, 3)},
    denoising_env={"pos_cond_kwargs": {"encoder_hidden_states": [torch.randn(5, 2)], "n": 3}, "guidance": None},
    dit_trajectory=DitTrajectory(
        torch.randn(3, 2, 3).to(torch.bfloat16), torch.rand(STEPS) * 1000, torch.linspace(1, 0, STEPS + 1), (0, 1, 4)
    ),
    inference_time_s=0.5,
    peak_memory_mb=None,
    weight_version=3,
)


def leaves(sample: RolloutSample) -> list[Any]:
    values = [getattr(sample, field.name) for field in fields(sample)]
    values = [unpack_tree(value) if isinstance(value, bytes) else value for value in values]
    trajectory = sample.dit_trajectory
    parts = [] if trajectory is None else [getattr(trajectory, field.name) for field in fields(trajectory)]
    return optree.tree_leaves([part for part in values if part is not trajectory] + parts, none_is_leaf=True)


def same(a: RolloutSample, b: RolloutSample) -> bool:
    pairs = list(zip(leaves(a), leaves(b), strict=True))
    return all(torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, Tensor) else x == y for x, y in pairs)


def test_samples_are_read_as_they_were_written() -> None:
    """An independent decoder sees plain msgpack with the fields of the schema; the weight version is fluvial's own."""
    least = RolloutSample("r2", "", None, torch.zeros(3, 2, 2, dtype=torch.uint8))
    data = write_response([SAMPLE, least])
    samples = read_response(data)
    assert same(samples[0], SAMPLE)
    assert same(samples[1], least)
    assert not same(samples[0], replace(SAMPLE, seed=8))
    assert read_response(write_response([])) == []
    found = msgpack.unpackb(data)[0]
    assert set(found) == {field.name for field in fields(RolloutSample)}
    assert {"generated_output", "rollout_log_probs", "rollout_debug_tensors", "denoising_env", "seed"} < set(found)
    assert found["generated_output"]["dtype"] == "torch.float32"
    assert set(found["dit_trajectory"]) == {"latents", "timesteps", "sigmas", "latent_step_indices"}
    assert found["dit_trajectory"]["latents"]["shape"] == [3, 2, 3]


def plain(**changes: Any) -> dict[str, Any]:
    """Return the map of a sample as a server without fluvial's own field sends it."""
    sigmas = envelope(torch.linspace(1, 0, STEPS + 1))
    trajectory = {"latents": envelope(torch.ones(STEPS + 1, 2)), "timesteps": None, "sigmas": sigmas}
    outputs = {"generated_output": envelope(torch.zeros(3, 2, 2)), "rollout_log_probs": envelope(torch.zeros(STEPS))}
    return {"request_id": "r", "prompt": "a", "seed": 1, **outputs, "dit_trajectory": trajectory, **changes}


def trajectory(**changes: Any) -> dict[str, Any]:
    return plain(dit_trajectory={**plain()["dit_trajectory"], **changes})


def read(*maps: Any) -> list[RolloutSample]:
    return read_response(msgpack.packb(list(maps)))


def test_older_servers_are_understood() -> None:
    """JSON with base64, no weight version, indices as a list or not at all, timesteps with the terminal one."""
    assert read(plain())[0].weight_version is None

    def text(value: Any) -> str:
        return base64.b64encode(value).decode()

    (found,) = read_response(json.dumps([plain()], default=text).encode(), media_type=f"{JSON}; charset=utf-8")
    assert same(found, read(plain())[0])
    (sample,) = read(trajectory(latents=envelope(torch.ones(2, 2)), latent_step_indices=[1, 2]))
    assert sample.dit_trajectory is not None
    assert sample.dit_trajectory.latent_step_indices == (1, 2)
    read(trajectory(timesteps=envelope(torch.zeros(STEPS + 1))))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([], r"response\[0\]: Expected `object`, got `array`"),
        (plain(generated_output=None), r"response\[0\].generated_output: Expected `object`, got"),
        (plain(generated_output=envelope(torch.zeros(2, 2))), r"generated_output is .*32 \[2, 2\], expected an image"),
        (plain(generated_output=envelope(torch.zeros(3, 2, 2).long())), "expected an image"),
        (plain(rollout_log_probs=envelope(torch.zeros(1, STEPS))), "rollout_log_probs is .* expected floating"),
        (plain(rollout_log_probs=envelope(torch.zeros(STEPS).int())), "expected floating-point numbers"),
        (
            plain(rollout_log_probs=envelope(torch.zeros(STEPS + 1))),
            "5 log-probabilities and 5 sigmas, expected one sigma more",
        ),
        (plain(inference_time_s=float("nan")), "inference_time_s: Expected `float` >= 0.0"),
        (trajectory(latents=None), "dit_trajectory.latents: Expected `object`, got"),
        (trajectory(latents=envelope(torch.zeros(5))), r"latents is .*32 \[5\], expected floating-point numbers"),
        (trajectory(sigmas=envelope(torch.zeros(5, 1))), r"sigmas is .*32 \[5, 1\], expected floating-point"),
        (trajectory(timesteps=envelope(torch.zeros(5, 1))), r"timesteps is .*, expected numbers \[T\]"),
        (trajectory(latents=envelope(torch.zeros(6, 2))), "6 latents, expected at most 5"),
        (trajectory(latent_step_indices=[0, 1]), "5 latents and 2 latent_step_indices"),
        (trajectory(latent_step_indices=[0, 1, 2, 3, 5]), "latent_step_indices do not rise within 0 to 4"),
        (trajectory(latent_step_indices=[0, 1, 2, 4, 3]), "latent_step_indices do not rise within 0 to 4"),
        (trajectory(latent_step_indices=envelope(torch.zeros(5))), "expected integers"),
        (plain(rollout_debug_tensors={"x": 1}), r"rollout_debug_tensors\[...\]: Expected `object [|] null`, got `int`"),
    ],
)
def test_a_wrong_response_is_one_line(value: Any, says: str) -> None:
    with pytest.raises(WireError, match=says) as error:
        read(value)
    assert "\n" not in str(error.value)


def test_a_response_is_a_list_of_few_enough_samples() -> None:
    many = write_response([RolloutSample("r", "", None, torch.zeros(3, 1, 1))] * 4097)
    wrong: list[tuple[bytes, dict[str, Any], str]] = [
        (msgpack.packb({}), {}, r"^response: Expected `array`, got `object`"),
        (many, {}, r"^response: Expected `array` of length <= 4096"),
        (write_response([SAMPLE]), {"most_bytes": 100}, "expected at most 100"),
        (b"<html>", {"media_type": "text/html"}, "of type 'text/html', expected application/msgpack"),
    ]
    for data, options, says in wrong:
        with pytest.raises(WireError, match=says):
            read_response(data, **options)
