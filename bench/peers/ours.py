"""fluvial's side: a `Trainer` with default settings, timed as a whole in `Trainer.update`, and in parts."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import optree
import torch
from torch import Tensor

from fluvial.bench.peers.work import PeerRollout, Sampled, Work
from fluvial.core.random import key
from fluvial.core.rollout import Trajectory
from fluvial.engines.data.records import as_prompts
from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.engine import UpdateInfo
from fluvial.engines.engine.world import World
from fluvial.engines.gathered import gather
from fluvial.engines.methods.grpo import Grpo
from fluvial.engines.methods.losses import StepKLConfig
from fluvial.engines.run.config import TrainConfig, with_values
from fluvial.engines.run.job import Job
from fluvial.engines.run.jobs.settings import MachineConfig
from fluvial.engines.run.run import Run
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.batch import Batch, Items, RolloutSpec, make_batch, record_steps
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.generate import Guidance, Requests, SampleBatch, Sampling, StochasticSteps, generate
from fluvial.engines.sampling.items import Share
from fluvial.engines.sampling.samplers import Stochastic
from fluvial.engines.sampling.window import AllSteps
from fluvial.kernels import step_log_prob
from fluvial.models.device import is_accelerator
from fluvial.models.guidance import guided_velocity
from fluvial.models.lora import find_adapter_parameters, map_adapter_names


class Spent(NamedTuple):
    """Time of a phase."""

    cpu: float  # seconds of this process, on all of its threads; on an accelerator those of the device's stream
    wall: float  # seconds

    def add(self, other: "Spent") -> "Spent":
        """Return the sum."""
        return Spent(self.cpu + other.cpu, self.wall + other.wall)


def start_clocks(device: torch.device) -> Callable[[], Spent]:
    """Start the clocks, and return a function that waits for the device and returns the time since."""
    wall, cpu = time.perf_counter(), time.process_time()
    if not is_accelerator(device):
        return lambda: Spent(time.process_time() - cpu, time.perf_counter() - wall)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()

    def stop() -> Spent:
        last.record()
        last.synchronize()
        return Spent(first.elapsed_time(last) / 1000, time.perf_counter() - wall)

    return stop


class Ours:
    """A run of fluvial on the work, with default settings except those that the work determines.

    Args:
        work: the work.
        world: process group that the samples are spread over.
    """

    def __init__(self, work: Work, world: World) -> None:
        self.work = work
        self.guidance = Guidance(scale=work.scale, gradient=work.gradient)
        config = TrainConfig(
            out=Path("unused"),  # nothing is written
            train="lora",
            lora=work.lora,
            engine=MachineConfig(micro_batch=work.samples),
            optimizer=OptimizerConfig(lr=work.lr, max_grad_norm=work.max_grad_norm),
            method=Grpo(
                clip_low=work.clip,
                clip_high=work.clip,
                kl=StepKLConfig(coef=work.kl, weight=work.kl_weight) if work.kl else StepKLConfig(),
                sampling=SamplingConfig(
                    prompts=1,
                    group=work.ranks * work.samples,
                    steps=work.steps,
                    sampler=Stochastic(eta=work.eta),
                    window=AllSteps() if work.window is None else AllSteps(low=work.window.start, high=work.window.stop),
                    guidance=self.guidance,
                ),
            ),
        )
        job = Job(work.model, work.prompts, _score_mean, heldout=work.prompts, shape=work.size.event)
        self.parts = Trainer(config, job, world)
        work.fill(dict(find_adapter_parameters(self.parts.engine.module, "default")))
        self.sampler, self.schedule = self.parts.sampler.schedules.of(job.shape)[1], self.parts.schedule
        steps = StochasticSteps(self.sampler, work.recorded)
        self.sampling = Sampling(work.size.event, self.schedule, self.guidance, stochastic=steps, reuse="all")
        self.rollouts, self.runs = 0, dict[int, Run]()

    def step(self) -> Mapping[str, Spent]:
        """Run one batch by `Trainer.update`, as in `fluvial train`, and return the times of its phases and of the whole."""
        spent: dict[str, Spent] = {}

        @contextmanager
        def count_seconds(seconds: dict[str, float], phase: str) -> Iterator[None]:
            stop = start_clocks(self.parts.world.device)
            yield
            spent[phase] = stop().add(spent.get(phase, Spent(0.0, 0.0)))
            seconds[phase] = spent[phase].wall

        with patch.object(self.parts, "enter_phase", count_seconds):
            stop = start_clocks(self.parts.world.device)
            self.parts.update()
            return {"rollout": spent["rollout"], "update": spent["update"], "whole": stop()}

    @property
    def pairs(self) -> int:
        """Chosen number of pairs per pass of an update."""
        return max(self.parts.pairs, default=self.work.samples)

    def rollout(self) -> Sampled:
        """Generate the next rollout."""
        requests = Requests(as_prompts(self.work.prompts), self.work.ids, key(self.rollouts))
        self.rollouts += 1
        with self.parts.run.networks.open_sampler() as module:
            chunks = list(generate(self.parts.job.model, module, requests, self.sampling, micro_batch=self.work.samples))
        trajectory = chunks[0].trajectory
        return Sampled(torch.cat([trajectory.x[:, :1], trajectory.x_next], dim=1), trajectory.log_prob)

    def log_prob(self, x: Tensor, x_next: Tensor) -> Tensor:
        """Compute the log-probabilities of recorded steps, `[B, S, *event]` -> `[B, S]`."""
        cond, rows = self._encode(), []
        levels, timesteps = (table.to(x.device) for table in (self.schedule.levels, self.schedule.timesteps))
        with self.parts.engine.inference() as module:
            for index, step in enumerate(self.work.recorded):
                values = levels[step], levels[step + 1], timesteps[step]
                level, level_next, timestep = (value.expand(len(x)) for value in values)
                v = guided_velocity(self.parts.job.model, module, x[:, index], level, cond, timestep=timestep)
                rows.append(step_log_prob(self.sampler(level, level_next), x[:, index], v, x_next[:, index])[0])
        return torch.stack(rows, dim=1)

    def _encode(self) -> Any:
        """Encode the prompts and the negative prompt."""
        cond = self.guidance.encode(self.parts.job.model, as_prompts(self.work.prompts))
        return optree.tree_map(lambda tensor: tensor.to(self.work.device), cond)

    def make_items(self, stored: PeerRollout) -> Items:
        """Make the items of an update from a stored rollout."""
        device = self.work.device
        steps = torch.tensor(self.work.recorded, device=device).expand(len(stored.x), -1)
        trajectory = Trajectory(stored.x, stored.x_next, steps, stored.log_prob, None, stored.x_next[:, -1], None)
        levels = self.schedule.levels.to(device)
        transitions = self.sampler(levels[:-1], levels[1:])
        prompts, ids = as_prompts(self.work.prompts), [*self.work.ids]
        share = Share(ids[0], len(ids), self.work.ranks * len(ids))
        requests = Requests(prompts, ids, key(0))
        spec = RolloutSpec(list(prompts), requests, self.sampling, ids, None, None, share.batch, len(ids), transitions)
        samples = make_batch(SampleBatch(prompts, self._encode(), trajectory, None))
        batch = Batch(spec, share, ids, share.batch, "velocity", samples)
        items = record_steps(batch, key(0), keep=torch.ones(share.batch))
        return items.with_rows(signal=stored.advantage.repeat(len(self.work.recorded)))

    def update(self, items: Items, *, pairs: int | None = None) -> UpdateInfo:
        """Take one optimizer step on a stored rollout.

        Args:
            items: the rollout.
            pairs: (sample, step) pairs per forward and backward pass; None is the chosen number.
        """
        parts = self.parts
        if pairs is None:
            return self._update(parts.run, items)
        if pairs not in self.runs:
            config, run = with_values(parts.config, {"engine.update_micro_batch": pairs}), parts.run
            self.runs[pairs] = Run(config, parts.job, run.networks, run.sampler, parts.rewards, parts.runners, run.memory)
        return self._update(self.runs[pairs], items)

    def _update(self, run: Run, items: Items) -> UpdateInfo:
        """Make GRPO's optimizer update on items."""
        method = self.parts.config.method
        (part,) = run.minibatches(items, key(0), method.passes)
        return run.update(run.predict(part), method.loss, split_guidance=True)

    def read_gradients(self) -> dict[str, Tensor]:
        """Return the scaled gradient of the first update from AdamW's first moment, by the adapters' short names."""
        engine, short = self.parts.engine, map_adapter_names(self.parts.engine.module, "default")
        moments = {name: engine.optimizer.state[engine.trainable[full]]["exp_avg"] for name, full in short.items()}
        return {name: gather(moment) for name, moment in moments.items()}


def _score_mean(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Return the mean of each image, so that advantages differ."""
    return images.flatten(1).mean(1)
