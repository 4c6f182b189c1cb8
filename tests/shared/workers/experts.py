"""Updates two experts, on any number of ranks: half of the samples belong to each expert."""

from pathlib import Path
from typing import NamedTuple

import torch
from helpers.tiny_pipelines import TEXT
from safetensors.torch import save_file
from torch import Tensor

from fluvial.engines.engine.engine import Engine, EngineConfig, OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.export.model_folder import export
from fluvial.engines.gathered import gather
from fluvial.models.pipelines.open import open_model

SIGMA = (0.9, 0.95, 0.85, 0.99, 0.1, 0.2, 0.3, 0.4)


class Info(NamedTuple):
    error: Tensor


def update(folder: Path, out: Path, world: World) -> dict[str, Tensor]:
    """Return the gradients' moving averages after an update, by parameter, and export what it made."""
    model = open_model(folder, text_tokens=TEXT, device="cpu")
    module = model.build(empty=True)
    engine = Engine(
        module,
        model.blocks(module),
        OptimizerConfig(lr=0.01),
        world,
        updates=1,
        sharding=EngineConfig(),
        weights=model.weights,
    )
    each = len(SIGMA) // world.size
    mine = slice(world.rank * each, (world.rank + 1) * each)
    x = torch.randn(len(SIGMA), *model.latent_shape(16, 16, 3), generator=torch.Generator().manual_seed(0))
    cond = model.encode(["a red fox"] * len(SIGMA))

    def loss(items: dict[str, Tensor]) -> tuple[Tensor, Info]:
        v = model.predict(engine.module, items["x"], items["sigma"], type(cond)(items["tokens"]))
        error = v.square().flatten(1).mean(1)
        return error, Info(error.detach())

    items = {"x": x[mine], "sigma": torch.tensor(SIGMA)[mine], "tokens": cond.tokens[mine]}
    engine.update(items, loss, torch.ones(each), count=len(SIGMA), micro_batch=2, pad_to=each)
    export(engine.module, out, world=world)
    state = {name: tensor for name, tensor in engine.state().items() if name.startswith("exp_avg.")}
    return {name: gather(tensor).clone() for name, tensor in state.items()}


def exported(world: World, folder: str, to: str) -> None:
    gradients = update(Path(folder), Path(to), world)
    if world.is_main:
        save_file(gradients, Path(to) / "gradients.safetensors")
