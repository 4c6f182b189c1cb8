"""Served policy: opening a model, and mutual exclusion of batches and weight changes."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from fluvial.core.transitions import Sampler
from fluvial.engines.engine.config import EngineConfig
from fluvial.engines.engine.module import ShardedModule
from fluvial.engines.engine.parallelize import cast_samples
from fluvial.engines.engine.world import World, collective
from fluvial.engines.errors import UsageError, convert_errors
from fluvial.engines.extensions.remote.push_folder import remove_dead_folders
from fluvial.engines.extensions.servers.asgi import RequestError
from fluvial.engines.extensions.servers.rollout.ranks import Ranks
from fluvial.engines.extensions.servers.rollout.served_weights import ServedWeights
from fluvial.engines.extensions.wire.client import find_shared_folder
from fluvial.engines.run import job as jobs
from fluvial.engines.run.jobs.settings import PipelineConfig
from fluvial.engines.run.jobs.weights import WEIGHTS, find_base_model, is_run
from fluvial.engines.sampling.generate import Guidance, move_schedule
from fluvial.engines.sampling.samplers import SAMPLERS
from fluvial.engines.sampling.solvers import deterministic_step
from fluvial.models import DiffusionModel, Schedule, is_recorded
from fluvial.models.device import find_default_device, is_accelerator
from fluvial.models.host_values import fresh_copy
from fluvial.models.protocol import Weights

Result = TypeVar("Result")
RATES = "frame_rate", "fps"  # names of the frame rate in a pipeline's call


class ServedPolicy:
    """Model with served weights. One batch is sampled at a time, and weights change only between two batches.

    Args:
        name: name that the user gave for the model.
        shape: default shape of a sample.
        steps: default number of steps.
        guidance: default guidance.
    """

    def __init__(
        self,
        name: str,
        model: DiffusionModel,
        weights: ServedWeights,
        *,
        shape: tuple[int, ...],
        steps: int,
        guidance: Guidance,
        device: torch.device,
    ) -> None:
        self.name, self.model, self.weights, self.device = name, model, weights, device
        self.shape, self.steps, self.guidance = shape, steps, guidance
        self._turn, self._busy, self._changes = threading.Condition(), False, 0
        self._schedule = lru_cache(maxsize=64)(model.schedule)

    @property
    def ranks(self) -> Ranks | None:
        """Processes that share every sample; None for one process."""
        return self.weights.ranks

    @property
    def version(self) -> int:
        """Number of updates that made the weights."""
        return self.weights.version

    def schedule(self, steps: int, shape: tuple[int, ...]) -> Schedule:
        """Return the model's schedule for samples of a shape, with its timesteps on the device.

        Raises:
            ValueError: the model does not support it.
        """
        return move_schedule(self._schedule(steps, shape), self.device)

    def bind_sampler(self, name: str, eta: float, schedule: Schedule) -> Sampler:
        """Bind a built-in sampler to a schedule.

        Raises:
            RequestError: the sampler needs another prediction than the model's.
        """
        if name == "ode":
            return deterministic_step(self.model.prediction)
        rule = SAMPLERS[name]
        if rule.prediction not in (None, self.model.prediction):
            raise RequestError(
                f"sampler is {name}, which needs a model that predicts {rule.prediction}, and this one predicts "
                f"{self.model.prediction}"
            )
        return rule.bind(eta, schedule.levels)

    def latent_shape(self, height: int | None, width: int | None, frames: int | None) -> tuple[int, ...]:
        """Return the shape of a sample; None for all sizes takes the default shape.

        Raises:
            RequestError: the model does not support the size, or only one of width and height is set.
        """
        if height is None and width is None and frames is None:
            return self.shape
        if height is None or width is None:
            raise RequestError("width, height and num_frames go together, and one of width and height is missing")
        with convert_errors(RequestError, ValueError):
            return tuple(self.model.latent_shape(height, width, 1 if frames is None else frames))

    def check_guidance(self, guidance: Guidance) -> None:
        """Raise RequestError if the guidance differs from that of a recorded pipeline."""
        recorded = self.guidance
        if is_recorded(self.model) and (guidance.scale, guidance.negative) != (recorded.scale, recorded.negative):
            raise RequestError(
                f"guidance is {guidance.scale:g} with negative prompt {guidance.negative!r}, and this pipeline has no "
                f"adapter: expected {recorded.scale:g} with {recorded.negative!r}, as it was opened"
            )

    def check_rate(self, fps: int | None) -> None:
        """Raise RequestError if the frame rate differs from that of a recorded pipeline whose call takes one."""
        model: Any = self.model
        arguments, takes = getattr(model, "call_arguments", {}), getattr(model, "takes", {})
        for name in RATES if fps is not None and is_recorded(model) else ():
            rate = arguments.get(name, takes[name].default) if name in takes else fps
            if rate != fps:
                raise RequestError(f"fps is {fps}, and this pipeline was opened with {name} {rate}: leave fps out")

    def check_resumed(self) -> None:
        """Raise RequestError if the weights are released."""
        if self.weights.released:
            raise RequestError("the weights are released: POST /resume_memory_occupation", 503, retry_after=1)

    def check_version(self, wanted: int | None) -> None:
        """Raise RequestError if a request needs a version other than the current one, since old weights are not kept."""
        if wanted not in (None, self.version):
            raise RequestError(
                f"the weights have version {self.version}, and the request needs {wanted}: push these weights first", 409
            )

    @contextmanager
    def hold_weights(self) -> Iterator[nn.Module]:
        """Yield the network, whose weights do not change in the context. Waiting changes go first.

        Raises:
            RequestError: the weights are released.
        """
        with self._turn:
            self._turn.wait_for(lambda: not self._busy and not self._changes)
            self.check_resumed()
            self._busy = True
        try:
            yield self.weights.module
        finally:
            self._end()

    async def run_between(self, function: Callable[[], Result]) -> Result:
        """Run a function between two batches, before the next one, and return its result."""
        return await asyncio.to_thread(self._run_alone, function)

    def _run_alone(self, function: Callable[[], Result]) -> Result:
        with self._turn:
            self._changes += 1
            try:
                self._turn.wait_for(lambda: not self._busy)
                self._busy = True
            finally:
                self._changes -= 1
        try:
            return function()
        finally:
            self._end()

    def _end(self) -> None:
        with self._turn:
            self._busy = False
            self._turn.notify_all()


Dtype = Literal["auto", "float32", "bfloat16"]


def open_policy(
    name: str,
    *,
    weights: Path | None,
    steps: int,
    guidance: Guidance,
    pipeline: PipelineConfig,
    dtype: Dtype = "auto",
    roots: Sequence[Path] = (),
    prompts: Sequence[str] = (),
    world: World | None = None,
) -> ServedPolicy:
    """Open a policy by name, with its network on the device.

    With several ranks, each holds a part of the weights, and denoises a part of the tokens of each sample.

    Args:
        name: built-in model, folder or Hub id of a pipeline, `module:name`, or folder of a run.
        weights: folder of other base weights; None takes the model's own.
        steps, guidance, pipeline: default settings of a request, and settings of the pipeline.
        dtype: dtype of the network, as `EngineConfig.compute`; auto is bfloat16 on a GPU, else float32.
        roots: folders from which clients may read weights and images; by default `find_shared_folder()` and the folders of
            the model's weights.
        prompts: files of the run's prompts, on which a pipeline without an adapter is recorded.
        world: ranks of the server; None for one process, on the GPU if there is one.

    Raises:
        UsageError: the model does not exist or cannot be loaded, or its tokens cannot be split over the ranks.
        RunError: the folder in shared memory belongs to another user.
    """
    device = find_default_device() if world is None else world.device
    kind = torch.bfloat16 if dtype == "bfloat16" or (dtype == "auto" and is_accelerator(device)) else torch.float32
    base = find_base_model(name)
    if is_run(name):
        if weights is not None:
            raise UsageError("weights", weights, hint=f"{name} is a run with its own weights: remove it")
        weights = Path(name) / WEIGHTS
        if not weights.is_dir():
            raise UsageError(f"{name} is a run without exported weights: finish it (--resume)")
    job = jobs.open_to_sample(base, pipeline, steps=steps, guidance=guidance, weights=weights, compute=kind, prompts=prompts)
    module = _build_alone(job, kind, device) if world is None else _share_network(job, world, kind)
    served = ServedWeights(
        module,
        roots=roots or [find_shared_folder(), *_list_folders(job.model.weights)],
        device=device,
        ranks=None if world is None else Ranks(world),
    )
    for root in served.roots:
        remove_dead_folders(root)
    return ServedPolicy(name, job.model, served, shape=job.shape, steps=steps, guidance=guidance, device=device)


def _build_alone(job: jobs.Job, kind: torch.dtype, device: torch.device) -> nn.Module:
    """Build a job's network on the device."""
    module = jobs.build(job).eval()
    cast_samples(module, kind)  # as in training: samples are cast, but not numbers per sample
    for parameter in module.parameters():  # but not buffers, such as frequencies, which FSDP2 does not cast either
        # Copied for the trainer's alignment: mapped weights of a file begin where its header ends.
        parameter.data = fresh_copy(parameter.data.to(kind), device)
    return module.to(device)


@collective
def _share_network(job: jobs.Job, world: World, dtype: torch.dtype) -> nn.Module:
    """Build a job's network, sharded over the ranks, which split the tokens of each sample."""
    name: Any = str(dtype).removeprefix("torch.")
    config = EngineConfig(comm="reshard", context_parallel=world.size, compute=name, masters=name, compile=False)
    module = jobs.build(job, empty=job.model.weights is not None)
    with convert_errors(UsageError, UsageError, says=f"{world.size} processes cannot share a sample"):
        return ShardedModule(module, job.model.blocks(module), world, config, weights=job.model.weights).module.eval()


def _list_folders(weights: Weights | None) -> list[Path]:
    """List the folders of a model's own weights, or of the pipelines that they belong to."""
    folders = [] if weights is None else [weights] if isinstance(weights, Path) else list(weights.values())
    return [folder.parent if (folder.parent / "model_index.json").is_file() else folder for folder in folders]
