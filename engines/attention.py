"""Attention of diffusers' models: its backend, and the tokens of a sample split over ranks.

Ranks exchange tokens for heads (Ulysses, arXiv 2309.14509), send keys and values around a ring (2310.01889), or both
(USP, 2405.07719).
"""

import re
from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fluvial.engines.errors import UsageError, convert_errors

SHAPES = ("shape", "size of tensor")  # words of torch's errors about tensors that do not fit together


def set_attention(module: nn.Module, backend: str) -> None:
    """Set the module's attention to one of diffusers' backends.

    Raises:
        UsageError: the backend is not available, or the module does not choose its attention through diffusers.
    """
    from diffusers.models.modeling_utils import ModelMixin

    with convert_errors(
        UsageError, ValueError, ImportError, RuntimeError, says=f"`engine.attention` is {backend}, which cannot be used"
    ):
        if isinstance(module, ModelMixin):
            module.set_attention_backend(backend)
    # Models with older attention ignore the setting, and diffusers does not say so.
    if not any(getattr(processor, "_attention_backend", None) == backend for processor in _processors(module)):
        hint = f"{type(module).__name__} does not choose its attention through diffusers' backends; leave it out"
        raise UsageError("engine.attention", backend, hint=hint)


def split_tokens(
    module: nn.Module, degree: int, mesh: DeviceMesh, ring: int = 1, *, rank: int, size: int, device: torch.device
) -> None:
    """Split the tokens of each sample over groups of `degree` neighbouring ranks, by diffusers.

    Every rank of a group takes whole samples and returns whole predictions. Its gradient is the part of its tokens, so the
    sum over all ranks is the gradient of the samples.

    Args:
        module: diffusers model.
        degree: number of ranks that share a sample.
        mesh: mesh of all ranks with the dimensions "dp", "ring" and "ulysses".
        ring: number of them that send keys and values around; the others exchange heads. Attention must then return its
            log-sum-exp, so the module's backend has to be one that does, such as _native_flash.
        rank, size, device: this process among the others.

    Raises:
        UsageError: the model has no plan for it, or one that splits each layer apart, or `degree` does not divide its heads.
    """
    from diffusers import ContextParallelConfig
    from diffusers.models._modeling_parallel import ParallelConfig
    from diffusers.models.modeling_utils import ModelMixin

    if isinstance(module, nn.ModuleDict):  # networks that take turns by the noise level
        for network in module.values():
            split_tokens(network, degree, mesh, ring=ring, rank=rank, size=size, device=device)
        return
    name = type(module).__name__
    if not isinstance(module, ModelMixin) or module._cp_plan is None:
        raise UsageError("engine.context_parallel", degree, hint=f"diffusers has no plan for {name}; set it to 1")
    if sum("." in place and not isinstance(splits, dict) for place, splits in module._cp_plan.items()) > 1:
        hint = f"diffusers splits {name} layer by layer, so that gradients of what is whole between them would be summed"
        raise UsageError("engine.context_parallel", degree, hint=f"{hint} over the ranks; set it to 1")
    heads = module.config.get("num_attention_heads")
    if heads is not None and heads % (degree // ring):
        hint = f"a ring of {ring} ranks" if ring > 1 else "or part of it in `engine.ring`"
        raise UsageError("engine.context_parallel", degree, f"a divisor of the {heads} heads of {name}, {hint}")
    if ring > 1:
        _unpack_once()
    parallel = ParallelConfig(context_parallel_config=ContextParallelConfig(ring, degree // ring))
    parallel.setup(rank, size, device, mesh=mesh["ring", "ulysses"])
    # Diffusers would look up the device modulo the number of accelerators, which is 0 on a CPU.
    module._resolve_parallel_config = lambda config: config
    try:
        module.enable_parallelism(config=parallel)
    except ValueError as error:  # an attention backend that cannot
        raise UsageError("engine.context_parallel", degree, hint=f"{name} cannot be split; {error}") from error
    module._parallel_config = parallel
    dims = {
        name: (split.split_dim, split.expected_dims)
        for place, splits in module._cp_plan.items()
        if isinstance(splits, dict)
        for name, split in splits.items()
        if isinstance(name, str) and not place.startswith("pos_embed") and not split.split_output
    }
    whole = partial(_with_whole_tokens, module.forward, dims, degree, ring)
    module.forward = update_wrapper(whole, module.forward)  # modular pipelines pass what its signature takes


class _SavedOnce:
    """Context of a backward pass whose saved tensors are unpacked once, as activation checkpointing allows."""

    def __init__(self, context: Any) -> None:
        self._context, self.saved_tensors = context, context.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def _unpack_once() -> None:
    """Let diffusers' ring attention unpack its saved tensors once per backward pass, not at each step of the ring."""
    from diffusers.models.attention_dispatch import TemplatedRingAttention

    backward = TemplatedRingAttention.backward
    if not hasattr(backward, "unpacks_once"):

        def unpack_once(context: Any, *gradients: Tensor) -> Any:
            return backward(_SavedOnce(context), *gradients)

        unpack_once.unpacks_once = True  # type: ignore[attr-defined]
        TemplatedRingAttention.backward = staticmethod(unpack_once)


def _with_whole_tokens(
    forward: Callable[..., Any],
    dims: Mapping[str, tuple[int, int | None]],
    degree: int,
    ring: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a module's forward, or raise UsageError if its tokens cannot be split over `degree` ranks, or sent in a ring.

    `dims` has the dimension of the tokens, and the number of dimensions, of each input that is split.
    """
    advice = "which it does not divide: choose another resolution or length of prompts, or another degree"
    for name, (dim, expected) in dims.items():
        value = kwargs.get(name)
        # An input with other dimensions, e.g. a video before patching, is not split.
        if isinstance(value, Tensor) and expected in (None, value.ndim) and value.shape[dim] % degree:
            raise UsageError("engine.context_parallel", degree, hint=f"{name} has {value.shape[dim]} tokens, {advice}")
    try:
        return forward(*args, **kwargs)
    except AssertionError as error:  # diffusers asserts what it splits within the module
        if "divisible by mesh size" not in str(error):
            raise
        raise UsageError("engine.context_parallel", degree, hint=f"a sample has a number of tokens, {advice}") from error
    except (RuntimeError, ValueError) as error:
        words = f"{error}\n".splitlines()[0]
        if ring > 1 and re.search("flash.?attention|attn_mask", str(error), re.IGNORECASE):  # without masks, or a kernel
            raise UsageError("engine.ring", ring, "1", f"the attention cannot be computed: {words}") from error
        if not any(
            word in str(error) for word in SHAPES
        ):  # such as those of a mask per head, since a rank has some heads alone
            raise
        hint = f"diffusers does not split all that attention is given ({words}); set it to 1"
        raise UsageError("engine.context_parallel", degree, hint=hint) from error


def _processors(module: nn.Module) -> list[Any]:
    """Return the attention processors of a diffusers model."""
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_processor import Attention, MochiAttention

    layers = (Attention, MochiAttention, AttentionModuleMixin)
    return [layer.processor for layer in module.modules() if isinstance(layer, layers)]
