"""Shape aliases, written once: `b` is the batch, `*event` the shape of one sample; and copies from host to device."""

import torch
from jaxtyping import Float, Integer
from torch import Tensor

PerSample = Float[Tensor, " b"]  # one number per sample
Samples = Float[Tensor, "b *event"]  # a batch of samples, noises or velocities
Scalar = Float[Tensor, " b"] | Float[Tensor, ""] | float  # one number per sample, or one for all of them
Level = Float[Tensor, " b"] | Float[Tensor, "b r"] | Float[Tensor, ""] | float  # also one per row of samples `[B, R, ...]`
Grid = (
    Float[Tensor, " t_plus_1"] | Float[Tensor, "t_plus_1 r"]
)  # a schedule: T+1 noise levels, or those of each row; T steps
PerStep = Float[Tensor, "b s"]  # one number per sample and recorded step
Ids = Integer[Tensor, " b"]  # one integer per sample


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; the tensor itself if it is there already.

    A copy from pageable memory of the host to an accelerator blocks the host until the device has done all that it was asked
    before. From pinned memory it only joins the queue, and PyTorch keeps that memory until it is copied.
    """
    if tensor.device.type != "cpu" or device.type in ("cpu", "meta"):
        return tensor.to(device)
    pinned = tensor.contiguous().pin_memory()  # with the strides of an expanded tensor, PyTorch refuses to write to it
    return pinned.to(device, non_blocking=True)
