"""Replies of a server are what core's formulas say, and to the bit what `generate` makes in process."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from helpers import rollout_servers as servers
from helpers import tiny_jobs as tiny
from helpers.rollout_servers import MICRO_BATCH, Server
from torch import Tensor

from fluvial.core import gaussian, transitions
from fluvial.core.random import fold_in, key, normal
from fluvial.engines.data.records import Prompt
from fluvial.engines.extensions.servers.rollout import sampling
from fluvial.engines.extensions.wire.response import RolloutSample
from fluvial.engines.extensions.wire.tensors import unpack_tree
from fluvial.engines.sampling.generate import NO_GUIDANCE, Chunk, Guidance, Requests, Sampling, StochasticSteps, generate
from fluvial.engines.sampling.samplers import SAMPLERS
from fluvial.engines.sampling.solvers import deterministic_step
from fluvial.engines.streams import Stream
from fluvial.models import Prediction
from fluvial.models.pipelines.base import pack
from fluvial.models.pipelines.layouts import TOKENS

KEY, IDS = key(11), (4, 0, 9)


class NumbersCase(NamedTuple):
    """A sampler as a request names it, and as fluvial does."""

    sampler: str
    fields: dict[str, Any]
    own: dict[str, Any]
    form: Any = "density"
    prediction: Prediction = "velocity"
    eta: float = 0.5


TABLE = {
    "sde": NumbersCase("flow_sde", {"rollout_sde_type": "sde"}, {}),
    "cps": NumbersCase("cps", {"rollout_sde_type": "cps"}, {}),
    "sde_unscaled": NumbersCase("flow_sde", {"rollout_log_prob_no_const": True}, {}, "unscaled"),
    "cps_unscaled": NumbersCase("cps", {"rollout_sde_type": "cps", "rollout_log_prob_no_const": True}, {}, "unscaled"),
    "ode": NumbersCase("ode", {"rollout_sde_type": "ode", "rollout_log_prob_no_const": True}, {}, "unscaled", eta=0.0),
    "sde_no_const": NumbersCase("flow_sde", {}, {"form": "no_const"}, "no_const"),
    "dance_sde": NumbersCase("dance_sde", {}, {"sampler": "dance_sde"}),
    "wan_sde": NumbersCase("wan_sde", {}, {"sampler": "wan_sde"}),
    "ddim": NumbersCase("ddim", {}, {"sampler": "ddim"}, prediction="epsilon"),
}
WINDOWS: dict[str, tuple[int, ...] | None] = {"all": None, "one": (1,), "two": (0, 2), "none": ()}
T = tiny.STEPS


@pytest.fixture(scope="module")
def of() -> dict[Prediction, Server]:
    return {"velocity": servers.served(), "epsilon": servers.served(servers.policy("epsilon"))}


def own(row: NumbersCase | None = None, **options: Any) -> dict[str, Any]:
    options = {"key": list(KEY), "ids": list(IDS), **({} if row is None else row.own), **options}
    return {"num_outputs_per_prompt": len(IDS), "extra_sampling_params": {"fluvial": options}}


def body(row: NumbersCase, **fields: Any) -> dict[str, Any]:
    return {**row.fields, **own(row), "rollout_noise_level": row.eta or 0.7, "rollout_return_dit_trajectory": True, **fields}


def chunk_of(server: Server, row: NumbersCase, window: Any, *, guidance: Guidance = NO_GUIDANCE, **changes: Any) -> Chunk:
    """Return the samples of `IDS`, made in process in a batch of the server's size."""
    policy = server.policy
    schedule = policy.schedule(T, tiny.SHAPE)
    stochastic = None
    if row.sampler != "ode" and window != ():
        sampler = SAMPLERS[row.sampler].bind(row.eta, schedule.levels)
        stochastic = StochasticSteps(sampler, range(T) if window is None else window, form=row.form)
    sampling = Sampling(tiny.SHAPE, schedule, guidance, stochastic=stochastic, **changes)
    assert len(IDS) == MICRO_BATCH
    requests = Requests([Prompt("1")] * len(IDS), IDS, KEY)
    return next(generate(policy.model, policy.weights.module, requests, sampling, micro_batch=MICRO_BATCH))


def latents(sample: RolloutSample) -> Tensor:
    return servers.trajectory(sample).latents


@pytest.mark.parametrize("window", list(WINDOWS))
@pytest.mark.parametrize("name", list(TABLE))
def test_samples_are_those_of_generate_to_the_bit(of: dict[Prediction, Server], name: str, window: str) -> None:
    """Images, log-probabilities, and both ends of each recorded step; 0 at all other steps."""
    row, steps = TABLE[name], WINDOWS[window]
    found = of[row.prediction].samples(**body(row, rollout_sde_step_indices=None if steps is None else list(steps)))
    if row.sampler == "ode":
        steps = ()
    chunk = chunk_of(of[row.prediction], row, steps)
    trajectory = chunk.trajectory
    recorded = trajectory.steps[0].tolist()
    for number, sample in enumerate(found):
        assert torch.equal(sample.generated_output, chunk.images[number])
        assert latents(sample).shape == (T + 1, *tiny.SHAPE)
        assert torch.equal(latents(sample)[-1], trajectory.final[number])
        assert torch.equal(latents(sample)[recorded], trajectory.x[number])
        assert torch.equal(latents(sample)[[step + 1 for step in recorded]], trajectory.x_next[number])
        expected = torch.zeros(T)
        expected[recorded] = trajectory.log_prob[number]
        assert torch.equal(servers.log_probs(sample), expected)
        assert sample.weight_version == 0
    assert bool(recorded) == (steps != ())


@pytest.mark.parametrize("name", list(TABLE))
def test_numbers_are_those_of_the_formulas(of: dict[Prediction, Server], name: str) -> None:
    """In float64, from the latents, the model's outputs and the sigmas of the response; the noise from the keys."""
    row, server = TABLE[name], of[TABLE[name].prediction]
    (sample, *_) = server.samples(**body(row, rollout_sde_step_indices=[0, 2, 3]))
    assert sample.rollout_debug_tensors is not None
    debug = {name: tensor.double() for name, tensor in sample.rollout_debug_tensors.items()}
    x, sigmas, v = latents(sample).double(), servers.trajectory(sample).sigmas.double(), debug["rollout_model_outputs"]
    sampler = transitions.bind(row.sampler, row.eta, sigmas)
    plain = deterministic_step(row.prediction)
    for step in range(T):
        noisy = step != 1 and row.sampler != "ode"
        transition = (sampler if noisy else plain)(sigmas[step], sigmas[step + 1])
        mean = gaussian.mean(transition, x[step][None], v[step][None])[0]
        assert torch.allclose(debug["rollout_prev_sample_means"][step], mean, atol=1e-5)
        assert debug["rollout_noise_std_devs"][step].shape == (1,)
        assert torch.allclose(debug["rollout_noise_std_devs"][step], transition.std, atol=1e-6)
        assert torch.allclose(x[step + 1], mean + transition.std * debug["rollout_variance_noises"][step], atol=1e-5)
        residual = x[step + 1] - mean
        expected = torch.tensor(0.0, dtype=torch.float64)
        if noisy and row.form == "unscaled":
            expected = -(residual**2).mean()
        elif noisy and transition.std > 0:
            expected = -(residual**2).mean() / (2 * transition.std**2)
            if row.form == "density":
                expected = expected - transition.std.log() - math.log(2 * math.pi) / 2
        assert torch.allclose(servers.log_probs(sample)[step].double(), expected, atol=2e-5), step
    noise = normal(fold_in(fold_in(fold_in(KEY, IDS[0]), Stream.STEPS), 0), tiny.SHAPE)
    assert torch.equal(sample.rollout_debug_tensors["rollout_variance_noises"][0], noise * float(row.sampler != "ode"))


def test_guidance_is_that_of_generate(of: dict[Prediction, Server]) -> None:
    row = TABLE["sde"]
    for forwards in ("one", "two"):
        guidance = Guidance(2.5, "3", forwards=forwards)
        fields = {**own(row, forwards=forwards), "guidance_scale": 2.5, "negative_prompt": "3"}
        chunk = chunk_of(of["velocity"], row, None, guidance=guidance)
        found = of["velocity"].samples(**body(row, rollout_return_denoising_env=True) | fields)
        for number, sample in enumerate(found):
            assert torch.equal(latents(sample)[-1], chunk.trajectory.final[number])
            assert torch.equal(servers.log_probs(sample), chunk.trajectory.log_prob[number])
            assert isinstance(sample.denoising_env, bytes)
            env = unpack_tree(sample.denoising_env)
            assert env["guidance"] == 2.5
            assert torch.equal(env["pos_cond_kwargs"]["rows"], tiny.Tiny().encode(["1"]).rows)
            assert torch.equal(env["neg_cond_kwargs"]["rows"], tiny.Tiny().encode(["3"]).rows)
    assert not torch.equal(latents(found[0]), latents(of["velocity"].samples(**body(row))[0]))


def test_without_fields_of_fluvial_a_reply_has_sglangs_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, timesteps of the boundaries, images as videos of one frame, conditioning without the batch dimension."""
    monkeypatch.setattr(sampling, "find_layout", lambda model: TOKENS._replace(framed=True))
    server = servers.served(servers.policy(guidance=Guidance(2.0, "3")))
    fields = {"seed": 3, "rollout_return_step_indices": [1, 2, 4]}
    fields |= dict.fromkeys(("rollout_return_dit_trajectory", "rollout_return_denoising_env"), True)
    own_form: dict[str, Any] = {"extra_sampling_params": {"fluvial": {}}}
    (theirs,), (ours,) = server.samples(**fields), server.samples(**fields, **own_form)
    assert torch.equal(latents(theirs), pack(latents(ours)))
    timesteps = server.policy.schedule(T, tiny.SHAPE).timesteps
    assert servers.trajectory(theirs).timesteps.tolist() == [*timesteps[[1, 2]].tolist(), 0.0]  # type: ignore[union-attr]
    assert servers.trajectory(ours).timesteps.tolist() == timesteps.tolist()  # type: ignore[union-attr]
    assert torch.equal(theirs.generated_output, ours.generated_output.unsqueeze(1))
    for name, tensor in (ours.rollout_debug_tensors or {}).items():
        expected = tensor if name == "rollout_noise_std_devs" else pack(tensor)
        assert torch.equal((theirs.rollout_debug_tensors or {})[name], expected), name
    assert (theirs.rollout_debug_tensors or {})["rollout_noise_std_devs"].shape == (T, 1)
    envs = [unpack_tree(sample.denoising_env) for sample in (theirs, ours) if isinstance(sample.denoising_env, bytes)]
    assert [(env["guidance"], env["image_kwargs"]) for env in envs] == [(None, None), (2.0, {})]
    for half, digit in (("pos_cond_kwargs", 1), ("neg_cond_kwargs", 3)):
        assert [env[half]["rows"].tolist() for env in envs] == [torch.eye(6)[digit].tolist(), [torch.eye(6)[digit].tolist()]]


def test_a_seed_is_the_key_of_each_sample(of: dict[Prediction, Server]) -> None:
    policy = of["velocity"].policy
    found = of["velocity"].samples(seed=40, num_outputs_per_prompt=2, rollout_noise_level=0.5)
    schedule = policy.schedule(T, tiny.SHAPE)
    stochastic = StochasticSteps(SAMPLERS["flow_sde"].bind(0.5, schedule.levels), range(T))
    sampling = Sampling(tiny.SHAPE, schedule, stochastic=stochastic)
    for number, sample in enumerate(found):
        requests = Requests([Prompt("1")] * MICRO_BATCH, [0] * MICRO_BATCH, key(40 + number))
        chunk = next(generate(policy.model, policy.weights.module, requests, sampling, micro_batch=MICRO_BATCH))
        assert torch.equal(sample.generated_output, chunk.images[0])
        assert torch.equal(servers.log_probs(sample), chunk.trajectory.log_prob[0])
        assert sample.seed == 40
    first, second = (of["velocity"].samples(rollout=False)[0] for _ in range(2))
    assert first.seed is not None
    assert first.seed != second.seed
    again = of["velocity"].samples(rollout=False, seed=first.seed)[0]
    assert torch.equal(first.generated_output, again.generated_output)


def test_an_evaluation_is_images_alone(of: dict[Prediction, Server]) -> None:
    for solver in ("euler", "dpmpp_2m", "unipc", "sa_solver"):
        fields = {**own(solver=solver), "rollout": False, "rollout_return_dit_trajectory": True}
        found = of["velocity"].samples(**fields, rollout_noise_level=0.3)
        chunk = chunk_of(of["velocity"], TABLE["ode"], (), solver=solver, eta=0.3 if solver == "sa_solver" else 0.0)
        for number, sample in enumerate(found):
            assert torch.equal(sample.generated_output, chunk.images[number])
            assert (sample.rollout_log_probs, sample.rollout_debug_tensors, sample.dit_trajectory) == (None, None, None)


def test_latents_and_debug_tensors_are_those_that_are_asked_for(of: dict[Prediction, Server]) -> None:
    row, server = TABLE["sde"], of["velocity"]
    whole, part = (server.samples(**body(row, rollout_return_step_indices=indices))[0] for indices in (None, [1, 2, 4]))
    assert servers.trajectory(part).latent_step_indices == (1, 2, 4)
    assert torch.equal(latents(part), latents(whole)[[1, 2, 4]])
    assert torch.equal(servers.trajectory(part).sigmas, server.policy.schedule(T, tiny.SHAPE).levels)
    debug = server.samples(**body(row) | own(row, debug=["rollout_model_outputs"]))[0].rollout_debug_tensors or {}
    assert {name: tuple(tensor.shape) for name, tensor in debug.items()} == {"rollout_model_outputs": (T, *tiny.SHAPE)}
    assert server.samples(**body(row, rollout_debug_mode=False))[0].rollout_debug_tensors is None
