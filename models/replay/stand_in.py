"""Stand-in for a transformer, which returns noise at no cost, and a scheduler that returns given samples."""

import copy
import inspect
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any
from unittest.mock import patch

import optree
import torch
from torch import Tensor

from fluvial.models.replay.start import WithoutNoise


def make_stand_in(network: Any, on: torch.device, compute: torch.dtype) -> Any:
    """Return the empty network with another device and dtype, whose forward pass returns noise.

    The noise has the shapes and the type of output of the network itself, which runs on the meta device once for each kind
    of input. A network that reads values, which the meta device does not have, returns one tensor like its input.
    It is `unlike` a batch if the network does not take the shapes of its inputs: PRX's guidance is for one sample at a time.
    """
    kind, source = type(network), torch.Generator().manual_seed(0)
    empty = copy.deepcopy(network).to("meta")
    known: dict[Any, Any] = {}

    def noise(leaf: Any) -> Any:
        """Return noise that lies mostly along one direction, so that guidance makes some rows longer and some shorter."""
        if not isinstance(leaf, Tensor):
            return leaf
        shape = tuple(leaf.shape)
        along = torch.randn(shape[-1:], generator=torch.Generator().manual_seed(0))  # the same in each call
        rows, rest = (torch.randn(size, generator=source) for size in ((*shape[:-1], 1), shape))
        return (rows * along + 0.03 * rest).to(on, compute)

    class StandIn(kind):  # type: ignore[misc, valid-type]
        device, dtype, unlike = property(lambda self: on), property(lambda self: compute), False

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            signature = _signature((args, kwargs))
            if signature not in known:
                known[signature], unlike = _probe_output(empty, args, kwargs)
                type(self).unlike |= unlike
            output = known[signature]
            if not hasattr(output, "to_tuple"):
                return optree.tree_map(noise, output)
            return type(output)(**{name: optree.tree_map(noise, value) for name, value in output.items()})

    network.__class__ = StandIn
    forward: Any = StandIn.forward
    forward.__signature__ = inspect.signature(kind.forward)  # modular pipelines pass what it takes
    return network


def copy_empty(network: Any) -> Any:
    """Return a network of diffusers of the same settings without values."""
    with torch.device("meta"):
        return type(network).from_config(network.config)


def answering(scheduler: Any, *latents: Tensor) -> Any:
    """Return a scheduler with the settings of another one, whose steps return the given samples.

    Several are pieces of the same samples: a copy of the scheduler returns those that follow.
    """
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteSchedulerOutput

    class Answer(type(scheduler)):  # type: ignore[misc]
        def scale_model_input(self, sample: Tensor, timestep: Any = None) -> Tensor:
            return sample

        def step(self, *args: Any, return_dict: bool = True, **kwargs: Any) -> Any:
            return FlowMatchEulerDiscreteSchedulerOutput(prev_sample=latents[0]) if return_dict else (latents[0],)

        def __deepcopy__(self, memo: Any) -> Any:
            return answering(scheduler, *latents[1:])

    return Answer.from_config(scheduler.config)


UNLIKE = ("must match the size", "Attempting to broadcast")  # in torch's messages of shapes that do not fit


class _Stopped(Exception):
    """A run of a pipeline has come to its first step."""


def first_samples(pipe: Any, asked: dict[str, Any]) -> Tensor:
    """Return the samples before the first step of a run of a pipeline whose noise is zero."""
    samples = list[Tensor]()

    class Stop(type(pipe.scheduler)):  # type: ignore[misc]
        def step(self, v: Tensor, t: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
            samples.append(sample.detach().clone())
            raise _Stopped

    scheduler_before = pipe.scheduler
    pipe.scheduler = Stop.from_config(scheduler_before.config)
    try:
        with suppress(_Stopped), WithoutNoise():
            pipe(**asked)
    finally:
        pipe.scheduler = scheduler_before
    return samples[0]


def split_pieces(latents: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return the pieces of flat samples `[B, n]`, each `[B, *shape]`; the samples themselves without shapes."""
    if not shapes:
        return [latents]
    pieces = latents.split([shape.numel() for shape in shapes], dim=1)
    return [piece.unflatten(1, shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _signature(arguments: Any) -> Any:
    leaves, tree = optree.tree_flatten(arguments)
    return tree, tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)


@torch.no_grad()
def _probe_output(empty: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
    """Return the output of a network on the meta device, and whether it refuses the inputs' shapes, see `make_stand_in`."""
    try:
        meta = optree.tree_map(lambda leaf: _on_meta(leaf), (args, kwargs))
        with patch.object(torch, "autocast", lambda *_, **__: nullcontext()):  # which does not know the meta device
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
            shape[1] = channels  # more for a learned variance, fewer where an image is joined to the sample
        return (torch.empty(shape, device="meta"),), unlike


def _on_meta(leaf: Any) -> Any:
    """Return an input on the meta device; floating-point numbers in the dtype of the empty network."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.to("meta", torch.float32 if leaf.is_floating_point() else leaf.dtype)
