"""Shape aliases (`b` is the batch, `*event` the shape of one sample), and non-blocking copies from host to device."""

import torch
from jaxtyping import Float, Integer
from torch import Tensor

PerSample = Float[Tensor, " b"]  # one number per sample
Samples = Float[Tensor, "b *event"]  # a batch of samples, noises or velocities
Scalar = Float[Tensor, " b"] | Float[Tensor, ""] | float  # one number per sample, or one for all of them
Level = Float[Tensor, " b"] | Float[Tensor, "b r"] | Float[Tensor, ""] | float  # or one per block of samples `[B, R, ...]`
Grid = Float[Tensor, " t_plus_1"] | Float[Tensor, "t_plus_1 r"]  # T+1 noise levels of a schedule, shared or per block
PerStep = Float[Tensor, "b s"]  # one number per sample and recorded step
Ids = Integer[Tensor, " b"]  # one integer per sample


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, without a copy if it is already there.

    A copy from pageable host memory to an accelerator blocks the host until the device has finished all queued work. From
    pinned memory the copy is only queued, and PyTorch keeps that memory alive until it has completed.
    """
    if tensor.device.type != "cpu" or device.type in ("cpu", "meta"):
        return tensor.to(device)
    pinned = tensor.contiguous().pin_memory()  # PyTorch cannot write to the strides of an expanded tensor
    return pinned.to(device, non_blocking=True)
