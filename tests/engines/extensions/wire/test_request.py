"""Requests are what sglang's fields and defaults say, and what is wrong with one is one line."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields

from fluvial.engines.extensions.wire.decode import WireError
from fluvial.engines.extensions.wire.request import (
    DEBUG,
    ExtraParams,
    FluvialOptions,
    RequestLimits,
    RolloutRequest,
    check_steps,
    read_request,
    resolve_guidance,
    write_request,
)
from fluvial.engines.sampling.generate import Guidance
from fluvial.engines.sampling.tail import Tail

OWN = {"key": [1, 2], "ids": [5]}


def own(**options: Any) -> dict[str, Any]:
    return {"prompt": "a", "extra_sampling_params": {"fluvial": options}}


def test_the_defaults_are_those_of_sglang() -> None:
    request = read_request({"prompt": "a"})
    assert request == RolloutRequest("a")
    assert (request.rollout, request.rollout_sde_type, request.rollout_noise_level) == (True, "sde", 0.7)
    assert (request.rollout_log_prob_no_const, request.rollout_debug_mode, request.suppress_logs) == (False, True, False)
    assert (request.rollout_return_denoising_env, request.rollout_return_dit_trajectory) == (False, False)
    assert (request.generator_device, request.outputs, request.seed, request.scale) == ("cuda", 1, None, None)
    assert (request.sampler, request.form) == ("flow_sde", "density")
    names = {field.name for field in fields(RolloutRequest)}
    assert read_request({"prompt": "a", **dict.fromkeys(names - {"prompt"})}) == request
    assert read_request({"prompt": "a", "extra_sampling_params": {"fluvial": None, "guidance_scale_2": None}}) == request
    named = read_request({**own(sampler="dance_sde", form="no_const"), "rollout_sde_type": "cps"})  # its own names count
    assert (named.sampler, named.form) == ("dance_sde", "no_const")
    assert read_request({"prompt": "a", "rollout_sde_type": "cps"}).sampler == "cps"
    # What has no log-probability may be sampled.
    assert read_request({"prompt": "a", "rollout_sde_type": "ode", "rollout": False}).sampler == "ode"
    assert read_request({"prompt": "a", "rollout_sde_type": "ode", "rollout_log_prob_no_const": True}).form == "unscaled"
    assert read_request({"prompt": "a", "rollout_noise_level": 0, "rollout": False}).rollout_noise_level == 0
    assert read_request({"prompt": "a", "seed": 7.0, "guidance_scale": 4}) == RolloutRequest("a", seed=7, guidance_scale=4.0)


def test_extra_fields_of_a_request_replace_its_own_as_in_sglang() -> None:
    """Those that a request has; its server keeps the request's own `rollout`, so that another one is refused."""
    extra = {"guidance_scale": 7.0, "num_inference_steps": 8, "rollout": True, "fluvial": {"reduction": "sum"}}
    found = read_request({"prompt": "a", "guidance_scale": 2.0, "extra_sampling_params": extra})
    assert (found.scale, found.num_inference_steps, found.fluvial.reduction) == (7.0, 8, "sum")
    assert read_request({"prompt": "a", "extra_sampling_params": {"guidance_scale": 7.0}}).wants_sglang_form


# Every field at another value than its default, in the order of the fields.
OPTIONS_OF_ALL: tuple[Any, ...] = (
    *((1, 2**32 - 1), (5, 6, 7, 2**62), (0, 0, 1, 1), "dance_sde", "euler", None, True, "no_const", "sum", "two", 64, True),
    *("all", Tail("dpmpp_2m", 0.5, 0), (2, 2), ("rollout_model_outputs",), 3, False, ("image",)),
)
FIELDS_OF_ALL: list[Any] = ["a fox", " ", 7, "cpu", 64, 32, 10, 4, 3.5, 4.0, 5, 16, ("x.png",), True, "cps", 0.5]
FIELDS_OF_ALL += [True, False, True, True, (1, 2, 5), (1, 2, 3, 10), "uint8", True]
FULL = RolloutRequest(*FIELDS_OF_ALL, ExtraParams(FluvialOptions(*OPTIONS_OF_ALL)))  # type: ignore[call-arg]


def test_what_is_written_is_what_is_read() -> None:
    value = json.loads(json.dumps(write_request(FULL)))
    found = read_request(value)
    assert found.fluvial == FULL.fluvial
    assert write_request(found) == write_request(FULL)
    assert {*value, "rollout"} == {field.name for field in fields(FULL)}
    own = {*value["extra_sampling_params"]["fluvial"]}
    assert own | {"windows", "solver"} == {field.name for field in fields(FluvialOptions)}
    assert write_request(RolloutRequest("a")) == {"prompt": "a"}


def test_guidance_is_the_request_s_or_the_server_s() -> None:
    server = Guidance(4.0, "blurry")
    assert resolve_guidance(RolloutRequest("a"), server) == server
    assert resolve_guidance(RolloutRequest("a", " ", guidance_scale=2.0), server) == Guidance(2.0, " ")
    assert resolve_guidance(RolloutRequest("a", guidance_scale=2.0, true_cfg_scale=3.0), server).scale == 3.0
    assert resolve_guidance(read_request(own(forwards="two")), server).forwards == "two"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt": None}, "missing required field `prompt`"),
        ({"prompt": "a" * 101}, "prompt: got 101, expected at most 100"),
        ({"negative_prompt": "a" * 101}, "negative_prompt: got 101, expected at most 100"),
        ({"seed": -1}, "seed: Expected `int` >= 0"),
        ({"seed": 1.5}, "seed: Expected `int [|] null`, got `float`"),
        ({"width": 0}, "width: Expected `int` >= 1"),
        ({"width": 1000, "height": 11}, "got 11000, expected at most 10000"),
        ({"width": 50, "height": 50, "num_frames": 5}, "num_frames: got 12500"),
        ({"num_inference_steps": 51}, "num_inference_steps: got 51, expected at most 50"),
        ({"num_outputs_per_prompt": 9}, "num_outputs_per_prompt: got 9, expected at most 8"),
        ({"guidance_scale": float("nan")}, "guidance_scale: Expected `float` >= 0.0"),
        ({"rollout_noise_level": -0.1}, "rollout_noise_level: Expected `float` >= 0.0"),
        ({"rollout_noise_level": 10**400}, "rollout_noise_level: Number out of range"),
        ({"rollout_noise_level": 0}, "rollout_noise_level is 0, so that steps of flow_sde have no log-probability"),
        ({"rollout_sde_type": "cps", "rollout_noise_level": 1.5}, "is 1.5, expected at most 1 for cps"),
        ({"rollout_sde_type": "dance"}, "rollout_sde_type: Invalid enum value 'dance'"),
        ({"rollout_sde_type": "ode"}, "rollout_sde_type is ode, whose steps have no log-probability"),
        ({"rollout_sde_step_indices": [*range(4097)]}, "rollout_sde_step_indices: Expected `array` of length <= 4096"),
        ({"rollout_sde_step_indices": [-1]}, r"rollout_sde_step_indices\[0\]: Expected `int` >= 0"),
        ({"rollout_sde_step_indices": [1, 1]}, "does not rise"),
        ({"rollout_return_step_indices": [3, 1]}, "does not rise"),
        ({"sigmas": [1.0, 0.5]}, "the body: Object contains unknown field `sigmas`"),
        ({"true_cfg_scal": 4.0}, "the body: Object contains unknown field `true_cfg_scal`"),
        (
            {"extra_sampling_params": {"guidance_scale_2": 9.0}},
            "guidance_scale_2 is set, which this server does not support",
        ),
        (
            {"extra_sampling_params": {"extra_sampling_params": {}}},
            "extra_sampling_params is set, which this server does not support",
        ),
        ({"extra_sampling_params": {"rollout": False}}, "rollout differs from that of the request"),
        ({"extra_sampling_params": {"fluvial": 1}}, r"extra_sampling_params.fluvial: Expected `object \| null`, got `int`"),
        ({**own(windows=[[1]]), "rollout_sde_step_indices": [1]}, "both set"),
        ({**own(windows=[[1], [2, 3]]), "num_outputs_per_prompt": 2}, "different numbers of steps"),
        (own(**{"samplr": "dance_sde"}), "extra_sampling_params.fluvial: Object contains unknown field `samplr`"),
        (own(**{"after": {"fractoin": 0.5}}), "extra_sampling_params.fluvial.after: fractoin is unknown"),
        (own(**{"key": [1]}), "fluvial.key: Expected `array` of length 2, got 1"),
        (own(**{"key": [1, 2**32]}), r"key\[1\]: Expected `int` <= 4294967295"),
        (own(**{"key": [1, 2]}), "set key and ids, or a seed"),
        (own(**{"ids": [1]}), "set key and ids, or a seed"),
        (own(**{"key": [1, 2], "ids": [1, 2]}), "ids has 2 items, expected 1, one per sample"),
        (own(**{**OWN, "initial_ids": []}), "initial_ids has 0 items"),
        (own(**{"initial_ids": [1]}), "set key and ids, or a seed"),
        (own(**{"sampler": "os:system"}), "expected one of flow_sde, dance_sde"),
        (own(**{"sampler": "cps", "solver": "sa_solver"}), "which takes no stochastic steps"),
        (own(**{"windows": [[1], [2]]}), "windows has 2 items"),
        (own(**{"windows": [[2, 1]]}), r"windows\[0\] does not rise"),
        (own(**{"after": {"fraction": 2}}), "fraction is 2"),
        (own(**{"prefix": [2, 0]}), r"prefix\[1\]: Expected `int` >= 1"),
        (own(**{"prefix": [2, 2]}), "without initial_ids, which say which samples share it"),
    ],
)
def test_a_wrong_request_is_one_line(change: dict[str, Any], says: str) -> None:
    limits = RequestLimits(pixels=10_000, steps=50, outputs=8, characters=100)
    with pytest.raises(WireError, match=says) as error:
        read_request({"prompt": "a", **change}, limits)
    assert "\n" not in str(error.value)


def test_indices_are_checked_against_the_schedule_that_the_server_chooses() -> None:
    indices: dict[str, Any] = {"prompt": "a", "rollout_sde_step_indices": [5], "rollout_return_step_indices": [6]}
    check_steps(read_request(indices), 6)
    for body, says in (
        (indices, "rollout_sde_step_indices holds 5, expected 0 to 4 for 5 steps"),
        ({"prompt": "a", "rollout_return_step_indices": [6]}, "rollout_return_step_indices holds 6, expected 0 to 5"),
        (own(windows=[[5]]), "windows holds 5"),
        (own(**OWN, initial_ids=[0], prefix=[6, 1]), "prefix has 6 steps"),
    ):
        with pytest.raises(WireError, match=says):
            check_steps(read_request(body), 5)


NAMES = [field.name for field in fields(RolloutRequest)]
OPTIONS = [field.name for field in fields(FluvialOptions)]
VALUES: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(0, 20)
    | st.floats()
    | st.sampled_from(["a", "", "sde", "cps", "ode", "uint8", "mean", "\ud800", *DEBUG]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(st.integers(0, 12), unique=True, max_size=4).map(sorted)
        | st.dictionaries(st.sampled_from(["fluvial", *OPTIONS]), inner, max_size=4)
    ),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from([*NAMES, "unknown"]), VALUES, max_size=6).map(lambda body: {"prompt": "a", **body})
BODIES |= st.dictionaries(st.sampled_from(OPTIONS), VALUES, max_size=5).map(lambda options: own(**options))


@given(BODIES | VALUES)
def test_any_json_is_a_request_or_one_line(body: Any) -> None:
    try:
        request = read_request(body)
    except WireError as error:
        problem = str(error)
    else:
        assert read_request(json.loads(json.dumps(write_request(request)))) == read_request(write_request(request))
        return
    assert "\n" not in problem
    assert len(problem) < 400
