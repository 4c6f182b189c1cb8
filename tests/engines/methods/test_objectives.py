"""Objectives: settings that have no meaning with them, models and jobs that do not fit them, and their kernels."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_jobs as tiny
import torch
from objective_rows import GIVEN, OBJECTIVE_ROWS, TEACHER

from fluvial.core import transitions
from fluvial.core.guidance import classifier_free
from fluvial.engines.engine.world import World
from fluvial.engines.errors import UsageError
from fluvial.engines.methods import LossConfig, grpo, losses
from fluvial.engines.methods.protocol import Objective
from fluvial.engines.methods.table import (
    Awm,
    Clipped,
    D3po,
    Distill,
    Dpo,
    Dppo,
    Guard,
    Nft,
    Raft,
    Sft,
)
from fluvial.engines.run.config import (
    AdvantageConfig,
    CorrectionConfig,
    KLConfig,
    NoisingConfig,
    RolloutConfig,
)
from fluvial.engines.run.declared import LinearOld, NoOld
from fluvial.engines.sampling.generate import Guidance
from fluvial.engines.sampling.items import NoisedSamples, Pairs, RecordedSteps
from fluvial.engines.sampling.noising import ContinuousLevels
from fluvial.engines.sampling.samplers import Ode, Stochastic
from fluvial.engines.sampling.window import RandomRecorded, RandomWindow
from fluvial.models import Prediction

ODE: dict[str, Any] = {"sampler": Ode()}
GROUPS: dict[str, Any] = {"prompts": 2, "group": 2, "steps": tiny.STEPS, "sampler": Stochastic(eta=0.5)}


@pytest.mark.parametrize(
    ("rollout", "changes", "words"),
    [
        (
            ODE,
            {"objective": Clipped()},
            "rollout.sampler is 'ode', expected a stochastic one, e.g. flow_sde: clipped needs the log-prob",
        ),
        (ODE, {"objective": Guard()}, "guard needs the log-probability"),
        (
            {"sampler": Stochastic("cps", eta=0.5)},
            {"objective": Guard()},
            "sampler is 'cps', expected flow_sde or dance_sde, .* with guard",
        ),
        (
            {"sampler": Stochastic("ddim", eta=0.5)},
            {"objective": Guard()},
            "sampler is 'ddim', expected flow_sde or dance_sde, .* with guard",
        ),
        (
            {"form": "unscaled"},
            {"objective": Guard()},
            "rollout.form is 'unscaled', expected density or no_const: guard takes a log-density",
        ),
        (
            {"reduction": "sum"},
            {"objective": Dppo()},
            "rollout.reduction is 'sum', expected mean: dppo takes nats per dimension",
        ),
        (
            ODE | {"shared_noise": True},
            {"objective": Nft(old=NoOld())},
            "rollout.shared_noise is True, expected False: ode takes no noise that tells",
        ),
        ({"window": RandomWindow(5)}, {}, "rollout.window has 5 stochastic steps in steps 0 to 4 of 4, expected"),
        ({"group": 1}, {"objective": Clipped()}, "rollout.group is 1, expected at least 2: clipped compares a sample"),
        (ODE | {"group": 1}, {"objective": Dpo()}, "group is 1, expected at least 2: dpo"),
        (ODE | {"group": 1}, {"objective": Raft()}, "group is 1, expected at least 2: raft"),
        (ODE, {"objective": Nft(), "train": "full"}, "train is 'full', expected lora: nft keeps policies that lag behind"),
        (
            ODE,
            {"objective": Nft(old=NoOld()), "correction": CorrectionConfig("truncate")},
            "correction.mode has no effect with nft, which takes no log-probability",
        ),
        (
            {"form": "unscaled"},
            {"correction": CorrectionConfig("mask")},
            "rollout.form is 'unscaled', expected density or no_const: a correction",
        ),
        ({"autocast": True}, {}, "rollout.autocast is True, expected False, or correction.mode truncate"),
        (
            ODE,
            {"objective": Distill(teacher=TEACHER)},
            "objective.match is 'mean_kl', expected velocity_mse: .* have no noise",
        ),
        (
            {},
            {"objective": Distill()},
            "objective.teacher is None, expected a folder of weights: distill compares with a teacher",
        ),
        (
            {},
            {"objective": Distill(teacher=TEACHER), "kl": KLConfig(0.1, "exact")},
            "kl.weight has no effect with distill, whose KL term",
        ),
        (
            ODE | {"sampler": Ode("dpmpp_2m")},
            {"objective": Distill(teacher=TEACHER, match="velocity_mse")},
            "rollout.sampler.solver is 'dpmpp_2m', expected euler: distill trains on steps, which are transitions",
        ),
        (
            {"form": "unscaled"},
            {"objective": Distill(teacher=TEACHER)},
            "rollout.form has no effect with distill, which takes no log-probability",
        ),
        (ODE, {"objective": Dpo(), "kl": KLConfig(0.1)}, "dpo has the reference in its loss already"),
        (ODE, {"objective": Dpo(preferences=GIVEN), "rewards": ("brightness",)}, "rewards has no effect with dpo"),
        (
            ODE,
            {"objective": Dpo(preferences=GIVEN), "prompts": Path("prompts")},
            "prompts has no effect with data or preferences",
        ),
        ({}, {"objective": Sft()}, "rollout.sampler is 'flow_sde', expected ode with solver euler: sft learns from data"),
        (
            ODE | {"sampler": Ode("dpmpp_2m")},
            {"objective": Sft()},
            "rollout.sampler is 'ode', expected ode with solver euler: sft learns from data",
        ),
        (
            ODE,
            {"objective": Raft(), "advantage": AdvantageConfig("batch")},
            "advantage.scale has no effect with raft, which takes no adv",
        ),
        (ODE, {"objective": Raft(), "max_log_ratio": 0.1}, "max_log_ratio has no effect with raft, which has no ratio"),
        (ODE, {"objective": Raft(), "noising": NoisingConfig(5)}, "noising.each is 5, expected at most 4, the steps"),
        (
            ODE | {"window": RandomWindow(2)},
            {"objective": Raft()},
            "rollout.window has no effect with a sampler that has no stochastic",
        ),
        ({"trained": RandomRecorded(0.5)}, {"objective": Awm()}, "rollout.trained has no effect with awm"),
        ({"reduction": "sum"}, {"objective": Awm()}, "rollout.reduction has no effect with awm"),
        ({}, {"noising": NoisingConfig(2)}, "noising has no effect with clipped, which trains on the steps"),
        ({}, {"kl": KLConfig(0.0, "exact")}, "kl.weight has no effect with kl.coef 0; remove it"),
        (ODE, {"objective": Awm(), "kl": KLConfig(0.1, "exact")}, "kl.weight has no effect with awm, whose KL term is mean"),
        (
            {"sampler": Stochastic("cps", eta=0.5), "window": RandomWindow(1)},
            {},
            "rollout.window.high is None, expected at most 3: the last step of cps has no",
        ),
        (
            {"sampler": Stochastic("cps", eta=0.5), "form": "unscaled"},
            {"kl": KLConfig(0.1)},
            "the last step of cps has no KL",
        ),
        ({}, {"minibatches": 3, "updates": 3}, "minibatches is 3, expected a divisor of the 4 samples"),
        ({}, {"minibatches": 2, "updates": 3}, "updates is 3, expected a multiple of epochs x minibatches = 2"),
    ],
)
def test_what_has_no_meaning(rollout: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    """It is refused when the run is built, in one line that says why."""
    with pytest.raises(ValueError, match=words) as refused:
        tiny.config(Path("out"), rollout=RolloutConfig(**(GROUPS | rollout)), **changes)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("prediction", "rollout", "changes", "words"),
    [
        (
            "epsilon",
            {},
            {},
            "rollout.sampler is 'flow_sde', expected ddim or ode: .* predicts epsilon",
        ),
        (
            "velocity",
            {"sampler": Stochastic("ddim", eta=0.5)},
            {},
            "rollout.sampler is 'ddim', expected flow_sde or dance_sde or cps or ode",
        ),
        ("epsilon", ODE, {"objective": Nft(old=NoOld())}, "objective is 'nft', expected one for epsilon"),
        ("epsilon", ODE, {"objective": Awm()}, "objective is 'awm', expected one for epsilon"),
        (
            "epsilon",
            ODE,
            {"objective": Raft(), "noising": NoisingConfig(levels=ContinuousLevels())},
            "noising.levels is 'continuous', expected auto, schedule or stratified",
        ),
    ],
)
def test_what_does_not_fit_the_model(
    one: World, tmp_path: Path, prediction: Prediction, rollout: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    """It is refused before the first rollout, as what was typed wrongly is."""
    run = tiny.config(tmp_path, rollout=RolloutConfig(**(GROUPS | rollout)), **changes)
    with pytest.raises(UsageError, match=words):
        tiny.Run(run, one, tiny.job(prediction))


@pytest.mark.parametrize(
    ("objective", "lacks", "words"),
    [
        (Sft(), "data", "sft learns from data, and this job has none"),
        (Dpo(preferences=GIVEN), "encode", "cannot be used: "),
        (Dpo(preferences=GIVEN), "preferences", "preferences given/preferences.jsonl cannot be read: No such file"),
        (
            Distill(teacher=TEACHER, match="velocity_mse"),
            "load",
            "teacher cannot be loaded: this job has no function from a folder",
        ),
    ],
)
def test_what_the_job_lacks(one: World, tmp_path: Path, objective: Objective, lacks: str, words: str) -> None:
    """It is refused before the first rollout, too."""
    run = tiny.config(tmp_path, rollout=RolloutConfig(**(GROUPS | ODE)), objective=objective)
    with pytest.raises(UsageError, match=words):
        tiny.Run(run, one, tiny.job("velocity", **({} if lacks == "preferences" else {lacks: None})))


def test_hyper_parameters_out_of_range() -> None:
    """A single number says so itself."""
    for made in (
        lambda: LinearOld(cap=1.0),
        lambda: LinearOld(delay=-1),
        lambda: Nft(beta=0.0),
        lambda: Awm(power=2.0),
        lambda: Raft(best=0.0),
        lambda: Dpo(beta=0.0),
        lambda: Guard(clip=-1.0),
        lambda: CorrectionConfig(threshold=0.5),
    ):
        with pytest.raises(ValueError, match=r"expected|use|only") as refused:
            made()
        assert "\n" not in str(refused.value)


IMPLEMENTED = [name for name in OBJECTIVE_ROWS if name not in ("distill, mean_kl", "alignprop")]


@pytest.mark.parametrize("name", IMPLEMENTED)
def test_every_objective_hands_the_implementation_on(name: str) -> None:
    """Each loss, and each KL term, ends in a kernel that says that there is no Triton for these tensors."""
    objective, config = OBJECTIVE_ROWS[name], LossConfig(kl_coef=0.1)
    drawn = torch.rand(9, 2, 2, *tiny.SHAPE, generator=torch.Generator().manual_seed(0))
    wide = objective.traits.trains_on == "preferences"
    x, v, x_next, x0, target, v_old, v_ref, v_teacher, _ = drawn if wide else drawn[:, :, 0]
    level, numbers = torch.tensor([0.8, 0.4]), torch.tensor([0.5, 0.25])
    fields = {
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
    kind: Any = {"steps": RecordedSteps, "noised": NoisedSamples, "preferences": Pairs}[objective.traits.trains_on]
    items = kind(**{field: value for field, value in fields.items() if field in kind._fields})
    assert objective.loss(v, items, config)[0].shape == (2,)
    with pytest.raises(ValueError, match="implementation is 'triton', but the tensors are on cpu"):
        objective.loss(v, items, config._replace(implementation="triton"))
    if name.startswith(("clipped", "crd")):
        return  # a single kernel: of crd's loss the KL alone
    if objective.traits.takes_kl:
        seen: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            for module in (losses, *(sys.modules[type(objective).__module__],)):
                for kernel in ("velocity_error", "step_log_prob", "nft_loss"):
                    if hasattr(module, kernel):
                        patch.setattr(module, kernel, spied(getattr(module, kernel), seen))
            objective.loss(v, items, config._replace(implementation="reference"))
        assert len(seen) >= 1 + (objective.traits.trains_on == "noised")
        assert set(seen) == {"reference"}


def test_the_mean_of_d3pos_loss_is_that_of_its_pairs() -> None:
    """Each pair is two items: the loss of each, averaged over the items, has the value and the gradient of the pair's."""
    objective, level = D3po(beta=2.0), torch.tensor([0.8, 0.4])
    x, x_next, v, away = torch.rand(4, 2, *tiny.SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    v, preferred = v.requires_grad_(), torch.tensor([1.0, -1.0]).double()
    step = transitions.dance_sde(level.double(), level.double() / 2, eta=0.5)
    fields = {name: None for name in RecordedSteps._fields} | {"x": x, "x_next": x_next, "transition": step}
    items: Any = RecordedSteps(**fields | {"predictions": {"ref": v.detach() + 0.01 * away}, "signal": preferred})  # type: ignore[arg-type]
    own = objective._log_ratio(v, items, LossConfig())
    context = own.detach().flip(0)  # of the other sample of the pair
    loss = objective.loss(v, items._replace(context=context), LossConfig())[0].mean()
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
    rollout = RolloutConfig(**GROUPS, guidance=Guidance(4.0, forwards=forwards, gradient=gradient))
    config, halves = tiny.config(tmp_path, rollout=rollout, kl=KLConfig(0.1)), list[Any]()
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


def spied(kernel: Any, seen: list[str]) -> Any:
    """Return a kernel that notes the implementation that it is called with."""

    def called(*args: Any, implementation: str = "missing", **options: Any) -> Any:
        seen.append(implementation)
        return kernel(*args, implementation=implementation, **options)

    return called


def test_an_implementation_that_is_not_here(one: World, tmp_path: Path) -> None:
    """Triton on a CPU is refused before the first rollout."""
    rollout = RolloutConfig(**(GROUPS | ODE))
    with pytest.raises(UsageError, match="implementation is 'triton', but the tensors are on cpu") as refused:
        tiny.Run(tiny.config(tmp_path, rollout=rollout, objective=Raft(), implementation="triton"), one)
    assert "\n" not in str(refused.value)


def test_an_implementation_of_nothing() -> None:
    """Matching a teacher's steps calls no kernel, unless there is a KL."""
    rollout, objective = RolloutConfig(**GROUPS), Distill(teacher=TEACHER)
    with pytest.raises(
        ValueError, match="implementation has no effect with distill and these settings, in which no kernel takes part"
    ):
        tiny.config(Path("out"), rollout=rollout, objective=objective, implementation="compiled")
    tiny.config(Path("out"), rollout=rollout, objective=objective, implementation="compiled", kl=KLConfig(0.1))
