"""A rollout server in this process over the tiny job's network, which can be told to fail."""

import json
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from typing import Any

import tiny_jobs as tiny
import torch
from torch import nn

from fluvial.core.random import Key, key
from fluvial.core.transitions import bind
from fluvial.engines.data.records import Prompt
from fluvial.engines.extensions.wire.request import RolloutRequest, read_request
from fluvial.engines.extensions.wire.response import DitTrajectory, RolloutSample, write_response
from fluvial.engines.sampling.generate import (
    Guidance,
    Requests,
    Sampling,
    SharedPrefix,
    StochasticSteps,
    generate,
    on_device,
)

MICRO_BATCH = 4
Change = Callable[[list[RolloutSample]], Any]  # of a reply: samples, or the bytes of a body


class FakeRollouts:
    """Handler of a rollout server, as `fake_servers.loopback` takes it.

    Args:
        module: its network.
        kind: fluvial, which knows keys and versions, or sglang.
    """

    def __init__(self, module: nn.Module, kind: str = "fluvial") -> None:
        self.module, self.kind, self.model = module, kind, tiny.Tiny()
        self.version = 0
        self.requests: list[dict[str, Any]] = []
        self.faults: list[Any] = []  # of the next requests: a function of the handler, a `Change`, or None
        self.is_ready, self.filled = True, MICRO_BATCH

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer a request."""
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        if handler.path != "/rollout/generate":
            about = {"model_path": "tiny"}
            if self.kind == "fluvial":
                about |= {"takes_options": True, "prediction": "velocity"}  # type: ignore[dict-item]
                about |= {"weight_version": self.version, "micro_batch": self.filled}  # type: ignore[dict-item]
            respond(handler, json.dumps(about).encode(), 200 if self.is_ready else 503)
            return
        value = json.loads(body)
        self.requests.append(value)
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, Fault):
            fault.act(handler)
            return
        samples = self.samples(read_request(value))
        reply = samples if fault is None else fault(samples)
        respond(handler, reply if isinstance(reply, bytes) else write_response(reply), media="application/msgpack")

    def samples(self, request: RolloutRequest) -> list[RolloutSample]:
        """Return the samples of a request, made in batches of one size."""
        own, count, steps = request.fluvial, request.outputs, request.num_inference_steps or tiny.STEPS
        schedule = on_device(self.model.schedule(steps, tiny.SHAPE), torch.device("cpu"))
        name = own.sampler or {"sde": "flow_sde", "cps": "cps", "ode": "ode"}[request.rollout_sde_type]
        windows = own.windows or (request.rollout_sde_step_indices or tuple(range(steps)),) * count
        stochastic = None
        if name != "ode":
            same = len(set(windows)) == 1 and own.windows is None
            rows = torch.tensor([*windows, *[windows[0]] * (MICRO_BATCH - count)])
            stochastic = StochasticSteps(
                bind(name, request.rollout_noise_level, schedule.levels),
                windows[0] if same else (lambda ids: rows),
                form=request.form,
                reduction=own.reduction,
                keep_velocity=request.rollout_debug_mode,
            )
        sampling = Sampling(
            tiny.SHAPE,
            schedule,
            Guidance(request.guidance_scale or 1.0, request.negative_prompt or ""),
            own.solver,
            0.0,
            stochastic,
            prefix=None if own.prefix is None else SharedPrefix(*own.prefix),
            after=own.after,
        )
        ids = own.ids or tuple(range(count))
        initial = own.initial_ids or ids
        noise = Key(*own.key) if own.key is not None else key(request.seed or 0)
        filled = [*range(count), *[0] * (MICRO_BATCH - count)]
        requests = Requests(
            [Prompt(request.prompt)] * len(filled), [ids[i] for i in filled], noise, [initial[i] for i in filled]
        )
        (chunk,) = generate(self.model, self.module, requests, sampling, micro_batch=len(filled))
        return [self._sample(request, chunk.trajectory, chunk.images[row], row, schedule) for row in range(count)]

    def _sample(self, request: RolloutRequest, made: Any, image: Any, row: int, schedule: Any) -> RolloutSample:
        steps = len(schedule.timesteps)
        recorded = made.steps[row].tolist()
        asked = request.rollout_return_step_indices
        needs_final = request.fluvial.final if asked is None else steps in asked
        known = {steps: made.final[row]} if needs_final else {}
        for place, step in enumerate(recorded):
            known |= {step: made.x[row, place], step + 1: made.x_next[row, place]}
        log_probs = torch.zeros(steps)
        log_probs[recorded] = made.log_prob[row]
        debug = None
        if made.velocity is not None:
            outputs = torch.zeros(steps, *tiny.SHAPE)
            outputs[recorded] = made.velocity[row]
            debug = {"rollout_model_outputs": outputs}
        boundaries = tuple(sorted(known))
        trajectory = DitTrajectory(
            torch.stack([known[boundary] for boundary in boundaries]), schedule.timesteps, schedule.levels, boundaries
        )
        if self.kind == "sglang":  # timesteps of the boundaries alone, without their indices
            timesteps = 1000 * schedule.levels[[*boundaries]]
            trajectory = replace(trajectory, timesteps=timesteps, latent_step_indices=None)
        version = self.version if self.kind == "fluvial" else None
        return RolloutSample(
            "request", request.prompt, request.seed, image, log_probs, debug, None, trajectory, weight_version=version
        )


class Fault:
    """A fault of the connection.

    Args:
        act: function of the handler, which answers wrongly or not at all.
    """

    def __init__(self, act: Callable[[BaseHTTPRequestHandler], None]) -> None:
        self.act = act


def respond(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, *, media: str = "application/json") -> None:
    """Answer with a body."""
    handler.send_response(status)
    handler.send_header("Content-Type", media)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def changed(**changes: Any) -> Change:
    """Return a change of every sample's fields."""
    return lambda samples: [replace(sample, **changes) for sample in samples]


def of_trajectory(**changes: Callable[[Any], Any]) -> Change:
    """Return a change of fields of every sample's trajectory, each a function of the value."""

    def change(samples: list[RolloutSample]) -> list[RolloutSample]:
        found = []
        for sample in samples:
            before = sample.dit_trajectory
            assert before is not None
            values = {name: function(getattr(before, name)) for name, function in changes.items()}
            found.append(replace(sample, dit_trajectory=replace(before, **values)))
        return found

    return change
