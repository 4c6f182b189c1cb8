"""verl on the CPU: the platform that it lacks, and the name of a rollout that fluvial answers.

verl imports this module in each of its processes (VERL_USE_EXTERNAL_MODULES).
"""

from functools import partial
from typing import Any

import torch
import verl.utils.distributed
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

ROLLOUT = "fluvial"


def nothing(*_: Any) -> None:
    """Do nothing: there is no device to wait for, and no memory of it."""


class Cpu(PlatformCUDA):
    """The CPU in the place of a GPU; Ray's resource keeps its name."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def communication_backend_name(self) -> str:
        return "gloo"

    def is_ipc_supported(self) -> bool:
        return False

    set_allocator_settings = synchronize = empty_cache = manual_seed = manual_seed_all = nothing


def replica() -> Any:
    from workers.verl_rollout import Replica

    return Replica


set_platform(Cpu())
# verl knows torch.cpu, and calls functions that it lacks.
vars(torch.cpu).update(empty_cache=nothing, ipc_collect=nothing)
vars(torch.cpu).update(memory_allocated=lambda *_: 0, memory_reserved=lambda *_: 0)
# verl names a backend for the CPU and one for its device, and torch refuses two of one device.
verl.utils.distributed.initialize_global_process_group_ray = partial(
    verl.utils.distributed.initialize_global_process_group_ray, backend="cpu:gloo"
)
# Weights go to a rollout by verl's own adapter, as those of vLLM-Omni do.
_ROLLOUT_REGISTRY[(ROLLOUT, "async")] = "verl.workers.rollout.vllm_rollout.ServerAdapter"
RolloutReplicaRegistry.register(ROLLOUT, replica)
