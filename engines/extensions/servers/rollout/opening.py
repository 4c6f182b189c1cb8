"""The policy of a name: a built-in model, a pipeline of diffusers, a user-defined model, or the export of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from fluvial.engines.engine.parallelize import cast_samples
from fluvial.engines.errors import UsageError
from fluvial.engines.extensions.servers.rollout.policy import Policy
from fluvial.engines.extensions.servers.rollout.served_weights import ServedWeights
from fluvial.engines.extensions.wire.shared_folder import find_shared_folder
from fluvial.engines.run import job as jobs
from fluvial.engines.run.jobs.settings import PipelineConfig
from fluvial.engines.run.jobs.weights import WEIGHTS, base_model, is_run
from fluvial.engines.sampling.generate import Guidance
from fluvial.models.device import default_device, is_accelerator
from fluvial.models.host_values import fresh_copy
from fluvial.models.protocol import Weights

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
    device: torch.device | None = None,
) -> Policy:
    """Return the policy of a name, with its network on the device.

    Args:
        name: built-in model, folder or id on the Hub of a pipeline, `module:name`, or folder of a run.
        weights: folder of other base weights; None takes the model's own.
        steps, guidance, pipeline: settings where a request names none, and how a pipeline is opened.
        dtype: dtype of the network, as `EngineConfig.compute`; auto is bfloat16 on a GPU, else float32.
        roots: folders that weights and images may be read from later; by default `find_shared_folder()` and the folders of
            the model's weights.
        prompts: files of the run's prompts, which a pipeline without an adapter is recorded on.
        device: device; by default the GPU where there is one.

    Raises:
        UsageError: there is no such model, or it cannot be loaded.
        RunError: the folder in shared memory belongs to somebody else.
    """
    device = device or default_device()
    kind = torch.bfloat16 if dtype == "bfloat16" or (dtype == "auto" and is_accelerator(device)) else torch.float32
    base = base_model(name)
    if is_run(name):
        if weights is not None:
            raise UsageError("weights", weights, hint=f"{name} is a run with its own; leave one out")
        weights = Path(name) / WEIGHTS
        if not weights.is_dir():
            raise UsageError(f"{name} is a run that has exported no weights: let it end (--resume)")
    job = jobs.to_sample(base, pipeline, steps=steps, guidance=guidance, weights=weights, compute=kind, prompts=prompts)
    module = jobs.build(job).eval()
    cast_samples(module, kind)  # as in training: samples are cast, numbers per sample are not
    for parameter in module.parameters():  # not the buffers, such as frequencies, which FSDP2 leaves as they are, too
        # A file's weights lie where its header ends, and those of a trainer at the start of their own memory.
        parameter.data = fresh_copy(parameter.data.to(kind), device)
    module.to(device)
    served = ServedWeights(module, roots=roots or [find_shared_folder(), *_folders(job.model.weights)], device=device)
    return Policy(name, job.model, served, shape=job.shape, steps=steps, guidance=guidance, device=device)


def _folders(weights: Weights | None) -> list[Path]:
    """Return the folders of a model's own weights, each with those beside it that belong to the same pipeline."""
    folders = [] if weights is None else [weights] if isinstance(weights, Path) else list(weights.values())
    return [folder.parent if (folder.parent / "model_index.json").is_file() else folder for folder in folders]
