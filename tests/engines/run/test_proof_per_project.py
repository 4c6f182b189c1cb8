"""One update of each project's published settings, at tiny size, is the update that its paper's formula makes.

The references (`helpers/paper_losses.py`) are written in float64 from the formulas, and read the published settings, not
fluvial's. Two updates are made of one stored rollout: the first on policy, the second with a policy that has moved, so that
ratios, clips and masks take part.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import paper_losses
from helpers import tiny_jobs as tiny
from helpers.paper_losses import Scene, Velocity
from helpers.published_settings import settings_of
from helpers.spied_runs import Spied, Update
from torch import Tensor

from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.extensions.published.resolve import resolve
from fluvial.engines.extensions.published.runs import PublishedRun, find_run, load_published
from fluvial.engines.methods.table import Dpo
from fluvial.engines.run.config import MachineConfig, PipelineConfig, TrainConfig, with_values
from fluvial.engines.run.evaluation.config import EvaluationConfig
from fluvial.engines.run.method import PassesConfig
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.samplers import Ode
from fluvial.engines.sampling.window import Branches
from fluvial.models import LoraConfig

Loss = Callable[[Scene], Tensor]
# The runs that stand for each project, with the loss of their paper.
PROVED: dict[str, Loss] = {
    "flow_grpo/sd3.5-medium/ocr": paper_losses.grpo,
    "flow_grpo/flux.1-dev/pickscore": paper_losses.grpo,
    "dancegrpo/flux.1-dev/hpsv2-16gpu": paper_losses.grpo,
    "mixgrpo/flux.1-dev/multi-reward": paper_losses.grpo,
    "flow_cps/flux.1-dev/pickscore": paper_losses.grpo,
    "grpo_guard/sd3.5-medium/ocr": paper_losses.guard,
    "diffusion_nft/sd3.5-medium/geneval": paper_losses.nft,
    "awm/sd3.5-medium/geneval": paper_losses.awm,
    "ddpo/sd1.4/aesthetic": paper_losses.grpo,
    "diffusion_dpo/sd1.5/pickapic": paper_losses.dpo,
    "verl_omni/qwen-image/ocr-flowgrpo-lora": paper_losses.grpo,
    "verl_omni/qwen-image/ocr-flowdppo": paper_losses.dppo,
    "unirl/sd3.5-medium/flowdppo": paper_losses.dppo,
    "unirl/sd3.5-medium/nft": paper_losses.nft,
    "flow_factory/flux.1-dev/awm": paper_losses.awm,
    "flow_factory/sd3.5-medium/grpo-nocfg": paper_losses.grpo,
    "miles_diffusion/qwen-image/ocr": paper_losses.grpo,
    "dgpo/sd3.5-medium/geneval": paper_losses.dgpo,
    "tempflow_grpo/flux.1-dev/hpsv3": paper_losses.tempflow,
    "d3po/sd1.5/compressibility": paper_losses.d3po,
    "alignprop/sd1.5/aesthetic": paper_losses.alignprop,
    "flow_factory/sd3.5-medium/crd-ocr": paper_losses.crd,
    "mixgrpo-flash/flux.1-dev/multi-reward": paper_losses.grpo,
    "mixgrpo-flash-star/flux.1-dev/multi-reward": paper_losses.grpo,
    "flow_cps/sd3.5-medium/geneval": paper_losses.grpo,
    "flow_grpo/wan2.1-t2v-1.3b/ocr": paper_losses.grpo,
    "tempflow_grpo/sd3.5-medium/geneval": paper_losses.tempflow,
}
GROUPS, SIZE, RANK = 2, 4, 4
MOST_STEPS = {"ddpo": 10, "d3po": 10}  # of 50 and of 20


def test_every_project_is_proved_or_has_no_objective() -> None:
    """A project without a row has only runs of methods whose formula is tested with the method."""
    proved = {name.partition("/")[0] for name in PROVED} | {
        "gardo",
        "srpo",
        "tdm_r1",
        "rtdmd",
    }  # test_few_steps.py and others
    proved |= {
        "branchgrpo",
        "spo",
        "tp_grpo",
        "diffusion_opd",
        "flash_grpo",
    }  # test_trees.py, test_dense.py, test_teachers.py
    for run in load_published().values():
        assert project_of(run) in proved, run.name


@pytest.mark.parametrize("name", PROVED)
def test_an_update_is_the_papers(one: World, tmp_path: Path, name: str) -> None:
    """Loss and gradient of both updates are those of the formula; as many steps, or levels, are trained on as published."""
    run = find_run(name)
    spied, gradients = learnt(run, one, tmp_path)
    assert len(spied.updates) == spied.trainer.config.method.passes.epochs
    start = spied.updates[0].policy
    for update, info, gradient in zip(spied.updates, spied.infos, gradients, strict=True):
        factors = {part: tensor.double().requires_grad_() for part, tensor in update.policy.items() if ".default." in part}
        found = scene(spied, run, update, factors, start)
        assert len(found.sample) == len(found.sample.unique()) * trained(spied, run)
        loss = PROVED[name](found)
        expected = torch.autograd.grad(loss, list(factors.values()))
        tolerance = tolerance_of(run, on_policy=info is spied.infos[0])
        assert info.loss == pytest.approx(float(loss.detach()), rel=tolerance, abs=tolerance)
        whole = torch.cat([part.flatten() for part in expected])
        ours = torch.cat([gradient[f"exp_avg.{part}"].flatten() for part in factors]).double()
        assert float((ours - whole).norm()) <= tolerance * float(whole.norm())
        assert float(whole.norm()) > 0


def project_of(run: PublishedRun) -> str:
    """Return the first part of a run's name."""
    return run.name.partition("/")[0]


def tolerance_of(run: PublishedRun, *, on_policy: bool) -> float:
    """Return 2e-6, or more where the run's own numbers magnify the rounding of float32.

    An adapter is merged with its weight, which rounds the sum.

    DPO multiplies the difference of two errors near 1 by beta / 2, and DDPO's guidance of 5 makes predictions that are up to
    a hundred times the noise of a late step, in which the residual is lost.
    """
    if project_of(run) in ("ddpo", "d3po"):
        return 1e-5
    if run.algorithm == "CRD":  # differences of errors near 1, too
        return 3e-6
    return 2e-6 if on_policy else 2e-6 + settings_of(run.name).get("loss_extra", {}).get("dpo_beta", 0) / 2 * 2**-23


def trained(spied: Spied, run: PublishedRun) -> int:
    """Return the number of items per sample that the run states."""
    pair = 2 if spied.trainer.config.method.is_paired else 1  # the winner and the loser
    if project_of(run) == "alignprop":
        return 1  # a path of several steps
    if project_of(run) == "tempflow_grpo":
        return 1  # of the 9 branching steps of its trunk
    s = settings_of(run.name)
    steps = s.get("train_sampling_steps")  # without another number, D3PO trains on all
    number: int = s.get("trained_steps_per_sample", s.get("noise_levels_per_sample", steps))
    noised = "noise_levels_per_sample" in s
    return pair * (number if noised else min(number, spied.trainer.config.method.sampling.steps))


def learnt(run: PublishedRun, world: World, out: Path) -> tuple[Spied, list[dict[str, Tensor]]]:
    """Make one rollout and two updates of a run; return it with the gradient of each update."""
    epsilon = settings_of(run.name).get("sampler") == "ddim_eta" or "stable-diffusion-v1" in run.model
    spied = Spied(
        shrunk(run, out), world, tiny.job("epsilon" if epsilon else "velocity", rewards={"contrast": tiny.contrast})
    )
    gradients, optimize = [], spied.trainer.engine.update

    def noted(*args: Any, **options: Any) -> Any:
        info = optimize(*args, **options)
        gradients.append(spied.gradient())
        return info

    spied.trainer.engine.update = noted  # type: ignore[method-assign]
    spied.rollout()
    return spied, gradients


def shrunk(run: PublishedRun, out: Path) -> TrainConfig:
    """Return the run's configuration for the tiny net: fewer samples, a small rank, an optimizer that shows the gradient.

    AdamW without momentum keeps the gradient itself as its first moment.
    """
    config = resolve(run)
    epochs = 1 if config.method.needs.rewards == "gradients" else 2  # a reward's gradient is that of the policy as it is
    # A preference's beta multiplies distances, so that its policy must move less for a gradient that is not 0.
    lr = 1e-5 if config.method.is_paired else 1e-2
    if isinstance(config.method, Dpo):  # with pairs of its rollout in place of a folder of pairs
        ode = SamplingConfig(steps=config.method.sampling.steps, sampler=Ode())
        config = with_values(config, {"method": replace(config.method, preferences=None), "sampling": ode})
    sampling = config.method.sampling
    negative = sampling.guidance.negative.strip()  # prompts are digits here
    smaller: dict[str, Any] = {"prompts": GROUPS, "group": SIZE, "guidance": replace(sampling.guidance, negative=negative)}
    if sampling.window.kind == "branches":  # 2 branches of each of 2 steps
        smaller["window"] = Branches(1, 2, high=2)
    steps = MOST_STEPS.get(project_of(run), sampling.steps)
    return with_values(
        config,
        {
            "out": out,
            "model": "handwriting",
            "train": "lora",
            "updates": epochs,
            **({"passes.epochs": epochs} if epochs > 1 else {}),
            **({"passes.minibatches": 1} if isinstance(config.method.passes, PassesConfig) else {}),
            "rewards": (),
            "sampling": replace(sampling, steps=steps, **smaller),
            "optimizer": OptimizerConfig(lr=lr, betas=(0.0, 0.999), max_grad_norm=1e30),
            "lora": LoraConfig(rank=RANK, alpha=config.lora.alpha * RANK / config.lora.rank, form=config.lora.form),
            "engine": MachineConfig(micro_batch=8, update_micro_batch="rollout"),
            "pipeline": PipelineConfig(),
            "evaluation": replace(EvaluationConfig(), every=config.evaluation.every),
        },
    )


def scene(
    spied: Spied, run: PublishedRun, update: Update, factors: Mapping[str, Tensor], start: Mapping[str, Tensor]
) -> Scene:
    """Return what an update was made of, in float64."""
    config, items = spied.trainer.config, update.items
    batch, wide = GROUPS * SIZE, items.x.ndim > 1 + len(tiny.SHAPE)
    prompts, reward = spied.prompts, spied.scores.double()
    sample = items.sample
    if wide:  # pairs: the winner and the loser of each, one after the other
        prompts, sample = [given.prompt.text for given in spied.preferences], sample.repeat_interleave(2)

    def each(field: str) -> Tensor | None:
        tensor = getattr(items, field, None)
        return None if tensor is None else (tensor.flatten(0, 1) if wide else tensor).double()

    level, levels = items.level.double().repeat_interleave(2 if wide else 1), spied.trainer.schedule.levels
    x = each("x")
    assert x is not None
    scale = config.lora.alpha / config.lora.rank
    before = {part: start[part].double() for part in factors}
    # Within one rollout no follower moves: the old policy and the moving average are what the policy was before it.
    policy, old = (velocity_of(weights, scale, prompts, run) for weights in (factors, before))
    reference = velocity_of({}, scale, prompts, run, guidance=settings_of(run.name).get("loss_extra", {}).get("kl_cfg"))
    return Scene(
        settings_of(run.name),
        reward,
        torch.arange(batch) // config.method.sampling.window.count_compared(config.method.sampling.group),
        sample,
        x,
        level,
        each("x_next"),
        each("level_next"),
        each("x0"),
        each("target"),
        float(levels[1]),
        policy,
        old,
        reference,
        old,
        levels.double(),
        each("noise"),
    )


def velocity_of(
    factors: Mapping[str, Tensor], scale: float, prompts: list[str], run: PublishedRun, guidance: float | None = None
) -> Velocity:
    """Return a policy in float64: the tiny net with W + scale B A for each W, guided as the run says.

    Args:
        factors: A and B of each layer, by their names; none is the base model.
        scale: alpha / rank.
        prompts: prompt of each sample.
        run: the published run.
        guidance: guidance scale, where it is not the run's.
    """
    net, model = tiny.Net(0).double(), tiny.Tiny()
    weights: dict[str, Tensor] = dict(net.named_parameters())
    for name in weights:
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_B.default.weight" in factors:
            b, a = factors[f"{layer}.lora_B.default.weight"], factors[f"{layer}.lora_A.default.weight"]
            weights[name] = weights[name].detach() + scale * b @ a
    s = settings_of(run.name)
    guided = s.get("guidance_kind") in ("cfg", "true_cfg_renorm") and s.get("train_guidance_scale", 1.0) != 1
    guided = guided and run.algorithm != "DGPO"  # its update is without guidance
    if guidance is not None:
        guided = guidance != 1
    strength: Any = s.get("train_guidance_scale") if guidance is None else guidance

    def velocity(x: Tensor, level: Tensor, sample: Tensor) -> Tensor:
        def predicted(of: list[str]) -> Tensor:
            rows = model.encode(of).rows.double()
            return torch.func.functional_call(net, weights, (x, rows, level))

        v = predicted([prompts[int(i)] for i in sample])
        if not guided:
            return v
        blank = predicted([""] * len(sample))
        blank = blank if s.get("cfg_in_training_forward", True) else blank.detach()
        return blank + strength * (v - blank)

    return velocity
