"""Shape aliases, written once: `b` is the batch, `*event` the shape of one sample."""

from jaxtyping import Float, Integer
from torch import Tensor

PerSample = Float[Tensor, " b"]  # one number per sample
Samples = Float[Tensor, "b *event"]  # a batch of samples, noises or velocities
Scalar = Float[Tensor, " b"] | Float[Tensor, ""] | float  # one number per sample, or one for all of them
Grid = Float[Tensor, " t_plus_1"]  # a schedule: T+1 noise levels, T steps
PerStep = Float[Tensor, "b s"]  # one number per sample and recorded step
Ids = Integer[Tensor, " b"]  # one integer per sample
