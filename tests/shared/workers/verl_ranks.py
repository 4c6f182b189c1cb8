"""Trains tiny pipelines through verl's calls on any number of ranks, for tests/engines/extensions/verl/test_ranks.py."""

from pathlib import Path
from typing import Any

import torch
from helpers import real_verl, verl_runs
from safetensors.torch import save_file

from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError

# Settings of the engine; the model config besides; and whether ranks share samples.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "lora": ({"reshard_after_forward": False, "use_no_sync_for_gradient_accumulation": False}, verl_runs.LORA),
    "shared": ({"ulysses_sequence_parallel_size": 2}, verl_runs.LORA),
}


def train(world: World, out: str) -> dict[str, Any]:
    """Write gradients, weights and log-probs of each way; return what the engines say of the ranks."""
    real_verl.load()
    result: dict[str, Any] = {}
    made = verl_runs.rollout("qwen-image", scale=2.5)
    for way, (options, model) in WAYS.items():
        if way == "shared" and world.size == 1:
            options = {}
        engine = verl_runs.build("qwen-image", scale=2.5, engine=options, **model)
        verl_runs.move(engine.module)
        each = 4 // engine.get_data_parallel_size()
        rows = slice(engine.get_data_parallel_rank() * each, (engine.get_data_parallel_rank() + 1) * each)
        data = verl_runs.batch(made)[rows]
        with engine.train_mode():
            output = engine.forward_backward_batch(data, verl_runs.flow_grpo())
            gradients = verl_runs.gradients(engine)
            norm = engine.optimizer_step()
        loss = torch.tensor(sum(output["loss"]))
        torch.distributed.all_reduce(loss, torch.distributed.ReduceOp.AVG, group=engine.get_data_parallel_group())
        sent = dict(engine.get_per_tensor_param(base_sync_done=True)[0])
        if world.is_main:
            save_file({name: tensor.contiguous() for name, tensor in gradients.items()}, Path(out) / f"{way}.safetensors")
        result[way] = {
            "norm": norm,
            "loss": float(loss),
            "dp": [engine.get_data_parallel_rank(), engine.get_data_parallel_size()],
            "collects": engine.is_mp_src_rank_with_outputs(),
            "log_probs": output["model_output"]["log_probs"].tolist(),
            "sent": {name: float(tensor.double().sum()) for name, tensor in sent.items()},
        }
        if world.size > 1 and way == "full":
            uneven = verl_runs.batch(made)[: 2 + world.rank]
            try:
                engine.infer_batch(uneven)
            except RunError as error:
                result["uneven"] = str(error)
    return result
