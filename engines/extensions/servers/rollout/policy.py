"""The policy that is served: how it is opened, and turns between batches and changes of the weights."""

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
from fluvial.engines.extensions.remote.push_folder import remove_left
from fluvial.engines.extensions.servers.asgi import RequestError
from fluvial.engines.extensions.servers.rollout.ranks import Ranks
from fluvial.engines.extensions.servers.rollout.served_weights import ServedWeights
from fluvial.engines.extensions.wire.client import find_shared_folder
from fluvial.engines.run import job as jobs
from fluvial.engines.run.jobs.settings import PipelineConfig
from fluvial.engines.run.jobs.weights import WEIGHTS, find_base_model, is_run
from fluvial.engines.sampling.generate import Guidance, on_device
from fluvial.engines.sampling.samplers import SAMPLERS
from fluvial.engines.sampling.solvers import deterministic_step
from fluvial.models import DiffusionModel, Schedule, is_recorded
from fluvial.models.device import default_device, is_accelerator
from fluvial.models.host_values import fresh_copy
from fluvial.models.protocol import Weights

Result = TypeVar("Result")
RATES = "frame_rate", "fps"  # arguments of a pipeline's call


class ServedPolicy:
    """A model whose samples are served. One batch at a time is sampled, and weights change between two batches only.

    Args:
        name: what the user calls the model.
        shape: shape of a sample where a request names no size.
        steps: steps of the schedule where a request names none.
        guidance: guidance where a request names none.
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
        """The processes that share every sample; None for one."""
        return self.weights.ranks

    @property
    def version(self) -> int:
        """Number of updates that made the weights."""
        return self.weights.version

    def schedule(self, steps: int, shape: tuple[int, ...]) -> Schedule:
        """Return the model's schedule for samples of a shape, its timesteps on the device.

        Raises:
            ValueError: the model has no such schedule.
        """
        return on_device(self._schedule(steps, shape), self.device)

    def sampler(self, name: str, eta: float, schedule: Schedule) -> Sampler:
        """Return a built-in sampler bound to a schedule.

        Raises:
            RequestError: it samples from models that predict something else.
        """
        if name == "ode":
            return deterministic_step(self.model.prediction)
        rule = SAMPLERS[name]
        if rule.prediction not in (None, self.model.prediction):
            raise RequestError(
                f"sampler is {name}, which samples from models that predict {rule.prediction}, and this one predicts "
                f"{self.model.prediction}"
            )
        return rule.bind(eta, schedule.levels)

    def latent_shape(self, height: int | None, width: int | None, frames: int | None) -> tuple[int, ...]:
        """Return the shape of a sample; None in place of a size takes the server's.

        Raises:
            RequestError: the model does not support the size, or only one of width and height is given.
        """
        if height is None and width is None and frames is None:
            return self.shape
        if height is None or width is None:
            raise RequestError("width, height and num_frames go together, and one of width and height is missing")
        with convert_errors(RequestError, ValueError):
            return tuple(self.model.latent_shape(height, width, 1 if frames is None else frames))

    def check_guidance(self, guidance: Guidance) -> None:
        """Raise RequestError for guidance other than the one that a recorded pipeline was opened with."""
        opened = self.guidance
        if is_recorded(self.model) and (guidance.scale, guidance.negative) != (opened.scale, opened.negative):
            raise RequestError(
                f"guidance is {guidance.scale:g} with negative prompt {guidance.negative!r}, and this pipeline has no "
                f"adapter: expected {opened.scale:g} with {opened.negative!r}, as it was opened"
            )

    def check_rate(self, fps: int | None) -> None:
        """Raise RequestError for another frame rate than that of a recorded pipeline whose call takes one."""
        model: Any = self.model
        asked, takes = getattr(model, "asked", {}), getattr(model, "takes", {})
        for name in RATES if fps is not None and is_recorded(model) else ():
            rate = asked.get(name, takes[name].default) if name in takes else fps
            if rate != fps:
                raise RequestError(f"fps is {fps}, and this pipeline was opened with {name} {rate}: leave fps out")

    def check_resumed(self) -> None:
        """Raise RequestError if the weights are released."""
        if self.weights.released:
            raise RequestError("the weights are released: POST /resume_memory_occupation", 503, retry_after=1)

    def check_version(self, wanted: int | None) -> None:
        """Raise RequestError if a request is for other weights than the present ones; weights do not go back."""
        if wanted not in (None, self.version):
            raise RequestError(
                f"the weights have version {self.version}, and the request asks for {wanted}: push these weights first", 409
            )

    @contextmanager
    def sampling(self) -> Iterator[nn.Module]:
        """Yield the network, whose weights stay as they are in this block. Changes that wait go first.

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

    async def between(self, function: Callable[[], Result]) -> Result:
        """Run a function while no batch is sampled, before the next one, and return its result."""
        return await asyncio.to_thread(self._alone, function)

    def _alone(self, function: Callable[[], Result]) -> Result:
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
    """Return the policy of a name, with its network on the device.

    On several ranks all of them hold a part of the weights, and a part of the tokens of each sample while it is denoised.

    Args:
        name: built-in model, folder or id on the Hub of a pipeline, `module:name`, or folder of a run.
        weights: folder of other base weights; None takes the model's own.
        steps, guidance, pipeline: settings where a request names none, and how a pipeline is opened.
        dtype: dtype of the network, as `EngineConfig.compute`; auto is bfloat16 on a GPU, else float32.
        roots: folders that weights and images may be read from later; by default `find_shared_folder()` and the folders of
            the model's weights.
        prompts: files of the run's prompts, which a pipeline without an adapter is recorded on.
        world: the ranks of the server; None for one process, on the GPU, or the CPU without one.

    Raises:
        UsageError: there is no such model, it cannot be loaded, or its tokens cannot be split over the ranks.
        RunError: the folder in shared memory belongs to somebody else.
    """
    device = default_device() if world is None else world.device
    kind = torch.bfloat16 if dtype == "bfloat16" or (dtype == "auto" and is_accelerator(device)) else torch.float32
    base = find_base_model(name)
    if is_run(name):
        if weights is not None:
            raise UsageError("weights", weights, hint=f"{name} is a run with its own; leave one out")
        weights = Path(name) / WEIGHTS
        if not weights.is_dir():
            raise UsageError(f"{name} is a run that has exported no weights: let it end (--resume)")
    job = jobs.open_to_sample(base, pipeline, steps=steps, guidance=guidance, weights=weights, compute=kind, prompts=prompts)
    module = _build_alone(job, kind, device) if world is None else _share_network(job, world, kind)
    served = ServedWeights(
        module,
        roots=roots or [find_shared_folder(), *_folders(job.model.weights)],
        device=device,
        ranks=None if world is None else Ranks(world),
    )
    for root in served.roots:
        remove_left(root)
    return ServedPolicy(name, job.model, served, shape=job.shape, steps=steps, guidance=guidance, device=device)


def _build_alone(job: jobs.Job, kind: torch.dtype, device: torch.device) -> nn.Module:
    """Return a job's network on the device."""
    module = jobs.build(job).eval()
    cast_samples(module, kind)  # as in training: samples are cast, numbers per sample are not
    for parameter in module.parameters():  # not the buffers, such as frequencies, which FSDP2 leaves as they are, too
        # A file's weights lie where its header ends, and those of a trainer at the start of their own memory.
        parameter.data = fresh_copy(parameter.data.to(kind), device)
    return module.to(device)


@collective
def _share_network(job: jobs.Job, world: World, dtype: torch.dtype) -> nn.Module:
    """Return a job's network, sharded over the ranks, which split the tokens of each sample."""
    name: Any = str(dtype).removeprefix("torch.")
    config = EngineConfig(comm="reshard", context_parallel=world.size, compute=name, masters=name, compile=False)
    module = jobs.build(job, empty=job.model.weights is not None)
    with convert_errors(UsageError, UsageError, says=f"{world.size} processes cannot share a sample"):
        return ShardedModule(module, job.model.blocks(module), world, config, weights=job.model.weights).module.eval()


def _folders(weights: Weights | None) -> list[Path]:
    """Return the folders of a model's own weights, each with those beside it that belong to the same pipeline."""
    folders = [] if weights is None else [weights] if isinstance(weights, Path) else list(weights.values())
    return [folder.parent if (folder.parent / "model_index.json").is_file() else folder for folder in folders]
