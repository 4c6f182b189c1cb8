"""Attention of diffusers models: the choice of its backend, and splitting of a sample's tokens over ranks.

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

SHAPES = ("shape", "size of tensor")  # words in torch's errors about mismatched shapes


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
    # Models with older attention ignore the setting, without an error from diffusers.
    if not any(getattr(processor, "_attention_backend", None) == backend for processor in _list_processors(module)):
        hint = f"{type(module).__name__} does not choose its attention through diffusers' backends; remove it"
        raise UsageError("engine.attention", backend, hint=hint)


def split_tokens(
    module: nn.Module, degree: int, mesh: DeviceMesh, ring: int = 1, *, rank: int, size: int, device: torch.device
) -> None:
    """Split the tokens of each sample over groups of `degree` neighbouring ranks, by diffusers.

    Every rank of a group takes whole samples and returns whole predictions. Its gradient is that of its own tokens, so the
    sum over the ranks is the gradient of the samples.

    Args:
        module: diffusers model.
        degree: number of ranks that share a sample.
        mesh: mesh of all ranks with the dimensions "dp", "ring" and "ulysses".
        ring: ranks per ring, which send keys and values around; rings exchange heads. The module's attention backend must
            return the log-sum-exp, e.g. _native_flash.
        rank, size, device: rank of this process, number of ranks, and device.

    Raises:
        UsageError: diffusers has no plan for the model, or a plan that splits each layer separately, or `degree` does not
            divide the heads.
    """
    from diffusers import ContextParallelConfig
    from diffusers.models._modeling_parallel import ParallelConfig
    from diffusers.models.modeling_utils import ModelMixin

    if isinstance(module, nn.ModuleDict):  # networks for different ranges of noise levels
        for network in module.values():
            split_tokens(network, degree, mesh, ring=ring, rank=rank, size=size, device=device)
        return
    name = type(module).__name__
    if not isinstance(module, ModelMixin) or module._cp_plan is None:
        raise UsageError("engine.context_parallel", degree, hint=f"diffusers has no plan for {name}; set it to 1")
    if sum("." in layer and not isinstance(splits, dict) for layer, splits in module._cp_plan.items()) > 1:
        hint = f"diffusers splits {name} layer by layer, so that gradients of unsplit tensors between them would be summed"
        raise UsageError("engine.context_parallel", degree, hint=f"{hint} over the ranks; set it to 1")
    heads = module.config.get("num_attention_heads")
    if heads is not None and heads % (degree // ring):
        hint = f"a ring of {ring} ranks" if ring > 1 else "or part of it in `engine.ring`"
        raise UsageError("engine.context_parallel", degree, f"a divisor of the {heads} heads of {name}, {hint}")
    if ring > 1:
        _unpack_once()
    parallel = ParallelConfig(context_parallel_config=ContextParallelConfig(ring, degree // ring))
    parallel.setup(rank, size, device, mesh=mesh["ring", "ulysses"])
    # diffusers computes the device modulo the number of accelerators, which is 0 on a CPU.
    module._resolve_parallel_config = lambda config: config
    try:
        module.enable_parallelism(config=parallel)
    except ValueError as error:  # an attention backend without support
        raise UsageError("engine.context_parallel", degree, hint=f"{name} cannot be split; {error}") from error
    module._parallel_config = parallel
    dims = {
        name: (split.split_dim, split.expected_dims)
        for layer, splits in module._cp_plan.items()
        if isinstance(splits, dict)
        for name, split in splits.items()
        if isinstance(name, str) and not layer.startswith("pos_embed") and not split.split_output
    }
    checked = partial(_check_tokens, module.forward, dims, degree, ring)
    module.forward = update_wrapper(checked, module.forward)  # modular pipelines read the signature


class _UnpackedOnce:
    """Context of a backward pass that unpacks its saved tensors once; activation checkpointing allows no more."""

    def __init__(self, context: Any) -> None:
        self._context, self.saved_tensors = context, context.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def _unpack_once() -> None:
    """Patch diffusers' ring attention to unpack its saved tensors once per backward pass, not at each step of the ring."""
    from diffusers.models.attention_dispatch import TemplatedRingAttention

    backward = TemplatedRingAttention.backward
    if not hasattr(backward, "unpacks_once"):

        def unpack_once(context: Any, *gradients: Tensor) -> Any:
            return backward(_UnpackedOnce(context), *gradients)

        unpack_once.unpacks_once = True  # type: ignore[attr-defined]
        TemplatedRingAttention.backward = staticmethod(unpack_once)


def _check_tokens(
    forward: Callable[..., Any],
    dims: Mapping[str, tuple[int, int | None]],
    degree: int,
    ring: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a module's forward; UsageError if its tokens cannot be split over `degree` ranks, or sent in a ring.

    `dims` has, for each split input, the dimension of the tokens and the number of dimensions.
    """
    advice = "which it does not divide: choose another resolution or length of prompts, or another degree"
    for name, (dim, expected) in dims.items():
        value = kwargs.get(name)
        # An input with other dimensions, e.g. a video before patching, is not split.
        if isinstance(value, Tensor) and expected in (None, value.ndim) and value.shape[dim] % degree:
            raise UsageError("engine.context_parallel", degree, hint=f"{name} has {value.shape[dim]} tokens, {advice}")
    try:
        return forward(*args, **kwargs)
    except AssertionError as error:  # diffusers asserts the sizes of tensors that it splits inside the module
        if "divisible by mesh size" not in str(error):
            raise
        raise UsageError("engine.context_parallel", degree, hint=f"a sample has a number of tokens, {advice}") from error
    except (RuntimeError, ValueError) as error:
        words = f"{error}\n".splitlines()[0]
        if ring > 1 and re.search("flash.?attention|attn_mask", str(error), re.IGNORECASE):  # without masks, or a kernel
            raise UsageError("engine.ring", ring, "1", f"the attention cannot be computed: {words}") from error
        if not any(word in str(error) for word in SHAPES):  # e.g. of a mask per head: a rank has only some heads
            raise
        hint = f"diffusers does not split all inputs of the attention ({words}); set it to 1"
        raise UsageError("engine.context_parallel", degree, hint=hint) from error


def _list_processors(module: nn.Module) -> list[Any]:
    """Return the attention processors of a diffusers model."""
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_processor import Attention, MochiAttention

    layers = (Attention, MochiAttention, AttentionModuleMixin)
    return [layer.processor for layer in module.modules() if isinstance(layer, layers)]
