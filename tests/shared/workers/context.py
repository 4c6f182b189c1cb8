"""Updates small transformers whose tokens are split over pairs of ranks, for test_context.py."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from helpers import tiny_transformers
from torch import Tensor

from fluvial.engines.engine.engine import Engine, EngineConfig, OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.errors import UsageError


def flash(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> tuple[Any, ...]:
    """Return attention and its log-sum-exp on a CPU, as the operator returns them on a GPU."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=options.get("scale"))
    empty = torch.empty(0)
    return out, lse, empty, empty, query.shape[2], key.shape[2], empty, empty, empty


def flash_backward(grad: Tensor, *saved: Any, **options: Any) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value."""
    query, key, value, out, lse = saved[:5]
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(grad, query, key, value, out, lse, 0.0, False, scale=options.get("scale"))


def ring_updates(world: World) -> dict[str, Any]:
    """Return the same of four ranks that share each sample, two by two in a ring, and what is refused."""
    refused = list[str]()
    sharding: dict[str, Any] = {"context_parallel": 4, "ring": 2}
    for build, velocity in tiny_transformers.MODELS.values():  # without a kernel, and with a mask
        engine = Engine(build(), [], OptimizerConfig(lr=0.01), world, sharding=EngineConfig(**sharding))
        try:
            with engine.inference() as module:
                velocity(module, tiny_transformers.data())
        except UsageError as error:
            refused.append(str(error))
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", flash, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", flash_backward, "CPU")
    return {**updates(world, ("flux", "wan"), **sharding), "refused": refused}


def updates(world: World, models: Iterable[str] = tiny_transformers.MODELS, **sharding: Any) -> dict[str, Any]:
    """Return {model: {layout: {gradients, info, velocity}}}, and the error for odd numbers of tokens under `odd`."""
    result: dict[str, Any] = {}
    sharding = sharding or {"context_parallel": 2}
    warnings.simplefilter("ignore")  # deprecations within diffusers
    for name in models:
        build, velocity = tiny_transformers.WITH_VIDEO[name]
        result[name] = {}
        for lies, options in tiny_transformers.LIES.items():
            net = build()
            engine = Engine(
                net,
                tiny_transformers.blocks(net),
                OptimizerConfig(lr=0.01),
                world,
                updates=1,
                sharding=EngineConfig(**sharding, **options),
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
