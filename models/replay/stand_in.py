"""Stand-ins of a pipeline's parts: a transformer that returns noise, and a scheduler that returns given samples."""

import copy
import inspect
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any
from unittest.mock import patch

import optree
import torch
from torch import Tensor

from fluvial.models.replay.start import ZeroNoise


def make_stand_in(network: Any, on: torch.device, compute: torch.dtype) -> Any:
    """Turn an empty network into a stand-in whose forward pass returns noise, and return it.

    The noise has the output type and shapes of the network, which runs on the meta device once per kind of input. A network
    that reads values, which meta tensors lack, returns one tensor shaped like its input. The attribute `unlike` becomes true
    if the network refuses the shapes of its inputs: PRX's guidance takes one sample at a time.
    `on` and `compute` are the device and dtype that the stand-in reports, and that its noise has.
    """
    kind, source = type(network), torch.Generator().manual_seed(0)
    empty = copy.deepcopy(network).to("meta")
    outputs: dict[Any, Any] = {}  # on the meta device, by kind of input

    def draw_noise(leaf: Any) -> Any:
        """Return noise that lies mostly along one direction, so that guidance makes some rows longer and some shorter."""
        if not isinstance(leaf, Tensor):
            return leaf
        shape = tuple(leaf.shape)
        direction = torch.randn(shape[-1:], generator=torch.Generator().manual_seed(0))  # the same in each call
        lengths, rest = (torch.randn(size, generator=source) for size in ((*shape[:-1], 1), shape))
        return (lengths * direction + 0.03 * rest).to(on, compute)

    class StandIn(kind):  # type: ignore[misc, valid-type]
        device, dtype, unlike = property(lambda self: on), property(lambda self: compute), False

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            inputs = _describe_inputs((args, kwargs))
            if inputs not in outputs:
                outputs[inputs], unlike = _probe_output(empty, args, kwargs)
                type(self).unlike |= unlike
            output = outputs[inputs]
            if not hasattr(output, "to_tuple"):
                return optree.tree_map(draw_noise, output)
            return type(output)(**{name: optree.tree_map(draw_noise, value) for name, value in output.items()})

    network.__class__ = StandIn
    forward: Any = StandIn.forward
    forward.__signature__ = inspect.signature(kind.forward)  # modular pipelines pass the arguments of its signature
    return network


def copy_empty(network: Any) -> Any:
    """Return a network of diffusers with the same settings, on the meta device."""
    with torch.device("meta"):
        return type(network).from_config(network.config)


def make_answering_scheduler(scheduler: Any, *latents: Tensor) -> Any:
    """Return a scheduler with the settings of another one, whose steps return the given samples.

    Several tensors are pieces of the same samples: a copy of the scheduler returns the piece that follows.
    """
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteSchedulerOutput

    class AnsweringScheduler(type(scheduler)):  # type: ignore[misc]
        def scale_model_input(self, sample: Tensor, timestep: Any = None) -> Tensor:
            return sample

        def step(self, *args: Any, return_dict: bool = True, **kwargs: Any) -> Any:
            return FlowMatchEulerDiscreteSchedulerOutput(prev_sample=latents[0]) if return_dict else (latents[0],)

        def __deepcopy__(self, memo: Any) -> Any:
            return make_answering_scheduler(scheduler, *latents[1:])

    return AnsweringScheduler.from_config(scheduler.config)


UNLIKE = ("must match the size", "Attempting to broadcast")  # in torch's messages of shapes that do not fit


class _Stopped(Exception):
    """End of a pipeline's run at its first step."""


def find_initial_samples(pipe: Any, arguments: dict[str, Any]) -> Tensor:
    """Return the samples before the first step of a pipeline's run with zeros for noise."""
    samples = list[Tensor]()

    class Stop(type(pipe.scheduler)):  # type: ignore[misc]
        def step(self, v: Tensor, t: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
            samples.append(sample.detach().clone())
            raise _Stopped

    scheduler_before = pipe.scheduler
    pipe.scheduler = Stop.from_config(scheduler_before.config)
    try:
        with suppress(_Stopped), ZeroNoise():
            pipe(**arguments)
    finally:
        pipe.scheduler = scheduler_before
    return samples[0]


def split_pieces(latents: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return the pieces of flat samples `[B, n]`, each `[B, *shape]`; without shapes, the samples as one piece."""
    if not shapes:
        return [latents]
    pieces = latents.split([shape.numel() for shape in shapes], dim=1)
    return [piece.unflatten(1, shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _describe_inputs(arguments: Any) -> Any:
    leaves, tree = optree.tree_flatten(arguments)
    return tree, tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)


@torch.no_grad()
def _probe_output(empty: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
    """Return the output of a network on the meta device, and whether it refuses the inputs' shapes, see `make_stand_in`."""
    try:
        meta = optree.tree_map(_to_meta, (args, kwargs))
        with patch.object(torch, "autocast", lambda *_, **__: nullcontext()):  # autocast does not support the meta device
            return empty(*meta[0], **meta[1]), False
    except (RuntimeError, NotImplementedError) as error:
        unlike = any(part in str(error) for part in UNLIKE)
        sample = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        if isinstance(sample, list):
            return ([torch.empty(one.shape, device="meta") for one in sample],), unlike
        shape = list(sample.shape)
        channels = empty.config.get("out_channels")
        # A sequence of tokens `[B, N, C]` keeps its shape.
        if isinstance(channels, int) and len(shape) > 3 and shape[1] == empty.config.get("in_channels"):
            shape[1] = channels  # more with a learned variance, fewer if an image is concatenated to the sample
        return (torch.empty(shape, device="meta"),), unlike


def _to_meta(leaf: Any) -> Any:
    """Return an input on the meta device; floating-point tensors in the dtype of the empty network, float32."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.to("meta", torch.float32 if leaf.is_floating_point() else leaf.dtype)
