"""verl-omni's rollout server with fluvial in the place of vLLM-Omni's engine, which has no CPU wheel."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import ray
import torch
import verl_omni.workers.rollout.vllm_rollout.utils  # noqa: F401  before torchvision seems to be there
from helpers import absent, omni_rollouts
from torch import Tensor
from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer

from fluvial.core.sigmas import from_scheduler
from fluvial.engines.extensions.verl.plugin import find_adapter_class
from fluvial.models import Schedule
from fluvial.models.lora_files import load_lora

for name in ("torchvision.transforms", "torchvision"):  # verl-omni's converter of images of PIL, of which there are none
    absent.give(sys.modules.setdefault(name, ModuleType(name)))
from verl_omni.workers.rollout.vllm_rollout.utils import vLLMOmniColocateWorkerExtension  # noqa: E402
from verl_omni.workers.rollout.vllm_rollout.vllm_omni_async_server import vLLMOmniHttpServer, vLLMOmniReplica  # noqa: E402

for name in ("torchvision.transforms", "torchvision"):
    del sys.modules[name]


class Receiver(bucketed_weight_transfer.BucketedWeightReceiver):
    """verl's receiver: on the CPU its tensors are views of shared memory, which it unmaps."""

    def receive_weights(self, on_bucket_received: Callable[[list[tuple[str, Tensor]]], None]) -> None:
        super().receive_weights(lambda weights: on_bucket_received([(name, tensor.clone()) for name, tensor in weights]))


bucketed_weight_transfer.BucketedWeightReceiver = Receiver


class Worker(vLLMOmniColocateWorkerExtension):
    """verl-omni's receiver of weights, for a network of fluvial's."""

    device, local_rank = torch.device("cpu"), 0

    def __new__(cls, *_: Any) -> "Worker":
        return object.__new__(cls)

    def __init__(self, policy: omni_rollouts.Policy) -> None:
        self.policy, self.model_runner = policy, SimpleNamespace(pipeline=self)

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        with torch.no_grad():
            for name, tensor in weights:
                self.policy.parameter(name).copy_(tensor)

    def remove_lora(self, number: int) -> None:
        """Do nothing: the next one takes its place."""

    def add_lora(self, request: Any) -> None:
        part = f"{self.policy.part}."
        tensors = {name.removeprefix(part): tensor for name, tensor in request.lora_tensors.items()}
        load_lora(self.policy.module, tensors, "default")


class Engine:
    """What verl-omni's server calls of vLLM-Omni's `AsyncOmni`."""

    default_sampling_params_list: ClassVar[list[Any]] = [None]

    def __init__(self, model: Any) -> None:
        self.tokenizer = model.tokenizer
        scheduler = find_adapter_class(model).build_scheduler(model)
        schedule = Schedule(from_scheduler(scheduler), scheduler.timesteps.float())
        lora = (model.lora_rank, model.lora_alpha, model.target_modules)
        self.policy = omni_rollouts.Policy(Path(model.local_path), schedule, *lora)
        self.worker, self.lock = Worker(self.policy), threading.Lock()

    async def collective_rpc(self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None) -> None:
        if method not in ("sleep", "wake_up"):
            await asyncio.to_thread(self.alone, getattr(self.worker, method), *args, **(kwargs or {}))

    def alone(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return the result of a call while no other one reads or writes the weights."""
        with self.lock:
            return call(*args, **options)

    async def generate(self, *, prompt: Any, request_id: str, sampling_params_list: Any) -> Any:
        params = sampling_params_list[-1]
        text = self.tokenizer.decode(prompt["prompt_token_ids"], skip_special_tokens=True).strip()
        negative = prompt.get("negative_prompt_ids")
        opposed = None if negative is None else self.tokenizer.decode(negative, skip_special_tokens=True).strip()
        made = await asyncio.to_thread(self.alone, self.policy.sample, text, opposed, params)
        torch.save(made._asdict(), Path(os.environ["FLUVIAL_ROLLOUTS"]) / f"{params.global_steps}-{params.seed}.pt")
        yield SimpleNamespace(
            images=[made.image],
            trajectory_latents=made.latents,
            trajectory_timesteps=made.timesteps,
            trajectory_log_probs=made.log_probs,
            multimodal_output={"metadata": {"prompt_embeddings": made.conditioning}},
        )

    async def list_loras(self) -> tuple[int, ...]:
        return ()

    async def reset_caches(self, **_: Any) -> None:
        """Do nothing: there are none."""

    reset_prefix_cache = reset_mm_cache = reset_encoder_cache = reset_caches


class Server(vLLMOmniHttpServer):
    """verl-omni's server; neither vLLM's command line nor its HTTP server is started."""

    async def launch_server(self, **_: Any) -> None:
        self.engine, self._server_port = Engine(self.model_config), self._master_port


class Replica(vLLMOmniReplica):
    """verl-omni's replica of `Server`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.server_class = ray.remote(Server)

    def _get_server_name_prefix(self) -> str:
        return "fluvial_"
