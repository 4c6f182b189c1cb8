"""Take one update of every pipeline on any number of ranks, with separate samples or sharing each sample."""

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from helpers import tiny_modular, tiny_pipelines, tiny_replayed
from helpers.tiny_replayed import WITHOUT_ADAPTER
from safetensors.torch import save_file
from torch import Tensor

from fluvial.core.gaussian import log_prob
from fluvial.core.transitions import Sampler, ddim, flow_sde
from fluvial.engines.data.records import as_prompts
from fluvial.engines.engine.engine import Engine, EngineConfig, OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.errors import UsageError
from fluvial.engines.gathered import gather
from fluvial.engines.sampling.generate import Guidance, move_schedule
from fluvial.models.guidance import guided_velocity
from fluvial.models.protocol import DiffusionModel, Schedule

ITEMS, STEPS = 4, 4
PROMPTS = ["a red fox", "two cats", "an owl", "9 owls in 1 barn"]
WITH_ADAPTER = tuple(name for name, row in tiny_pipelines.ROWS.items() if not row.variant or row.apart)
SPLIT = ("flux", "qwen-image", "wan", "flux2")  # pipelines whose tokens diffusers can split over ranks
MODULAR = ("Flux", "Wan", "Wan22")  # modular ones, of one network and of two
# Every pipeline, and the number of ranks that share a sample.
RUNS = [*((name, 1) for name in (*WITH_ADAPTER, *WITHOUT_ADAPTER)), *((name, 2) for name in (*SPLIT, *MODULAR))]
SHORT = (("sd3", 1), ("sana", 1), ("flux", 2))  # in every run of the tests; the others in `make test-all`


class Info(NamedTuple):
    error: Tensor


class Update(NamedTuple):
    velocity: Tensor  # [copies, B, *event], of every rank's samples, as every rank of a group has them
    log_prob: Tensor  # [copies, B], of a step to a given next sample
    loss: float
    gradients: dict[str, Tensor]  # AdamW's first moments


def save(root: Path, name: str) -> None:
    if (root / name).exists():
        return
    if name in WITH_ADAPTER:
        tiny_pipelines.save(tiny_pipelines.ROWS[name], root / name)
    elif name in MODULAR:
        tiny_modular.folder_of(name, root / name)
    else:
        tiny_replayed.load(name, root / name)


def opened(root: Path, name: str) -> tuple[DiffusionModel, tuple[int, ...]]:
    if name in WITH_ADAPTER:
        row = tiny_pipelines.ROWS[name]
        model: DiffusionModel = tiny_pipelines.opened(name, root / name)
        return model, model.latent_shape(*row.sizes[0])
    if name in MODULAR:
        model = tiny_modular.opened(name, root / name, steps=STEPS, device="cpu")
    else:
        model = tiny_replayed.opened(name, root / name, device="cpu")
    return model, model.latent_shape(*model.size)


def update(root: Path, name: str, world: World, *, context_parallel: int = 1, size: tuple[int, ...] | None = None) -> Update:
    """Take one update of a pipeline on four samples, each at another step, with guidance."""
    model, shape = opened(root, name)
    shape = shape if size is None else model.latent_shape(*size)
    module = model.build(empty=True)
    engine = Engine(
        module,
        model.blocks(module),
        OptimizerConfig(lr=0.01, weight_decay=0.0),
        world,
        updates=1,
        sharding=EngineConfig(context_parallel=context_parallel, comm="reshard" if name == "dit" else "keep"),
        weights=model.weights,
    )
    split = engine.world
    source = torch.Generator().manual_seed(0)
    schedule = move_schedule(model.schedule(STEPS, shape), torch.device("cpu"))
    each = ITEMS // split.data_size
    mine = slice(split.data_rank * each, (split.data_rank + 1) * each)
    rows = torch.arange(ITEMS)[mine]
    x, x_next = (torch.randn(ITEMS, *shape, generator=source)[mine] for _ in range(2))
    cond = Guidance(scale=3.0).encode(model, as_prompts(PROMPTS))

    def velocity(net: Any, items: dict[str, Tensor]) -> Tensor:
        return guided_velocity(
            model,
            net,
            items["x"],
            schedule.levels[items["row"]],
            optree.tree_map(lambda table: table[items["row"]], cond),
            timestep=schedule.timesteps[items["row"]],
        )

    def loss(items: dict[str, Tensor]) -> tuple[Tensor, Info]:
        error = velocity(engine.module, items).square().flatten(1).mean(1)
        return error, Info(error.detach())

    items = {"x": x, "row": rows}
    with engine.inference() as net:
        v = velocity(net, items)
    sampler = _sampler(model, schedule)
    now, later = schedule.levels[rows], schedule.levels[rows + 1].clamp(max=0.999)  # the last step of a UNet has no noise
    steps = log_prob(sampler(now, later), x, v, x_next)
    info = engine.update(items, loss, torch.ones(each), count=ITEMS, micro_batch=2, pad_to=each)
    state = {key: tensor for key, tensor in engine.state().items() if key.startswith("exp_avg.")}
    gradients = {key: gather(tensor).clone() for key, tensor in state.items()}
    copies = (split.data_size, context_parallel, each)
    everyone, probabilities = split.gather(v), split.gather(steps)
    return Update(
        everyone.reshape(*copies, *shape).transpose(0, 1).flatten(1, 2),
        probabilities.reshape(copies).transpose(0, 1).flatten(1),
        info.loss,
        gradients,
    )


def _sampler(model: DiffusionModel, schedule: Schedule) -> Sampler:
    if model.prediction == "velocity":
        return partial(flow_sde, eta=0.7, sigma_max=schedule.levels[1])
    return partial(ddim, eta=1.0)


def updates(world: World, folder: str, to: str, runs: list[Any]) -> None:
    root, out = Path(folder), Path(to)
    warnings.simplefilter("ignore")  # deprecations within diffusers
    losses = {}
    for name, shared in runs:
        found = update(root, name, world, context_parallel=shared)
        losses[f"{name}-{shared}"] = found.loss
        if world.is_main:
            tensors = {"velocity": found.velocity.contiguous(), "log_prob": found.log_prob.contiguous()}
            save_file({**tensors, **found.gradients}, out / f"{name}-{shared}.safetensors")
    refused = {}
    for name in SPLIT[:3]:
        if [name, 2] not in runs:
            continue
        try:
            update(root, name, world, context_parallel=2, size=(12, 4))
        except UsageError as error:
            refused[name] = str(error)
    if world.is_main:
        (out / "losses.json").write_text(json.dumps(losses))
        (out / "refused.json").write_text(json.dumps(refused))
