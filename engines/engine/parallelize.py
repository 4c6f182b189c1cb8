"""Preparation and sharding of a module over the world: one small function per step."""

import os
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from fluvial.engines.attention import set_attention, split_tokens
from fluvial.engines.engine.config import DTYPES, EngineConfig
from fluvial.engines.engine.world import World
from fluvial.engines.errors import UsageError
from fluvial.engines.offload import call_with_offload, list_frozen_tensors
from fluvial.models.device import is_accelerator
from fluvial.models.lora import HEADS, is_adapter
from fluvial.models.quantised import quantise_linear
from fluvial.models.routing import Routed

# Operations whose results selective checkpointing stores: expensive, and few per block. Every second matrix product is
# stored, too.
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_attention_math.default,
}
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a module: those named by diffusers or transformers, else the entries of its lists.

    Models of diffusers and transformers list the classes of their blocks in `_no_split_modules`. In other modules each entry
    of an outermost nn.ModuleList is a block. Blocks without parameters are skipped. A module without blocks is one unit.
    """
    classes = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    blocks: list[nn.Module] = []

    def visit(part: nn.Module, *, is_entry: bool) -> None:
        is_container = isinstance(part, nn.ModuleList | nn.ModuleDict)  # has no forward
        if (type(part).__name__ in classes if classes else is_entry and not is_container) and part is not module:
            if any(True for _ in part.parameters()):
                blocks.append(part)
            return
        for child in part.children():
            visit(child, is_entry=isinstance(part, nn.ModuleList))

    visit(module, is_entry=False)
    return list(dict.fromkeys(blocks))


def parallelize(module: nn.Module, blocks: Sequence[nn.Module], config: EngineConfig, world: World) -> nn.Module:
    """Prepare a module in place, shard it unless it `is_whole`, and return it on its device.

    Each block is a unit of communication. Parameters on the meta device stay there, sharded, until `load_weights`.

    Raises:
        UsageError: the configuration does not fit the module or the ranks.
    """
    if config.attention is not None or config.ring > 1:
        set_attention(module, config.attention or "_native_flash")
    if config.context_parallel > 1:
        mesh = world.new_mesh((world.data_size, config.ring, world.sequence // config.ring), ("dp", "ring", "ulysses"))
        split_tokens(module, world.sequence, mesh, config.ring, rank=world.rank, size=world.size, device=world.device)
    for field in ("checkpointing", "compile") if not blocks else ():
        if getattr(config, field) not in ("none", "auto", False):
            hint = f"{type(module).__name__} has no repeated blocks; leave it out"
            raise UsageError(f"engine.{field}", getattr(config, field), hint=hint)
    dtype = config.compute_dtype(world.device)
    cast_samples(module, dtype)
    if config.compiles(world.device):
        compile_blocks(blocks)
    checkpoint_blocks(blocks, config)
    quantise_base(module, blocks, config, dtype)
    _move(module, on_host_tensors(module, blocks, config), config, world.device, frozen=dtype)
    # Some of diffusers' blocks return views. FSDP2 warns of in-place operations on them, which these models do not use.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for part in module.modules():
        if isinstance(part, Routed):
            part.ranks = world.size
    if is_whole(module, config, ranks=world.size):
        return module
    if config.swaps_blocks:
        hint = f"`engine.offload` is {config.offload}, with which every rank computes with whole weights"
        raise UsageError("engine.replicas", config.replicas, "auto", hint)
    # FSDP2 would cast all inputs, but timesteps and rotary embeddings need more precision than bfloat16. The module's
    # inputs are cast above; its blocks get the dtypes of a module loaded in bfloat16.
    policy = MixedPrecisionPolicy(dtype, DTYPES[config.reduce], cast_forward_inputs=False)
    mesh = world.hybrid_mesh(replicas(module, config, ranks=world.size))
    offloads = config.offload == "always"
    for unit in [*blocks, module]:
        fully_shard(
            unit,
            mesh=mesh,
            # A head reads features within the pass, where its gradient enters, so parameters outside blocks stay gathered.
            reshard_after_forward=config.comm == "reshard" and not hasattr(unit, HEADS),
            mp_policy=policy,
            offload_policy=CPUOffloadPolicy(pin_memory=is_accelerator(world.device)) if offloads else OffloadPolicy(),
        )
    for unit in [*blocks, module]:
        assert isinstance(unit, FSDPModule)
        # The engine divides by one global count; a mean over ranks would weigh uneven ranks equally.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    return module


def replicas(module: nn.Module, config: EngineConfig, *, ranks: int) -> int:
    """Return the number of copies of a module, with "auto" resolved.

    If only adapters are trained, gathering the frozen weights for an update takes as much memory as a full copy, in addition
    to the shards. So "auto" gives every rank a full copy if no FSDP2 is needed for it.
    """
    if config.replicas != "auto":
        return config.replicas
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    adapts = bool(trained) and all(is_adapter(name) for name in trained)
    gathers = config.comm == "keep" and config.context_parallel == 1 and config.offload != "always"
    return ranks if (adapts and gathers) or config.swaps_blocks else 1


def is_whole(module: nn.Module, config: EngineConfig, *, ranks: int) -> bool:
    """Return whether each rank has all parameters on its device, so that FSDP2 is not needed."""
    return replicas(module, config, ranks=ranks) == ranks and config.offload != "always"


def cast_samples(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast a module's floating-point inputs to the compute dtype, except numbers per sample.

    The inputs of linear layers that diffusers would keep in float32 are cast, too; a network lists these layers' parents in
    `_keep_in_fp32_modules`. Some, such as Kandinsky 5's timestep embedding, create a float32 input, which fails because the
    layer computes in the same dtype as all others.
    """

    def cast(value: Any) -> Any:
        samples = isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1
        return value.to(dtype) if samples else value

    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return optree.tree_map(cast, args), optree.tree_map(cast, kwargs)

    if dtype != torch.float32:
        module.register_forward_pre_hook(hook, with_kwargs=True)
        kept = {name for part in module.modules() for name in getattr(part, "_keep_in_fp32_modules", None) or ()}
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Linear) and kept & {*name.split(".")}:
                layer.register_forward_pre_hook(lambda layer, args: tuple(cast(value) for value in args))


def quantise_base(module: nn.Module, blocks: Sequence[nn.Module], config: EngineConfig, dtype: torch.dtype) -> None:
    """Quantise the frozen linear layers of the blocks in place, if `engine.base` names a format.

    Layers outside the blocks (input and timestep embeddings, last projection) are a small part of a network and stay in the
    compute dtype.

    Raises:
        UsageError: there is no frozen linear layer.
    """
    if config.base == "auto":
        return
    if not sum(quantise_linear(block, config.base, dtype) for block in blocks or [module]):
        hint = f"no linear layer in the blocks of {type(module).__name__} is frozen; train adapters, or set it to auto"
        raise UsageError("engine.base", config.base, hint=hint)


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile each block's forward in place; equal blocks share one compiled region.

    Sharding and checkpointing of a block stay outside of the region, in eager mode. Programs are cached in
    TORCHINDUCTOR_CACHE_DIR, by default in the user's cache folder: PyTorch's default would not survive a reboot.
    """
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fluvial" / "compiled"
        with suppress(OSError):  # home is not writable: use PyTorch's default
            folder.mkdir(parents=True, exist_ok=True)
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    for block in blocks:
        block.forward = torch.compile(block.forward)


def count_programs() -> int:
    """Return the number of programs compiled by torch.compile in this process, recompilations included."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def checkpoint_blocks(blocks: Sequence[nn.Module], config: EngineConfig) -> None:
    """Wrap blocks' forward in place to store only their inputs, or also expensive results, for the backward pass.

    The wrapped forward lies inside the sharding, so recomputing it gathers nothing.

    Raises:
        UsageError: `engine.checkpointed` exceeds the number of blocks.
    """
    if config.checkpointing == "none":
        return
    if config.checkpointed is not None and config.checkpointed > len(blocks):
        raise UsageError("engine.checkpointed", config.checkpointed, f"at most the {len(blocks)} blocks of the network")
    contexts = _make_selective_contexts if config.checkpointing == "selective" else noop_context_fn
    for block in blocks[: config.checkpointed]:
        block.forward = partial(_checkpoint, block.forward, contexts)
        if config.checkpointing == "host":
            block.forward = partial(call_with_offload, block.forward)


def _checkpoint(forward: Callable[..., Any], contexts: Callable[[], tuple[Any, Any]], *args: Any, **kwargs: Any) -> Any:
    """Call a forward pass, and store only its inputs for the backward pass.

    Inputs that need a gradient (positional, keyword, or in lists) are saved tensors, which `call_with_offload` moves.
    Others, such as rotary embeddings, are shared by the blocks, so that copies would only cost memory.
    """
    leaves, structure = optree.tree_flatten((args, kwargs), none_is_leaf=True)
    saved = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad}
    others = [None if i in saved else leaf for i, leaf in enumerate(leaves)]
    places = tuple(saved)

    def run(*tensors: Tensor) -> Any:
        inputs = others.copy()
        for place, tensor in zip(places, tensors, strict=True):
            inputs[place] = tensor
        positional, named = optree.tree_unflatten(structure, inputs)
        return forward(*positional, **named)

    return checkpoint(run, *saved.values(), use_reentrant=False, context_fn=contexts)


def _make_selective_contexts() -> tuple[Any, Any]:
    """Return the contexts of a block's forward pass and of its recomputation."""
    products = {True: 0, False: 0}  # counted separately in the recomputation, so that both passes store the same ones

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if operation in PRODUCTS:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def swapped_blocks(module: nn.Module, blocks: Sequence[nn.Module], config: EngineConfig) -> list[nn.Module]:
    """Return the blocks whose frozen weights are on the host, evenly spread so that copies overlap with computation.

    Raises:
        UsageError: `engine.offload` exceeds the number of blocks, or no block has frozen weights.
    """
    if not config.swaps_blocks:
        return []
    number = len(blocks) if config.offload == "blocks" else int(config.offload)
    if number > len(blocks):
        raise UsageError("engine.offload", number, f"at most the {len(blocks)} blocks of the network")
    if not any(list_frozen_tensors(block) for block in blocks):
        hint = f"no block of {type(module).__name__} has frozen weights; train adapters, or leave it out"
        raise UsageError("engine.offload", config.offload, hint=hint)
    return [blocks[place * len(blocks) // number] for place in range(number)]


def on_host_tensors(module: nn.Module, blocks: Sequence[nn.Module], config: EngineConfig) -> set[int]:
    """Return the ids of the tensors that stay on the host."""
    if config.offload == "always":
        return {id(parameter) for parameter in module.parameters()}
    return {id(tensor) for block in swapped_blocks(module, blocks, config) for tensor in list_frozen_tensors(block)}


def _move(
    module: nn.Module, stay: Collection[int], config: EngineConfig, device: torch.device, *, frozen: torch.dtype
) -> None:
    """Move parameters and buffers with values to the device, except those that stay on the host.

    Frozen parameters are cast to `frozen`, trained ones to the dtype of the masters. Adapters stay in float32: in bfloat16 a
    slow average would never move.
    """
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and not is_adapter(name):
            parameter.data = parameter.data.to(DTYPES[config.masters] if parameter.requires_grad else frozen)
    module._apply(lambda tensor: tensor if tensor.is_meta or id(tensor) in stay else tensor.to(device))
