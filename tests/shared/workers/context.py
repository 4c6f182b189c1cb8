"""Updates small transformers whose tokens are split over pairs of ranks, for test_context.py."""

import warnings
from typing import Any

import torch
from helpers import tiny_transformers

from fluvial.engines.engine.engine import Engine, EngineConfig, OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.errors import UsageError


def updates(world: World) -> dict[str, Any]:
    """Return {model: {layout: {gradients, info, velocity}}}, and the error for odd numbers of tokens under `odd`."""
    result: dict[str, Any] = {}
    warnings.simplefilter("ignore")  # deprecations within diffusers
    for name, (build, velocity) in tiny_transformers.MODELS.items():
        result[name] = {}
        for lies, options in tiny_transformers.LIES.items():
            net = build()
            engine = Engine(
                net,
                tiny_transformers.blocks(net),
                OptimizerConfig(lr=0.01),
                world,
                updates=1,
                sharding=EngineConfig(context_parallel=2, **options),
            )
            share = tiny_transformers.ITEMS // engine.world.data_size
            mine = slice(engine.world.data_rank * share, (engine.world.data_rank + 1) * share)
            items = {key: tensor[mine] for key, tensor in tiny_transformers.data().items()}
            with engine.inference() as module:
                found = engine.world.gather(velocity(module, items))
            info = engine.update(
                items,
                tiny_transformers.loss_of(velocity, engine.module),
                torch.ones(share),
                count=tiny_transformers.ITEMS,
                micro_batch=2,
                pad_to=share,
            )
            result[name][lies] = {
                "gradients": {key: tensor.tolist() for key, tensor in tiny_transformers.gradients(engine).items()},
                "info": info._asdict(),
                "velocity": found.tolist(),
            }
        try:
            velocity(engine.module, tiny_transformers.data(tokens=6) | {"text": torch.zeros(tiny_transformers.ITEMS, 3, 6)})
        except UsageError as error:
            result[name]["odd"] = str(error)
    return result
