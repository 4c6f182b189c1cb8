"""Methods: their own settings, their kernels, and the formulas of single ones."""

from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers.objective_rows import OBJECTIVE_ROWS
from helpers.refusals import refuses
from helpers.tables import normals
from torch.testing import assert_close

from fluvial.core import gaussian, transitions
from fluvial.core.guidance import classifier_free
from fluvial.core.policy import PolicyInfo
from fluvial.core.random import key
from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.methods import ChunkGrpo, StepKLConfig, Truncate, grpo
from fluvial.engines.methods.losses import correct
from fluvial.engines.methods.table import (
    METHODS,
    Crd,
    D3po,
    Dgpo,
    Grpo,
    Kto,
)
from fluvial.engines.run.config import TrainConfig, with_values
from fluvial.engines.run.method import PassesConfig
from fluvial.engines.run.recipes import RECIPES
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.generate import Guidance
from fluvial.engines.sampling.items import NoisedSamples, Pairs, RecordedSteps
from fluvial.engines.sampling.samplers import SAMPLERS, Stochastic
from fluvial.kernels import dispatch
from fluvial.kernels.dispatch import prefer, resolve

NEEDED: dict[str, Any] = {"guard": {}}
GROUPS: dict[str, Any] = {"prompts": 2, "group": 2, "steps": tiny.STEPS, "sampler": Stochastic(eta=0.5)}


# What methods are made of beside their own hyper-parameters.
PARTS = {name for method in OBJECTIVE_ROWS.values() for name, value in vars(method).items() if is_dataclass(value)}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_its_own_settings_alone(name: str) -> None:
    """What it does not have cannot be set, and no name is that of a setting of the run, so that flags need no prefix."""
    own = {field.name for field in fields(cast(Any, METHODS[name]))}
    assert own.isdisjoint(field.name for field in fields(TrainConfig))
    for missing in sorted(PARTS - own):
        refuses(
            rf"there is no field method.{missing}",
            with_values,
            RECIPES["grpo"](),
            {"method": METHODS[name](**NEEDED.get(name, {})), missing: 1},
        )


WITHOUT_KERNEL = (
    *("distill, mean_kl", "distill, clean", "alignprop", "adjoint"),
    *("dmd2", "ac-dmd", "tdm", "tdm-r1", "refl", "srpo"),
)
IMPLEMENTED = [name for name in OBJECTIVE_ROWS if name not in WITHOUT_KERNEL]


@pytest.mark.parametrize("name", IMPLEMENTED)
def test_every_loss_takes_the_preferred_implementation(name: str) -> None:
    """Each loss, and each KL term, ends in a kernel that says that there is no Triton for these tensors."""
    method: Any = OBJECTIVE_ROWS[name]
    if hasattr(method, "kl"):
        method = replace(method, kl=replace(method.kl, coef=0.1))
    drawn = torch.rand(9, 2, 2, *tiny.SHAPE, generator=torch.Generator().manual_seed(0))
    x, v, x_next, x0, target, v_old, v_ref, v_teacher, _ = drawn if method.is_paired else drawn[:, :, 0]
    level, numbers = torch.tensor([0.8, 0.4]), torch.tensor([0.5, 0.25])
    values = {
        "x": x,
        "level": level,
        "timestep": level,
        "sample": torch.arange(2),
        "signal": numbers,
        "weight": torch.ones(2),
        "level_next": level / 2,
        "x_next": x_next,
        "log_prob_old": -numbers,
        "x0": x0,
        "target": target,
        "predictions": {"old": v_old, "ref": v_ref, "teacher": v_teacher},
        "transition": transitions.dance_sde(level, level / 2, eta=0.5),
        "context": numbers[:, None].expand(2, 2) if name == "crd" else numbers,
    }
    kind: Any = Pairs if method.is_paired else NoisedSamples if method.recorded is None else RecordedSteps
    rows = kind(**{field: value for field, value in values.items() if field in kind._fields})
    assert method.loss(v, rows)[0].shape == (2,)
    with pytest.raises(ValueError, match="implementation is 'triton', but the tensors are on cpu"), prefer("triton"):
        method.loss(v, rows)
    seen: list[str] = []

    def note(*args: Any) -> Any:
        seen.append(resolve(*args))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch, prefer("reference"):
        patch.setattr(dispatch, "resolve", note)
        method.loss(v, rows)
    kernels = 1 + (hasattr(method, "kl") and method.recorded is None and name != "crd")
    assert len(seen) >= kernels
    assert set(seen) == {"reference"}


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (Kto(labels="reward"), [0.3]),
        (Crd(), [[0.15, 0.45], [0.45, 0.45]]),  # means of the implicit rewards and of the rewards, per level
        (Dgpo(), torch.tensor([0.15, 0.45]).sigmoid().tolist()),
    ],
)
def test_statistics_of_an_update_are_those_of_the_samples_that_count(method: Any, expected: list[Any]) -> None:
    """One of three samples does not: it is at the mean of its group, or among the middle ones of `advantage.extremes`."""
    contexts, values = list[torch.Tensor](), torch.tensor([[0.2, 0.4], [0.0, 0.0], [0.1, 0.5]])
    used = torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]])
    part: Any = SimpleNamespace(used=used, rows=SimpleNamespace(level=torch.ones(1)), look_up=lambda table: table[0])
    part.with_rows = lambda context: contexts.append(context)
    batch = SimpleNamespace(spread=lambda values: values, share=SimpleNamespace(batch=3), compared=3)
    grades = SimpleNamespace(advantage=torch.tensor([1.0, 0.0, -2.0]), keep=None)
    calls: dict[str, Any] = {"grade": lambda *given: grades, "gather": lambda *given: values, "measure": lambda *given: None}
    calls |= {"noise_samples": lambda *given, **more: None, "minibatches": lambda *given: [part]}
    calls |= {"predict": lambda part, *names: part, "update": lambda *given: None}
    list(method.learn(SimpleNamespace(**calls), batch, key(0)))
    assert_close(contexts[0], torch.tensor(expected))


def test_a_correction_weights_the_signal_by_the_ratio_to_the_rollout() -> None:
    """Old log-probabilities are those of the update; the ratios are e, which is truncated, and 1."""
    now, rows = torch.tensor([0.5, -1.0]), SimpleNamespace(log_prob_old=torch.tensor([-0.5, -1.0]), predictions={})
    rows.signal = torch.tensor([2.0, 3.0])
    steps: Any = SimpleNamespace(rows=rows, look_up=lambda table: table[:, 0], with_rows=lambda **fields: fields)
    calls: dict[str, Any] = {"measure": lambda *given: (now,), "gather": lambda steps, values: values[:, None]}
    run: Any = SimpleNamespace(**calls, log=lambda **values: None)
    found: Any = correct(run, steps, Truncate(threshold=1.5), cast(Any, None))
    assert torch.equal(found["log_prob_old"], now)
    assert_close(found["signal"], rows.signal * torch.tensor([1.5, 1.0]))


@pytest.mark.parametrize("weight", ["rate", "exact", "mse"])
def test_each_kl_of_steps_has_its_coefficient(weight: Any) -> None:
    """That to the reference, which is logged, and that to the moving average have one weight per step."""
    (v, ref, ema), level = normals(0, 3, 2, 3, 4), torch.tensor([0.8, 0.4]).double()
    step = transitions.dance_sde(level, level / 2, eta=0.5)
    rows: Any = SimpleNamespace(transition=step, dt=-level / 2, predictions={"ref": ref, "ema": ema})
    kl, kl_ema = (gaussian.kl(step, v, other) for other in (ref, ema))
    config, nothing = StepKLConfig(coef=0.1, ema_coef=0.5, weight=weight), torch.zeros(2).double()
    loss, info = config.add_to_steps(nothing, PolicyInfo(*[nothing] * 5), kl, v, rows, SAMPLERS["flow_sde"], "mean")
    factor: Any = {"rate": level / 2, "exact": 1.0, "mse": 2 * step.std**2}[weight]
    assert_close(loss, factor * (0.1 * kl + 0.5 * kl_ema))
    assert torch.equal(info.kl_ref, kl)


def test_the_mean_of_d3pos_loss_is_that_of_its_pairs() -> None:
    """Each pair is two items: the loss of each, averaged over the items, has the value and the gradient of the pair's."""
    objective, level = D3po(beta=2.0), torch.tensor([0.8, 0.4])
    x, x_next, v, away = torch.rand(4, 2, *tiny.SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    v, preferred = v.requires_grad_(), torch.tensor([1.0, -1.0]).double()
    step = transitions.dance_sde(level.double(), level.double() / 2, eta=0.5)
    fields = {name: None for name in RecordedSteps._fields} | {"x": x, "x_next": x_next, "transition": step}
    items: Any = RecordedSteps(**fields | {"predictions": {"ref": v.detach() + 0.01 * away}, "signal": preferred})  # type: ignore[arg-type]
    own = objective.log_ratio(v, items)
    context = own.detach().flip(0)  # of the other sample of the pair
    loss = objective.loss(v, items._replace(context=context))[0].mean()
    pair = -torch.nn.functional.logsigmoid(2.0 * (own[0] - own[1]))
    torch.testing.assert_close(loss, pair)
    torch.testing.assert_close(*(torch.autograd.grad(value, v, retain_graph=True)[0] for value in (loss, pair)))
    assert float(torch.autograd.grad(pair, v)[0].abs().max()) > 1e-3


@dataclass(frozen=True)
class PlainGuidance(tiny.Tiny):
    """A model that combines the halves of guidance as the kernels do."""

    guide = staticmethod(classifier_free)


@pytest.mark.parametrize("forwards", ["one", "two"])
@pytest.mark.parametrize("gradient", ["both", "conditional"])
def test_guidance_in_the_loss_has_the_bits_of_guidance_before_it(
    one: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forwards: Any, gradient: Any
) -> None:
    """The kernel gets both halves from a model with plain guidance, and the guided prediction from any other."""
    rollout = SamplingConfig(**GROUPS, guidance=Guidance(4.0, forwards=forwards, gradient=gradient))
    config, halves = tiny.config(tmp_path, sampling=rollout, **{"kl.coef": 0.1}), list[Any]()
    kernel = grpo.policy_loss

    def spied_loss(*args: Any, **options: Any) -> Any:
        halves.append(options["v_uncond"])
        return kernel(*args, **options)

    monkeypatch.setattr(grpo, "policy_loss", spied_loss)
    found = []
    for model, folds in ((tiny.Tiny(), False), (PlainGuidance(), True)):
        halves.clear()
        run = tiny.Run(config, one, tiny.job(model=model))
        run.rollout()
        assert {half is not None for half in halves} == {folds}
        assert not folds or {half.requires_grad for half in halves} == {gradient == "both"}
        assert run.infos[0].grad_norm > 0
        found.append(([info._replace(memory=()) for info in run.infos], run.weights()))
    (infos, weights), (folded_infos, folded_weights) = found
    assert infos == folded_infos
    assert all(torch.equal(weights[name], folded_weights[name]) for name in weights)
    assert folded_infos[0].max_abs["log_ratio"] == 0


def test_the_ratio_of_a_chunk_is_that_of_its_steps(one: World, tmp_path: Path) -> None:
    """With chunks of one step the run is GRPO's; longer ones change the second update of a batch, and not the first."""
    sampling = SamplingConfig(prompts=2, group=2, steps=tiny.STEPS, sampler=Stochastic(eta=0.5))
    numbers: Any = {"sampling": sampling, "clip_low": 0.5, "clip_high": 0.5, "passes": PassesConfig(epochs=2)}
    runs = dict[str, tuple[list[float], list[float]]]()
    for name, method in {
        "grpo": Grpo(**numbers),
        **{str(size): ChunkGrpo(chunk=size, **numbers) for size in (1, 2, None)},
    }.items():
        run = tiny.Run(tiny.config(tmp_path / name, method=method, updates=2, optimizer=OptimizerConfig(lr=0.02)), one)
        run.rollout()
        runs[name] = [info.mean["log_ratio"] for info in run.infos], [info.grad_norm for info in run.infos]
    assert runs["1"][0] == pytest.approx(runs["grpo"][0], abs=1e-6)
    assert runs["1"][1] == pytest.approx(runs["grpo"][1], rel=1e-5)
    firsts, seconds = zip(*(norms for _, norms in runs.values()), strict=True)
    assert firsts == pytest.approx([firsts[0]] * 4, rel=1e-5)
    assert len({round(norm / seconds[0], 4) for norm in seconds}) == 3  # GRPO's and that of chunks of one are the same


@pytest.mark.parametrize(("reference", "policy"), [("base", "ref"), ("old", "old")])
def test_the_error_of_the_reference_is_that_of_its_policy(reference: Literal["base", "old"], policy: str) -> None:
    """What an item adds to its group's sigmoid is beta A (error - error of the reference's prediction)."""
    generator = torch.Generator().manual_seed(0)
    x, v, target, ref, old = torch.randn(5, 3, 4, generator=generator)
    advantage = torch.tensor([1.0, -2.0, 0.5])
    items = NoisedSamples(
        x=x,
        level=torch.full((3,), 0.5),
        timestep=None,
        sample=torch.arange(3),
        signal=advantage,
        weight=torch.ones(3),
        x0=x,
        target=target,
        predictions={"ref": ref, "old": old},
    )
    expected = 3.0 * advantage * ((v - target).square().mean(1) - (items.predictions[policy] - target).square().mean(1))
    torch.testing.assert_close(Dgpo(beta=3.0, reference=reference).margin(v, items), expected)
