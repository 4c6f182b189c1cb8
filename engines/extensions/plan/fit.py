"""Settings with which a run fits into a GPU's memory: what each saves, and `engine.fit`, which applies them."""

import math
from dataclasses import asdict, fields, replace
from typing import Any

import torch
from rich.console import Console, Group
from rich.table import Table

from fluvial.engines.engine.config import EngineConfig
from fluvial.engines.errors import RunError
from fluvial.engines.extensions.plan.plan import (
    ENGINE_KNOBS,
    GIB,
    KNOBS,
    Knobs,
    MemoryPlan,
    PlanConfig,
    choose_size,
    choose_unit,
    find_transformer,
    plan,
    search_knobs,
)
from fluvial.engines.named_models import MODELS
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.declared import Base, Start, Teacher, Trained
from fluvial.engines.run.jobs.weights import find_base_model
from fluvial.engines.run.log.progress import table
from fluvial.models.shapes import ModularShape, count_text_encoder_bytes

TEXT_BASES: tuple[Any, ...] = ("auto", "int8", "nf4")  # of text encoders, the most exact first


def plan_steps_to_fit(name: str, config: PlanConfig, knobs: Knobs = KNOBS) -> list[tuple[str, MemoryPlan]]:
    """Return the plan as it is, and after each changed setting, with the setting's flag.

    Args:
        name, config, knobs: as in `search_knobs`.

    Raises:
        RunError: no combination of settings fits.
    """
    turned, last = search_knobs(name, config, knobs)
    if not last.fits:
        unit = choose_unit(last.need)
        raise RunError(
            f"{name} does not fit into {config.room_in_words}: the least is {unit.format(last.need)} {unit.name}, with "
            f"{' '.join(flags for flags, _ in turned) or 'the settings as they are'}"
        )
    return [("as it is", plan(name, config)), *((flags, plan(name, each)) for flags, each in turned)]


def show_fit(name: str, config: PlanConfig, *, console: Console) -> None:
    """Print the settings that fit and the memory that each saves; RunError if none fit."""
    steps = plan_steps_to_fit(name, config)
    console.print(tabulate_savings(name, steps), highlight=False)
    flags = " ".join(flags for flags, _ in steps[1:])
    fits = f"It fits into {config.room_in_words}{' with ' + flags if flags else ''}."
    for line in (*steps[-1][1].copies_in_words, fits):
        console.print(line, highlight=False, soft_wrap=True)


def tabulate_savings(name: str, steps: list[tuple[str, MemoryPlan]]) -> Table:
    """Return a table of the memory that each setting saves at the peak of the largest phase."""
    unit = choose_unit(max(best.need for _, best in steps))
    rows, before = dict[str, tuple[str, ...]](), None
    for flags, best in steps:
        saved = "" if before is None else unit.format(max(0, before - best.need))
        rows[flags] = (unit.format(best.update.total), unit.format(best.rollout.total), saved)
        before = best.need
    return table(f"{name}: {unit.name} on each GPU", ("update", "rollout", "saves"), rows)


def fit_config(config: TrainConfig, *, ranks: int, device: torch.device, gpu: str | None = None) -> tuple[TrainConfig, Any]:
    """Return a run with the settings that fit into `engine.fit`, and a table of what each saves; None without `fit`.

    Text encoders run once, before the network is loaded, and are freed. Their outputs go to a cache, by default in the run's
    folder. They are quantised if they do not fit otherwise. The engine and the micro-batch are changed as by `fluvial plan
    --fit`, with its reserve for the VAE, rewards and the CUDA context.

    Args:
        config: configuration of the run.
        ranks: number of GPUs.
        device: device of the computation, which decides compute="auto".
        gpu: name of the GPU, by default that of this machine.

    Raises:
        UsageError: the network's inputs are unknown.
        RunError: nothing fits.
    """
    if config.engine.fit is None:
        return config, None
    name = find_base_model(config.model)
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else PlanConfig.gpu
    initial = replace(to_plan_config(config, name, ranks, device), gpu=gpu or here)
    keeps_text = name in MODELS or isinstance(find_transformer(name), ModularShape)  # modular pipelines keep their encoders
    steps = plan_steps_to_fit(name, initial, ENGINE_KNOBS)
    planned = steps[-1][1].config
    micro_batch = config.engine.micro_batch if planned.micro_batch == initial.micro_batch else planned.micro_batch
    pipeline, output = config.pipeline, list[Table | str]([tabulate_savings(name, steps), *steps[-1][1].copies_in_words])
    if not keeps_text:
        if pipeline.text_cache is None:
            pipeline = replace(pipeline, text_cache=config.out / "encoded" / "texts")
        half = config.engine.compute_dtype(device).itemsize == 2 or pipeline.frozen == "bfloat16"
        dtype = torch.bfloat16 if half else torch.float32
        pipeline = replace(pipeline, text_base=_choose_text_base(name, initial, pipeline.text_base, dtype))
        output.append(
            f"Text encoders run once, into --pipeline.text-cache {pipeline.text_cache}, with --pipeline.text-base "
            f"{pipeline.text_base}."
        )
    engine = {**asdict(planned.engine), "fit": None, "compute": config.engine.compute, "micro_batch": micro_batch}
    if planned.micro_batch != initial.micro_batch:
        engine["update_micro_batch"] = "rollout"
    return replace(config, engine=replace(config.engine, **engine), pipeline=pipeline), Group(*output)


def _choose_text_base(name: str, config: PlanConfig, wanted: Any, dtype: torch.dtype) -> Any:
    """Return the most exact format in which the text encoders fit without the network; RunError if none does."""
    for base in TEXT_BASES if wanted == "auto" else (wanted,):
        size = count_text_encoder_bytes(name, None if base == "auto" else base, dtype)
        if size <= config.room:
            return base
    raise RunError(
        f"the text encoders of {name} do not fit into {config.room_in_words}: they take {size / GIB:.2f} GiB with "
        f"--pipeline.text-base {base}"
    )


def to_plan_config(config: TrainConfig, name: str, ranks: int, device: torch.device) -> PlanConfig:
    """Return the plan of a run; a micro-batch that the run finds by trial is one sample.

    Args:
        config: configuration of the run.
        name: model, or the base model of the run that it starts from.
        ranks: number of GPUs.
        device: device of the computation, which decides compute="auto".

    Raises:
        UsageError: the network's inputs are unknown.
    """
    model = find_transformer(name)
    numbers = [size for size in (config.engine.micro_batch, config.engine.update_micro_batch) if isinstance(size, int)]
    compute = str(config.engine.compute_dtype(device)).removeprefix("torch.")
    sharding = {each.name: getattr(config.engine, each.name) for each in fields(EngineConfig)}
    return PlanConfig(
        gpus=ranks,
        train=config.train,
        pipeline=choose_size(model, config.pipeline),
        micro_batch=max(numbers, default=1),
        micro_batches=2,
        reference=config.train == "full" and any(isinstance(network, Start | Base) for network in config.networks.values()),
        teachers=sum(isinstance(each, Teacher) and not each.is_adapter for each in config.networks.values()),
        learners=1 + sum(isinstance(network, Trained) for network in config.networks.values()),
        graphs=config.method.needs.graphs,
        guidance=config.is_guided,
        step_cache=config.rollout.step_cache,
        merged=config.rollout.reuse == "merged",
        samples=math.ceil(config.method.sampling.batch * config.engine.context_parallel / ranks),
        schedule=config.method.sampling.steps if isinstance(model, ModularShape) else None,
        steps=max(1, config.method.sampling.window.count(config.method.sampling.steps)),
        fit=config.engine.fit,
        lora=replace(config.lora, weights=None),
        optimizer=config.optimizer,
        engine=EngineConfig(**{**sharding, "compute": compute}),
    )
