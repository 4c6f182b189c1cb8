"""Plan of a training run: its memory by the engine's accounting, and the settings with which it fits."""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise, product
from typing import Any, Literal, NamedTuple

import optree
import torch
from rich.console import Console
from torch import Tensor, nn

from fluvial.core.checks import BATCH, FRAMES, GIBIBYTES, INDEX, PIXELS, check_fields
from fluvial.engines.engine.config import EngineConfig, OptimizerConfig
from fluvial.engines.engine.optimizers import OPTIMIZERS
from fluvial.engines.errors import UsageError, convert_errors, no_effect
from fluvial.engines.extensions.plan import memory
from fluvial.engines.extensions.plan.memory import Accounting, ActivationSpan, Phase
from fluvial.engines.run.jobs.settings import PipelineConfig, parse_bytes
from fluvial.engines.run.log.progress import table
from fluvial.engines.run.metrics import find_peaks
from fluvial.models import LoraConfig, add_lora
from fluvial.models.lora import find_lora_layers
from fluvial.models.pipelines.base import DECODE_CHUNK
from fluvial.models.shapes import MODELS, ModelShape, ModularShape, PassShape, find_model_shape, list_blocks
from fluvial.models.step_cache import FirstBlockCache, GuidanceCache, NoCache, StepCacheChoice

GIB = 2**30
GPU = torch.device("cuda")
Train = Literal["full", "lora"]
SIDE = 16  # the side of an image is a multiple of this number of pixels


@dataclass(frozen=True)
class ImageSize:
    """Size of the images, with the names that a run has; by default the model's.

    Args:
        height: Height of the images, in pixels; by default the width.
        width: Width of the images, in pixels; by default the height.
        frames: Number of frames of a video; by default 81, or 1 for a modular pipeline.
        call: Further arguments of a modular pipeline's call, as name=value.
    """

    height: int | None = None
    width: int | None = None
    frames: int | None = None
    call: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "pipeline", height=PIXELS, width=PIXELS, frames=FRAMES)

    @property
    def side(self) -> int | None:
        """Side of a square with as many pixels, rounded up to a multiple of `SIDE`; memory depends on their number only."""
        height, width = self.height or self.width, self.width or self.height
        return math.ceil(math.sqrt(height * width) / SIDE) * SIDE if height and width else None


@dataclass(frozen=True)
class PlanConfig:
    """Compute the memory of training a transformer on each GPU, without running it.

    Args:
        gpus: Total number of GPUs.
        train: Trained weights: full (all of them) or lora.
        micro_batch: Number of samples per forward pass; by default the model's.
        micro_batches: Number of micro-batches per update, on each GPU.
        reference: Keep a frozen copy for a KL term. LoRA needs none: its reference is the model without adapters.
        teachers: Number of teachers with their own weights, each a frozen copy; teachers that are adapters do not count.
        learners: Number of networks that learn: 2 with the fake network of DMD2 and TDM. Each further one has its own
            adapters, or weights with full fine-tuning, and moments.
        graphs: Number of forward passes whose activations a loss holds at once: 3 with the consistency loss of ac-dmd. They
            count as one pass of that many times the samples, which overestimates them with checkpointing.
        guidance: Compute both halves of classifier-free guidance in each forward pass.
        step_cache: Outputs that deterministic steps of a rollout reuse from earlier steps; the rollout holds them.
        merged: Generate rollouts with merged adapters, whose weights a rollout holds a second time.
        samples: Number of samples per rollout, on each GPU.
        steps: Number of stored steps per sample.
        schedule: Number of steps of a modular pipeline's schedule, by default that of the stored steps.
        fit: Memory of a GPU, e.g. 24GiB, instead of memory_gib: print the settings that fit into it, and what each saves.
        memory_gib: Memory of a GPU, in GiB.
        gpu: Name of the GPU as its driver reports it, for the bandwidth at which blocks are copied from the host.
        reserve_gib: Memory kept free for what is not counted, in GiB: CUDA and NCCL, gaps in the allocator, text encoders,
            rewards, and in an update the weights of the VAE.
        table: Print which settings fit on 1, 8 and 64 GPUs instead, for LoRA and for full fine-tuning.
        check: Make an update on this machine and compare its memory with the plan's; a CPU runs the built-in model only.
        pipeline: Size of the images; the one with the most pixels, if there are several.
        lora: Low-rank adapter, with train=lora.
        optimizer: Optimizer, whose state is counted.
        engine: Sharding, precision, checkpointing and offload.
    """

    gpus: int = 1
    train: Train = "lora"
    micro_batch: int | None = None
    micro_batches: int = 4
    reference: bool = False
    teachers: int = 0
    learners: int = 1
    graphs: int = 1
    guidance: bool = False
    step_cache: StepCacheChoice = NoCache()
    merged: bool = False
    samples: int = 16
    steps: int = 3
    schedule: int | None = None
    fit: str | None = None
    memory_gib: float = 80.0
    gpu: str = "NVIDIA H100 80GB HBM3"
    reserve_gib: float = 6.0
    table: bool = False
    check: bool = False
    pipeline: ImageSize = ImageSize()
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        counts = dict.fromkeys(
            ("gpus", "micro_batches", "samples", "steps", "schedule", "micro_batch", "learners", "graphs"), BATCH
        )
        check_fields(self, "", **counts, teachers=INDEX, memory_gib=GIBIBYTES, reserve_gib=GIBIBYTES)
        for name, degree in (("replicas", self.engine.replicas), ("context_parallel", self.engine.context_parallel)):
            if degree != "auto" and self.gpus % degree:
                raise UsageError(f"engine.{name}", degree, f"a divisor of the {self.gpus} GPUs")
        if self.fit is not None and self.memory_gib != PlanConfig.memory_gib:
            raise no_effect("memory_gib", "with `fit`, which is the memory")
        if self.fit is not None:
            parse_bytes(self.fit, "fit")
        if bool(self.fit) + self.table + self.check > 1:
            both = [f"`{name}`" for name in ("fit", "table", "check") if getattr(self, name)]
            raise UsageError(f"{' and '.join(both)} are both set: set one of them")

    @property
    def room(self) -> float:
        """Bytes available to a plan on a GPU, without the reserve."""
        memory = self.memory_gib * GIB if self.fit is None else parse_bytes(self.fit, "fit")
        return memory - self.reserve_gib * GIB

    @property
    def room_in_words(self) -> str:
        """Memory of a GPU and the part kept free, as text."""
        return f"{self.fit or f'{self.memory_gib:g} GiB'} with {self.reserve_gib:g} GiB kept free"


class MemoryPlan(NamedTuple):
    """Memory of a configuration, by phase."""

    config: PlanConfig
    update: Accounting
    rollout: Accounting
    decode: Accounting | None  # of a chunk of the rollout, beside the gathered parameters; None without a VAE

    @property
    def phases(self) -> dict[str, Accounting]:
        """Phases by name."""
        decode = {} if self.decode is None else {"decode": self.decode}
        return {"update": self.update, "rollout": self.rollout, **decode}

    @property
    def need(self) -> int:
        """Bytes of the largest phase, on one GPU."""
        return max(phase.total for phase in self.phases.values())

    @property
    def fits(self) -> bool:
        """Whether the largest phase fits beside the reserve."""
        return self.need <= self.config.room

    @property
    def copies_in_words(self) -> list[str]:
        """Line about the bytes and seconds of copying blocks from the host per pass; no line without such blocks."""
        if not self.update.copied:
            return []
        peaks = find_peaks(self.config.gpu)
        costs = []
        for kind in (self.rollout, self.update):
            seconds = "" if peaks is None else f" ({kind.copied / peaks.link:.2f} s)"
            costs.append(f"{kind.copied / GIB:.2f} GiB{seconds}")
        link = "a link of unknown bandwidth" if peaks is None else f"{peaks.link / 1e9:g} GB/s"
        return [
            f"Blocks on the host: a pass of the rollout copies {costs[0]} to the GPU, a forward and backward pass of the "
            f"update {costs[1]}, over {link} of {self.config.gpu}, while the GPU computes."
        ]


Knobs = Mapping[str, Callable[[PlanConfig], PlanConfig]]  # changes of a configuration, by flag


def _change_engine(
    where: Callable[[PlanConfig], bool] = lambda config: True, **fields: Any
) -> Callable[[PlanConfig], PlanConfig]:
    """Return a change of engine settings for the plans accepted by `where`."""
    return lambda config: replace(config, engine=replace(config.engine, **fields)) if where(config) else config


def _needs_whole(config: PlanConfig) -> bool:
    """Return whether rollouts need all weights on the device: merged ones, or those captured by CUDA graphs."""
    return config.merged or config.engine.compile == "reduce-overhead"


def _has_base(config: PlanConfig) -> bool:
    """Return whether the frozen base is on the device, not merged and not quantised yet."""
    engine = config.engine
    return config.train == "lora" and engine.base == "auto" and engine.offload != "always" and not config.merged


def _can_swap(config: PlanConfig) -> bool:
    """Return whether frozen blocks can be on the host: every rank computes with whole weights."""
    engine = config.engine
    whole = engine.comm == "keep" and engine.context_parallel == 1 and engine.replicas in ("auto", config.gpus)
    return whole and config.train == "lora" and engine.offload == "none" and not _needs_whole(config)


def _keeps_blocks(config: PlanConfig) -> bool:
    """Return whether blocks are not checkpointed as a whole yet."""
    return config.engine.checkpointing in ("none", "selective")


def _can_round(config: PlanConfig) -> bool:
    """Return whether trained weights may be bfloat16: in full fine-tuning, with an elementwise optimizer."""
    return config.train == "full" and OPTIMIZERS[config.optimizer.name].elementwise


# Settings that save memory, cheapest first: a second forward pass, smaller passes, more communication, rounded weights, the
# host's bandwidth, and last the number of trained parameters.
SWAP = "--engine.offload blocks"
ENGINE_KNOBS: Knobs = {
    "--engine.checkpointing block": _change_engine(_keeps_blocks, checkpointing="block"),
    "--engine.checkpointing host": _change_engine(_keeps_blocks, checkpointing="host"),
    "--micro-batch 1": lambda config: config if config.micro_batch is None else replace(config, micro_batch=1),
    "--engine.comm reshard": _change_engine(lambda config: not _needs_whole(config), comm="reshard"),
    "--engine.grad-sync every": _change_engine(grad_sync="every"),
    "--engine.masters bfloat16": _change_engine(_can_round, masters="bfloat16"),
    "--engine.base int8": _change_engine(_has_base, base="int8"),
    SWAP: _change_engine(_can_swap, offload="blocks"),
    "--engine.base nf4": _change_engine(_has_base, base="nf4"),
    # A quantised base is not sharded.
    "--engine.offload always": _change_engine(
        lambda config: (
            config.engine.base == "auto" and config.engine.offload in ("none", "phases") and not _needs_whole(config)
        ),
        offload="always",
    ),
}
KNOBS: Knobs = {  # adapters are float32
    **ENGINE_KNOBS,
    "--train lora": lambda config: replace(config, train="lora") if config.engine.masters == "float32" else config,
}


def plan(name: str, config: PlanConfig, *, device: torch.device = GPU) -> MemoryPlan:
    """Return the memory of training a transformer on each device.

    Args:
        name: name of the transformer in the catalogue, or folder of a pipeline.
        config: plan.
        device: device of the computation, which decides engine.compute="auto".

    Raises:
        UsageError: the transformer is unknown, it has one resolution only, or its tokens cannot be split.
    """
    model = find_transformer(name)
    if config.pipeline.side is not None and model.resolution is None:
        raise UsageError("pipeline.height", config.pipeline.height, hint=f"{name} has images of one size only; leave it out")
    modular, module = isinstance(model, ModularShape), build_on_meta(name, config.train, config.lora)
    for option, value in () if modular else (("pipeline.call", config.pipeline.call), ("schedule", config.schedule)):
        if value:
            raise no_effect(option, f"with {name}, which is not a modular pipeline")
    shape = build_pass_shape(model, config.pipeline, config.schedule or config.steps, guided=config.guidance)
    shape = shape._replace(compute=config.engine.compute_dtype(device))
    if isinstance(model, ModelShape) and (shape.frames or 1) > 1 and not model.makes_videos:
        raise UsageError("pipeline.frames", shape.frames, hint=f"{name} makes only images; leave it out")
    if config.engine.context_parallel > 1 and getattr(module, "_cp_plan", None) is None:
        degree = config.engine.context_parallel
        raise UsageError("engine.context_parallel", degree, hint=f"diffusers has no plan for the tokens of {name}")
    halves, batch = 2 if config.guidance and not modular else 1, config.micro_batch or model.micro_batch
    readable = partial(convert_errors, UsageError, ValueError, OSError, says=f"the memory of {name} cannot be computed")
    with readable():
        latent, conditioning = model.count_stored_bytes(shape)
    kept = batch * latent if isinstance(config.step_cache, GuidanceCache) else 0
    if isinstance(config.step_cache, FirstBlockCache):
        copies, itemsize = 2 + config.step_cache.order, config.engine.compute_dtype(device).itemsize
        kept = copies * itemsize * _measure_block_output(name, batch * halves, shape)
    if config.merged:
        weights = [layer.base_layer.weight.numel() for layer in find_lora_layers(module).values()]
        kept += config.engine.compute_dtype(device).itemsize * sum(weights)

    def account_phase(kind: Phase) -> Accounting:
        update = kind == "update"
        with readable():
            spans = _measure_activations(
                name,
                config.train,
                config.lora,
                # Other settings of the engine do not change activations.
                engine=EngineConfig(
                    checkpointing=config.engine.checkpointing if update else "none",
                    checkpointed=config.engine.checkpointed if update else None,
                    compute=config.engine.compute,
                    base=config.engine.base,
                    context_parallel=config.engine.context_parallel,
                ),
                device=device,
                samples=batch * halves * (config.graphs if update else 1),
                shape=shape,
                grad=update,
            )
        return memory.account(
            module,
            list_blocks(model, module),
            optimizer=config.optimizer,
            engine=config.engine,
            device=device,
            ranks=config.gpus,
            activations=spans,
            # Per sample: the latents before and after each step, and the conditioning once, in float32. Plus caches.
            trajectory=config.samples * (2 * config.steps * latent + conditioning * halves) + (0 if update else kept),
            micro_batches=config.micro_batches,
            frozen=(config.reference and config.train == "full") + config.teachers,
            learners=config.learners,
            phase=kind,
        )

    rollout, decode = account_phase("rollout"), None
    graphed = config.engine.compile == "reduce-overhead"
    if graphed:  # inputs at fixed addresses (latents, level, timestep, guidance scale, conditioning), and the velocity
        rollout = rollout._replace(graph=batch * (2 * latent + 4 * (1 + halves) + conditioning * halves))
    if model.decoder is not None:
        # As in the rollout between two chunks: with comm="reshard" FSDP2 gathers a unit only for its pass.
        idle = rollout if config.engine.comm == "keep" else rollout._replace(gathered=0, communication=0)
        images = min(batch, DECODE_CHUNK)
        # The pool of a graph holds the activations of a pass and is not shared with other computations.
        graph = idle.graph + (idle.activations if graphed else 0)
        decode = idle._replace(activations=_measure_decoder(name, images, shape), graph=graph)
    return MemoryPlan(config, account_phase("update"), rollout, decode)


def find_flags_to_fit(name: str, config: PlanConfig, knobs: Knobs = KNOBS) -> tuple[str, MemoryPlan]:
    """Return the flags with which a configuration fits, and its plan with them; if nothing fits, those that need least.

    Among the combinations that fit, the one whose most expensive setting is cheapest wins; ties go to the second, and so on.
    """
    turned, planned = search_knobs(name, config, knobs)
    return " ".join(flags for flags, _ in turned), planned


TurnedKnobs = list[tuple[str, PlanConfig]]  # flags of the changed settings, each with the configuration after it


def search_knobs(name: str, config: PlanConfig, knobs: Knobs = KNOBS) -> tuple[TurnedKnobs, MemoryPlan]:
    """Return the flags of `find_flags_to_fit` one by one, and the plan with them.

    Args:
        name: name of the transformer in the catalogue.
        config: plan.
        knobs: settings that may be changed, cheapest first.
    """
    left = [flags for flags, turn in knobs.items() if turn(config) != config]
    least: tuple[TurnedKnobs, MemoryPlan] | None = None
    for choice in product((False, True), repeat=len(left)):
        # The product's first factor changes last, and must be the most expensive.
        turned = [flags for flags, on in zip(left, reversed(choice), strict=True) if on]
        candidates = [config]
        for flags in turned:
            candidates.append(knobs[flags](candidates[-1]))
        if any(before == after for before, after in pairwise(candidates)):
            continue  # a setting has no effect beside another one
        steps, planned = [*zip(turned, candidates[1:], strict=True)], plan(name, candidates[-1])
        if planned.fits:
            return _swap_fewest(name, steps, planned)
        if least is None or planned.need <= least[1].need:
            least = steps, planned
    assert least is not None
    return least


def _swap_fewest(name: str, steps: TurnedKnobs, planned: MemoryPlan) -> tuple[TurnedKnobs, MemoryPlan]:
    """Reduce the blocks on the host to the fewest that fit, if SWAP is among the settings."""
    if SWAP not in [flags for flags, _ in steps]:
        return steps, planned

    def swap(config: PlanConfig, number: int) -> PlanConfig:
        swaps = config.engine.swaps_blocks
        return replace(config, engine=replace(config.engine, offload=number)) if swaps else config

    config = planned.config
    number = bisect_left(
        range(1, len(list_blocks(find_transformer(name), build_on_meta(name, config.train, config.lora)))),
        True,
        key=lambda few: plan(name, swap(config, few)).fits,
    )
    return (
        [(flags.replace("blocks", f"{number + 1}"), swap(each, number + 1)) for flags, each in steps],
        plan(name, swap(config, number + 1)),
    )


def show(name: str, config: PlanConfig, *, console: Console) -> None:
    """Print the plan of a configuration; if it does not fit, also the flags with which it does."""
    planned = plan(name, config)
    unit = choose_unit(planned.need)
    phases = planned.phases
    rows = {
        kind.replace("_", " "): tuple(map(unit.format, sizes))
        for kind, *sizes in zip(Accounting._fields, *phases.values(), strict=True)
        if any(sizes) and kind not in ("host", "copied")
    }
    rows["all"] = tuple(unit.format(phase.total) for phase in phases.values())
    if any(phase.host for phase in phases.values()):
        rows["on the host instead"] = tuple(unit.format(phase.host) for phase in phases.values())
    module = build_on_meta(name, "full", config.lora)
    count = sum(tensor.numel() for tensor in (*module.parameters(), *module.buffers()))
    console.print(
        f"{name}: {_format_count(count)} parameters, {config.train}, on {_format_gpus(config.gpus)}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(table(f"{unit.name} on each GPU", tuple(phases), rows), highlight=False)
    room = config.room_in_words
    if planned.fits:
        line = f"It fits into {room}."
    else:
        flags, planned = find_flags_to_fit(name, config)
        need = f"{unit.format(planned.need)} {unit.name}"
        line = f"It does not fit into {room}. "
        line += f"With {flags} it does: {need}." if planned.fits else f"Nor does it with {flags or 'anything else'}: {need}."
    for each in (*planned.copies_in_words, line):
        console.print(each, highlight=False, soft_wrap=True)


def show_table(name: str, config: PlanConfig, *, console: Console) -> None:
    """Print the cheapest flags that fit for LoRA and full fine-tuning on 1, 8 and 64 GPUs."""
    trains: tuple[Train, Train] = ("lora", "full")
    replicas = 1 if config.engine.replicas == "auto" else config.engine.replicas
    degree = math.lcm(replicas, config.engine.context_parallel)
    sizes = [gpus for gpus in (1, 8, 64) if gpus % degree == 0]
    settings = [replace(config, train=train, gpus=gpus) for train, gpus in product(trains, sizes)]
    plans = [find_flags_to_fit(name, setting, ENGINE_KNOBS) for setting in settings]
    unit = choose_unit(max(best.need for _, best in plans))
    rows = {}
    for flags, best in plans:
        verdict = (flags or "as it is") if best.fits else f"does not fit, least with {flags or 'the given settings'}"
        phases = best.phases.values()
        rows[f"{best.config.train}, {_format_gpus(best.config.gpus)}"] = (
            verdict,
            *(unit.format(phase.total) for phase in phases),
            unit.format(max(phase.host for phase in phases)),
        )
    console.print(f"{name}: flags with which it fits into {config.room_in_words}", highlight=False)
    console.print(table(f"{unit.name} on each GPU", ("flags", *plans[0][1].phases, "host"), rows), highlight=False)


class Unit(NamedTuple):
    """Unit of memory, in bytes."""

    name: str
    size: int

    def format(self, size: int) -> str:
        """Return a number of bytes in this unit."""
        return f"{size / self.size:.2f}" if size else "-"


def choose_unit(largest: int) -> Unit:
    """Return the unit for numbers of bytes up to `largest`."""
    return Unit("GiB", GIB) if largest >= GIB else Unit("MiB", 2**20)


def find_transformer(name: str) -> ModelShape | ModularShape:
    """Return a transformer of the catalogue or of a pipeline's folder; UsageError if there is none."""
    with convert_errors(UsageError, ValueError, OSError, says=f"the memory of {name} cannot be computed"):
        shape = find_model_shape(name)
    if shape is None:
        raise UsageError(f"there is no transformer {name!r}, expected one of {', '.join(MODELS)}")
    return shape


@cache
def build_on_meta(name: str, train: Train, lora: LoraConfig) -> nn.Module:
    """Build the transformer on the meta device, with adapters for train=lora."""
    with torch.device("meta"):
        module = find_transformer(name).build()
    if train == "lora":
        add_lora(module, lora, find_transformer(name).lora_targets)
    return nn.Module.to(module, "meta")


@cache
def _measure_block_output(name: str, samples: int, shape: PassShape) -> int:
    """Return the largest number of values returned by a block."""
    model, module, sizes = find_transformer(name), build_on_meta(name, "full", LoraConfig()), [0]

    def note(block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        sizes.append(sum(leaf.numel() for leaf in optree.tree_leaves(output) if isinstance(leaf, Tensor)))

    handles = [block.register_forward_hook(note) for block in list_blocks(model, module)]
    with torch.no_grad():
        model.predict(module, samples, shape)
    for handle in handles:
        handle.remove()
    return max(sizes)


@cache
def _measure_decoder(name: str, images: int, shape: PassShape) -> int:
    """Return the bytes of a VAE and of its activations at the peak of decoding."""
    model = find_transformer(name)
    assert model.decoder is not None
    vae, decode = model.decoder(images, shape.side, shape.frames, shape.compute)
    tensors = [*vae.parameters(), *vae.buffers()]
    with torch.no_grad(), memory.LiveStorages(tensors, meta=True) as storages:
        decode()
    return storages.peak + sum(tensor.nbytes for tensor in tensors)


@cache
def _measure_activations(
    name: str,
    train: Train,
    lora: LoraConfig,
    *,
    engine: EngineConfig,
    device: torch.device,
    samples: int,
    shape: PassShape,
    grad: bool,
) -> tuple[ActivationSpan, ...]:
    """Return the bytes of the activations; cached, because a large transformer takes seconds."""
    model, module = find_transformer(name), build_on_meta(name, train, lora)
    forward = partial(model.predict, samples=samples, shape=shape)
    return memory.measure_activations(module, list_blocks(model, module), forward, engine=engine, device=device, grad=grad)


def choose_size(model: ModelShape | ModularShape, config: PipelineConfig) -> ImageSize:
    """Return the size of the images for which a run is planned."""
    height, width = config.size
    if isinstance(model, ModularShape):
        return ImageSize(height, width, config.frames, config.call)
    return ImageSize() if model.resolution is None else ImageSize(height, width, config.frames)


def build_pass_shape(model: ModelShape | ModularShape, size: ImageSize, steps: int, *, guided: bool) -> PassShape:
    """Return the shape of a pass of a model."""
    return PassShape(size.side or model.resolution or 0, size.frames, steps, size.call, guided)


def _format_count(number: int) -> str:
    return f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"


def _format_gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"
