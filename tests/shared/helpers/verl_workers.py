"""verl-omni's worker and losses, as far as an engine sees them, written from its source (verl-project/verl-omni, a1139ba).

`Worker` makes the calls of `TrainingWorker` in `verl_omni/workers/engine_workers.py`, in their order, on verl's own configs
and registry; it lacks Ray, profiling and FLOPs. A loss has the equation of its class in
`verl_omni/trainer/diffusion/diffusion_algos.py`.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from helpers import real_verl
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData
from torch import Tensor
from torch.nn.functional import logsigmoid

Loss = Callable[..., tuple[Tensor, dict[str, Any]]]


class WanAdapter:
    """What an engine calls of `verl_omni/pipelines/wan22_dance_grpo`: levels with a shift of 5."""

    @staticmethod
    def build_scheduler(config: Any) -> Any:
        from diffusers import FlowMatchEulerDiscreteScheduler

        steps, scheduler = config.pipeline.num_inference_steps, FlowMatchEulerDiscreteScheduler()
        t = torch.linspace(1, 0, steps + 1, dtype=torch.float64).float()
        scheduler.set_timesteps(steps, sigmas=(5 * t / (1 + 4 * t))[:steps].numpy())
        return scheduler

    @staticmethod
    def configure_trainable_params(module: Any, config: Any) -> None:
        pass

    @staticmethod
    def configure_train_mode(module: Any) -> None:
        pass


class Worker:
    """An engine of the registry and the calls that a trainer makes of it.

    Args:
        kind: model type.
        model, engine, optimizer: configs of the engine; its strategy is the backend.
        loss: loss function; None for the reference and the teacher.
    """

    def __init__(self, kind: str, model: Any, engine: Any, optimizer: Any, loss: Loss | None = None) -> None:
        import fluvial.engines.extensions.verl.plugin  # noqa: F401  as `import verl` does

        engine.use_remove_padding = engine.use_fused_kernels = False
        self.config, self.loss = engine, loss
        self.engine = real_verl.load().EngineRegistry.new(
            model_type=kind,
            backend=engine.strategy,
            model_config=model,
            engine_config=engine,
            optimizer_config=optimizer,
            checkpoint_config=None,
        )
        assert (self.engine.get_data_parallel_rank(), self.engine.is_mp_src_rank_with_outputs()) == (0, True)
        self.engine.initialize()

    def infer(self, data: TensorDict, *, no_lora_adapter: bool = False) -> dict[str, Tensor]:
        data = self._with_defaults(data, self.config.infer_micro_batch_size_per_gpu)
        adapter = self.engine.disable_adapter() if no_lora_adapter else nullcontext()
        with self.engine.eval_mode(disable_auto_offload=False), adapter:
            output = self.engine.infer_batch(data, loss_function=None)
        self._reduced(output)
        return output["model_output"]

    def update(self, data: TensorDict, *, mini_batches: int = 1) -> list[dict[str, Any]]:
        size, found = len(data) // mini_batches, []
        with self.engine.train_mode(disable_auto_offload=False):
            for i in range(mini_batches):
                part = self._with_defaults(data[i * size : (i + 1) * size], self.config.micro_batch_size_per_gpu)
                with self.engine.train_mode(disable_auto_offload=True):
                    output = self.engine.train_batch(part, loss_function=self.loss)
                output["metrics"]["lr"] = self.engine.lr_scheduler_step() if i == mini_batches - 1 else None
                found.append(self._reduced(output))
        return found

    def _with_defaults(self, data: TensorDict, micro_batch: int) -> TensorDict:
        data = data.clone(recurse=False)
        for name, value in {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": micro_batch}.items():
            data[name] = NonTensorData(value)
        return data

    def _reduced(self, output: dict[str, Any]) -> dict[str, Any]:
        loss = torch.sum(torch.tensor(output.pop("loss")))
        dist.all_reduce(loss, op=dist.ReduceOp.AVG, group=self.engine.get_data_parallel_group())
        return {**output.pop("metrics"), "loss": loss.item()}


def loss_of(per_step: Callable[[dict[str, Tensor], Any], Tensor]) -> Loss:
    def loss(*, model_output: dict[str, Tensor], data: Any, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
        value = per_step(model_output, data)
        return value / data["gradient_accumulation_steps"] * data["sp_size"], {"actor/loss": value.detach().item()}

    return loss


def kl(output: dict[str, Tensor], mean: Tensor) -> Tensor:
    away = (output["prev_sample_mean"] - mean).square().flatten(1).mean(1)
    return (away / (2 * output["std_dev_t"].flatten() ** 2)).mean()


def diffusion_nft(output: dict[str, Tensor], data: Any, *, beta: float, clip: float, ref: float) -> Tensor:
    x0, xt, t = output["x0"], output["xt"], output["t_expanded"]
    v, old, base = (output[f"{name}prediction"] for name in ("forward_", "old_", "ref_forward_"))

    def error(implicit: Tensor) -> Tensor:
        away = xt - t * implicit - x0
        return away.square().flatten(1).mean(1) / away.detach().double().abs().flatten(1).mean(1).clip(min=1e-5).float()

    good, bad = error(beta * v + (1 - beta) * old), error((1 + beta) * old - beta * v)
    prob = data["reward_prob"]
    return (clip * (prob * good + (1 - prob) * bad) / beta).mean() + ref * (v - base).square().mean()


def dpo(output: dict[str, Tensor], data: Any, *, beta: float) -> Tensor:
    assert bool((data["sample_level_rewards"][0::2] >= data["sample_level_rewards"][1::2]).all())
    target = output["noise"] - output["latent"]
    own, ref = ((v - target).square().flatten(1).mean(1) for v in (output["noise_pred"], data["ref_noise_pred"]))
    gain = own - ref
    return -logsigmoid(-0.5 * beta * (gain[0::2] - gain[1::2])).mean()
