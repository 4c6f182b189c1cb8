"""Settings without a meaning: one table of configurations that are refused when they are built, with the field and why."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny_jobs as tiny
from helpers.objective_rows import GIVEN, TEACHER
from helpers.spied_runs import ODE, STEPS

from fluvial.engines.methods import HeadGan
from fluvial.engines.methods import table as of
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.declared import LinearOld, NoOld
from fluvial.engines.sampling.config import (
    Mask,
    NoCorrection,
    ReadingConfig,
    RefilledGroups,
    RolloutConfig,
    SamplingConfig,
    ScoutedGroups,
    Truncate,
)
from fluvial.engines.sampling.samplers import Ode, SaSolver, Stochastic
from fluvial.engines.sampling.tail import Tail
from fluvial.engines.sampling.window import (
    AllSteps,
    Branches,
    Candidates,
    MovingWindow,
    RandomWindow,
    ScatteredSteps,
    Splits,
)
from fluvial.engines.scoring.advantages import AdvantageConfig
from fluvial.models.lora import Dora, Lokr, LoraConfig
from fluvial.models.step_cache import FirstBlockCache, GuidanceCache

SDE, DDIM, CPS, DPM = Stochastic(eta=0.5), Stochastic("ddim", eta=0.5), Stochastic("cps", eta=0.5), Ode("dpmpp_2m")
GRPO = of.Grpo()
PAIRS = SamplingConfig(prompts=2, group=2, steps=tiny.STEPS, sampler=SDE)
TREE = SamplingConfig(prompts=2, group=8, steps=6, sampler=SDE, window=Splits((0, 1, 2), high=5))
STATES = SamplingConfig(prompts=2, group=4, steps=6, sampler=SDE, window=Candidates(4))
CACHE = {"rollout__step_cache": FirstBlockCache(), "sampling__steps": 6}
MERGED = {"train": "lora", "rollout__reuse": "merged"}
CUT = RandomWindow(2, low=2, high=4)
SERVED = RolloutConfig(source="http://127.0.0.1:1")
TRUNCATE = Truncate()
REFILLED = RefilledGroups()
OPPOSED = of.Dmd2(fake_updates=1, gan=HeadGan())
MSE = of.Distill(teacher=(TEACHER,), match="velocity_mse")


def run(method: Any = GRPO, /, **changes: Any) -> TrainConfig:
    """Return a run of two groups of two; `a__b` is the field a.b."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return tiny.config(Path("out"), **{"method": method, "sampling": PAIRS, **named})


def ode(method: Any, /, **changes: Any) -> TrainConfig:
    """Return a run whose samples are made by Euler's method."""
    return run(method, **{"sampling__sampler": Ode(), **changes})


def cps(method: Any, /, **changes: Any) -> TrainConfig:
    return run(method, **{"sampling__sampler": CPS, **changes})


def scouted(sampling: SamplingConfig, scouts: int, **changes: Any) -> TrainConfig:
    return run(of.Nft(), train="lora", sampling=replace(sampling, groups=ScoutedGroups(scouts)), **changes)


def refilled(**changes: Any) -> TrainConfig:
    return run(**{"sampling__groups": REFILLED, **changes})


def ahead(**changes: Any) -> TrainConfig:
    return run(**{"rollout__ahead": 1, "correction": TRUNCATE, **changes})


def auto(method: Any = GRPO, /, **changes: Any) -> TrainConfig:
    return run(method, **{"engine__micro_batch": "auto", **changes})


def lora(**changes: Any) -> TrainConfig:
    return run(train="lora", **changes)


def window(value: Any, **changes: Any) -> SamplingConfig:
    return replace(STEPS, window=value, **changes)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    # Samplers that a method has no use for
    (lambda: ode(of.Grpo()), "sampling.sampler is 'ode', expected a stochastic one, .*grpo needs the log-prob"),
    (lambda: ode(of.Guard()), "guard needs the log-probability"),
    (lambda: cps(of.Guard()), "sampler is 'cps', expected flow_sde or dance_sde, .* with guard"),
    (lambda: run(of.Guard(), sampling__sampler=DDIM), "sampler is 'ddim', expected flow_sde or dance_sde, .* with guard"),
    (lambda: run(MSE, sampling__sampler=DPM), "sampler.solver is 'dpmpp_2m', expected euler: distill trains on steps"),
    (lambda: run(of.Raft(compare="data")), "sampler is 'flow_sde', expected ode with solver euler: raft learns from data"),
    (lambda: run(of.Raft(compare="data"), sampling__sampler=DPM), "sampler is 'ode', expected ode with solver euler"),
    (lambda: run(of.Rtdmd()), "sampling.sampler is 'flow_sde', expected cps"),
    (lambda: run(of.AcDmd(fake_updates=2)), "sampling.sampler is 'flow_sde', expected cps: ac-dmd takes"),
    (lambda: run(of.Tdm()), "sampling.sampler is 'flow_sde', expected ode: tdm follows"),
    (lambda: run(of.Refl()), "sampling.sampler is 'flow_sde', expected ode, cps or ddim"),
    (lambda: ode(of.AdjointMatching()), "sampling.sampler is 'ode', expected flow_sde or ddim"),
    (lambda: ode(of.Nft(old=NoOld()), sampling__shared_noise=True), "shared_noise is True, expected False: ode"),
    # Groups
    (lambda: run(sampling__group=1), "sampling.group is 1, expected at least 2: grpo compares a sample"),
    (lambda: ode(of.Dpo(), sampling__group=1), "group is 1, expected at least 2: dpo"),
    (lambda: ode(of.Raft(), sampling__group=1), "group is 1, expected at least 2: raft"),
    (lambda: ode(of.Raft(compare="data"), sampling__group=1), "group is 1, expected at least 2"),
    (lambda: ode(of.Kto(labels="reward"), sampling__group=1), "group is 1, expected at least 2: kto compares"),
    (lambda: scouted(STEPS, 8), "sampling.sampler is 'flow_sde', expected ode: the initial noise"),
    (lambda: scouted(replace(ODE, steps=9), 2), "group is 4, expected an"),
    (lambda: scouted(ODE, 8), "groups.steps is 6, expected at most the 4"),
    (lambda: scouted(replace(ODE, steps=9), 8, rollout__store=Path("x")), "rollout.store is .*: a rollout is stored"),
    (lambda: refilled(rollout__ahead=1, correction=TRUNCATE), "rollout.ahead is 1, expected 0"),
    (lambda: refilled(advantage__history=20), "advantage.history is 20, expected its default"),
    (lambda: refilled(advantage__floors=("reward=0.5",)), "advantage.floors is .* expected its default"),
    (lambda: refilled(sampling__group=1), "sampling.group is 1, expected at least 2"),
    (lambda: refilled(sampling__window=RandomWindow(1, draw="call")), "window.draw is 'call', expected"),
    (lambda: refilled(advantage__combine="gdpo"), "sampling.groups is 'refilled', expected all or scouted"),
    (lambda: run(of.Gardo(), sampling__groups=REFILLED), "sampling.groups is 'refilled', expected all or scouted"),
    (lambda: ode(of.Dpo(preferences=GIVEN), sampling__groups=REFILLED), "no effect with dpo here"),
    # Windows
    (lambda: run(sampling__window=RandomWindow(5)), "sampling.window has 5 stochastic steps in steps 0 to 4 of 4"),
    (lambda: cps(of.Grpo(), sampling__window=RandomWindow(1)), "window.high is None, expected at most 3: the last"),
    (lambda: cps(of.Grpo(), form="unscaled", kl__coef=0.1), "the last step of cps has no KL"),
    (lambda: cps(of.Rtdmd(), sampling__window=RandomWindow(2)), "sampling.window is 'random', expected all"),
    (lambda: run(of.AdjointMatching(), sampling__window=RandomWindow(2)), "sampling.window is 'random', expected all steps"),
    (lambda: run(of.AlignProp(), sampling__window=RandomWindow(2)), "sampling.window is 'random', expected all steps"),
    (lambda: window(RandomWindow(4, draw="call")), "sampling.window.draw has no effect with a window that covers"),
    (lambda: window(ScatteredSteps(4, draw="sample")), "sampling.window.draw has no effect with a window that"),
    (lambda: window(MovingWindow(4)), "sampling.window is 'moving', expected all: it covers its whole range"),
    (lambda: window(Branches(1, 2), group=6), "sampling.group is 6, expected a multiple of 8: a tree has 8 samples"),
    (lambda: window(Branches(1, 2), group=8, shared_noise=True), "sampling.shared_noise has no effect"),
    (lambda: window(Branches(1, 2), group=8, sampler=Ode()), "sampling.window is 'branches', expected all"),
    (lambda: window(Branches(5, 2), group=12), "sampling.window has 5 stochastic steps in steps 0 to 4 of 4"),
    (lambda: Branches(1, 1), "sampling.window.samples is 1, expected"),
    (lambda: MovingWindow(2, every=0), "sampling.window.every is 0, expected"),
    (lambda: MovingWindow(2, every=2, decay_from=1), "window.decay_from has no effect with sampling.window.decay 0"),
    (lambda: cps(of.Grpo(), sampling__window=RandomWindow(2, draw="sample")), "window.high is None, expected at most 3"),
    (lambda: RandomWindow(2, share_prefix=True), "window.share_prefix has no effect with sampling.window.low 0"),
    (lambda: window(RandomWindow(2, low=2, share_prefix=True), steps=6, group=1), "share_prefix has no effect with"),
    (lambda: window(RandomWindow(2, low=2, share_prefix=True), steps=6, sampler=Ode()), "share_prefix is True, expected"),
    (lambda: run(sampling=STATES), "window is 'candidates', expected another .*: grpo learns from whole samples"),
    (lambda: run(of.D3po(), sampling=STATES), "d3po learns from whole samples"),
    (lambda: run(of.Spo(), sampling=TREE), "sampling.window is 'splits', expected candidates"),
    (lambda: run(of.BranchGrpo(), sampling=STATES), "sampling.window is 'candidates', expected"),
    (lambda: replace(TREE, group=4), "sampling.group is 4, expected a multiple of 8: a tree has 8 samples"),
    (lambda: replace(TREE, window=Splits((0, 1, 5), high=5)), "sampling.window.splits is .* expected steps below 5"),
    (lambda: replace(TREE, window=Candidates(4, low=6)), "sampling.window.low is 6, expected below 6"),
    (lambda: replace(TREE, sampler=Ode()), "sampling.window is 'splits', expected all"),
    (lambda: replace(TREE, shared_noise=True), "sampling.shared_noise has no effect with sampling.window splits"),
    *((lambda splits=splits: Splits(splits), "splits is .* expected rising") for splits in ((), (2, 1), (0, 0), (-1,))),
    (lambda: run(of.DenseGrpo(), sampling__window=RandomWindow(2, draw="sample")), "window is 'random', expected one"),
    (lambda: run(of.DenseGrpo(), sampling__window=RandomWindow(2, high=3, tail=Tail(fraction=0.5))), "tail has no effect"),
    # Advantages
    (lambda: run(of.DenseGrpo(), advantage=AdvantageConfig(combine="gdpo")), "advantage.combine is 'gdpo', expected sum"),
    (lambda: run(of.DenseGrpo(), advantage=AdvantageConfig(history=16)), "advantage.history is 16, expected 0"),
    (lambda: run(of.DenseGrpo(), advantage=AdvantageConfig(floors=("a=1",))), "advantage.floors is "),
    (lambda: of.BranchGrpo(sampling=TREE, advantage=AdvantageConfig(scale="batch")), "advantage has no effect"),
    (lambda: ode(of.Crd(), advantage__drop_zero=True), "advantage.drop_zero is True, expected False: crd centres"),
    (lambda: run(sampling=STEPS, advantage=AdvantageConfig(extremes=3)), "extremes is 3, expected at most half of the 4"),
    (lambda: AdvantageConfig(history_min=8), "history_min has no effect with advantage.history 0"),
    (lambda: AdvantageConfig(history=8), "history_min is 16, expected at most advantage.history 8"),
    (lambda: AdvantageConfig(history=16, scale="batch"), "or advantage.scale group and combine sum"),
    (lambda: AdvantageConfig(history=16, combine="gdpo"), "or advantage.scale group and combine sum"),
    (lambda: AdvantageConfig(rescale=1.0), "rescale has no effect with advantage.clip None"),
    # Losses, and what they compare with
    (lambda: run(of.Guard(), form="unscaled"), "form is 'unscaled', expected one of 'density', 'no_const'"),
    (lambda: run(form="unscaled", correction=Mask()), "form is 'unscaled', expected density or no_const"),
    (lambda: ode(MSE, match="mean_kl"), "match is 'mean_kl', expected velocity_mse: .* have no noise"),
    (lambda: run(of.Distill()), "teacher is None, expected a folder of weights: distill compares with a teacher"),
    (lambda: ode(of.Nft(), train="full"), "train is 'full', expected lora: nft keeps policies that lag behind"),
    (lambda: run(kl__weight="exact"), "kl.weight has no effect with kl.coef 0; remove it"),
    (lambda: run(kl__guidance=2.0), "kl.guidance has no effect with kl.coef 0, without a reference"),
    (lambda: ode(of.Nft(), kl__ema_rise=0.5), "kl.ema_rise has no effect with kl.ema_coef 0"),
    (lambda: ode(of.AlignProp(last=5)), "last is 5, expected at most the 4 steps of the schedule"),
    (lambda: cps(of.Rtdmd(), first=4), "first is 4, expected less than the 4 steps"),
    (lambda: ode(of.TdmR1(), surrogate__steps=5), "surrogate.steps is 5, expected at most the 4 steps of the schedule"),
    (lambda: ode(of.Srpo(), lowest=0.97), "highest is 0.9643, expected more than lowest"),
    (lambda: cps(of.Dmd2(), huber=0.1, fake_updates=1), "huber has no effect with form dmd"),
    (lambda: HeadGan(weight=-1.0), "gan.weight is -1.0, expected"),
    (lambda: cps(OPPOSED, **{"engine__context_parallel": 2}), "context_parallel is 2, expected 1: a head of dmd2 reads all"),
    # Passes and noise levels
    (lambda: cps(of.AcDmd(), fake_updates=3), "fake_updates is 3, expected a divisor of the 4 samples"),
    (lambda: run(passes__minibatches=3, updates=3), "passes.minibatches is 3, expected a divisor of the 4 samples"),
    (lambda: run(passes__minibatches=2, updates=3), "updates is 3, expected a multiple of epochs x minibatches = 2"),
    (lambda: ode(of.Raft(), noising__each=5), "noising.each is 5, expected at most 4, the steps"),
    (lambda: ode(of.Dgpo(), noising__draw="sample"), "noising.draw is 'sample', expected rollout: dgpo compares"),
    # Data
    (lambda: ode(of.Dpo(preferences=GIVEN), rewards=("brightness",)), "rewards has no effect with dpo"),
    (lambda: ode(of.Dpo(preferences=GIVEN), prompts=("prompts",)), "prompts has no effect with data or preferences"),
    (lambda: ode(of.Raft(), data__images=("photos",)), "data.images has no effect with raft, which learns from rollouts"),
    (lambda: cps(of.Dmd2(fake_updates=1), data__images=("photos",)), "data.images has no effect with dmd2"),
    (lambda: cps(OPPOSED, data__images=("photos",), prompts=("p",)), "prompts has no effect with data or preferences"),
    # Rollouts
    (lambda: run(rollout__autocast=True), "rollout.autocast is True, expected False, or correction truncate"),
    (lambda: run(**MERGED), "rollout.reuse is 'merged', expected exact, or correction truncate"),
    (lambda: cps(of.Rtdmd(), rollout__autocast=True), "rollout.autocast is True, expected False: rollout and update"),
    (lambda: run(rollout__reuse="keys"), "rollout.reuse is 'keys', expected exact, or correction truncate: sums over kept"),
    *(
        (lambda name=name, value=value: run(rollout__reuse="keys", correction=TRUNCATE, **{name: value}), says)
        for name, value, says in (
            ("engine__compile", "reduce-overhead", "rollout.reuse is 'keys', expected exact or none: with engine.compile"),
            ("engine__context_parallel", 2, "engine.context_parallel is 2, expected 1: rollout.reuse keys keeps"),
            ("rollout__source", "http://127.0.0.1:1", "rollout.reuse is 'keys', expected exact: servers keep no keys"),
        )
    ),
    (
        lambda: run(**{**MERGED, "train": "full"}, correction=TRUNCATE),
        "rollout.reuse has no effect of kind merged with train full",
    ),
    *(
        (lambda name=name, value=value: run(**MERGED, correction=TRUNCATE, **{name: value}), says)
        for name, value, says in (
            ("engine__base", "int8", "engine.base is 'int8', expected auto: rollout.reuse merged changes whole weights"),
            ("engine__comm", "reshard", "engine.comm is 'reshard', expected keep: rollout.reuse merged"),
            ("engine__offload", 1, "engine.offload is 1, expected none or phases: rollout.reuse merged"),
            ("rollout__source", "http://127.0.0.1:1", "rollout.reuse is 'merged', expected exact: servers"),
        )
    ),
    *(
        (lambda name=name, value=value: run(engine__compile="reduce-overhead", correction=TRUNCATE, **{name: value}), says)
        for name, value, says in (
            ("engine__comm", "reshard", "engine.comm is 'reshard', expected keep: with engine.compile reduce-overhead"),
            ("engine__offload", "blocks", "engine.offload is 'blocks', expected none or phases: with engine.compile"),
            ("engine__checkpointing", "selective", "expected none, block or host: with engine.compile"),
            ("rollout__ahead", 1, "rollout.ahead is 1, expected 0: with engine.compile reduce-overhead"),
            ("rollout__autocast", True, "rollout.autocast is True, expected False: with engine.compile"),
            ("rollout__source", "http://127.0.0.1:1", "expected nothing: with engine.compile reduce-overhead"),
        )
    ),
    (
        lambda: run(**CACHE, sampling__window=CUT, engine__compile="reduce-overhead"),
        "rollout.step_cache is 'first_block', expected none: with engine.compile reduce-overhead",
    ),
    (
        lambda: ode(of.Dpo(preferences=GIVEN), engine__compile="reduce-overhead"),
        "engine.compile is 'reduce-overhead', expected True: there is no rollout",
    ),
    (lambda: ode(of.Raft(), rollout__max_log_ratio=0.1), "max_log_ratio has no effect with raft, which has no ratio"),
    *((lambda most=most: run(rollout__max_invalid=most), "max_invalid") for most in (-0.1, 1.0, math.nan)),
    (lambda: ahead(correction=NoCorrection()), "expected truncate, reject or mask: with rollout.ahead"),
    (lambda: ahead(engine__offload="phases"), "none, blocks or always: with rollout.ahead 1"),
    (lambda: ahead(rollout__source="replayed:x"), "ahead has no effect with rollouts that are"),
    (
        lambda: tiny.config(Path("out"), method=of.Sft(), sampling=ReadingConfig(prompts=2), **{"rollout.ahead": 1}),
        "rollout.ahead has no effect with sft, which learns from data",
    ),
    (lambda: RolloutConfig(ahead=-1), r"rollout\.ahead is -1, expected"),
    (lambda: run(**CACHE, sampling__window=AllSteps()), "rollout.step_cache has no effect without deterministic steps"),
    (lambda: run(of.Nft(old=NoOld()), sampling__sampler=SaSolver(0.4), **CACHE), "rollout.step_cache has no effect"),
    (lambda: FirstBlockCache(0), "rollout.step_cache.threshold is 0"),
    (
        lambda: run(**{**CACHE, "rollout__step_cache": GuidanceCache()}, sampling__window=CUT),
        "guidance in a rollout without guidance",
    ),
    (lambda: run(**CACHE, engine__context_parallel=2, sampling__window=CUT), "ranks that share"),
    # Weights, and servers that have others
    (lambda: run(train="full", engine__base="nf4"), "engine.base has no effect with train full"),
    (lambda: lora(engine__masters="bfloat16"), "engine.masters has no effect with train lora"),
    (lambda: lora(rollout=SERVED, engine__base="int8"), "engine.base is 'int8', expected auto: servers make rollouts with"),
    # Samples per pass
    (lambda: auto(engine__micro_batch="fast"), "engine.micro_batch is 'fast', expected 'auto' or an integer"),
    (lambda: auto(engine__micro_batch=0), r"engine.micro_batch is 0, expected an integer in \[1, "),
    (lambda: auto(sampling__window=RandomWindow(2, draw="call")), "micro_batch is 'auto', .*: sampling.window.draw call"),
    (lambda: auto(of.Dpo(), sampling=ODE, noising__draw="call"), "micro_batch is 'auto', .*: noising.draw call"),
    (lambda: auto(of.AlignProp(last=2)), "micro_batch is 'auto', .*: alignprop computes gradients through decoder"),
    (lambda: auto().samples_per_pass, "engine.micro_batch is auto, expected a number: a Trainer's config has the"),
    (lambda: SERVED.check_sampling(TREE), "sampling.window is 'splits', .*a server draws the noise of every sample"),
    # Single numbers
    (lambda: LinearOld(cap=1.0), "cap is 1"),
    (lambda: LinearOld(delay=-1), "delay is -1"),
    (lambda: of.Nft(beta=0.0), "beta is 0"),
    (lambda: of.Awm(power=2.0), "power"),
    (lambda: of.Raft(best=0.0), "best is 0"),
    (lambda: of.Dpo(beta=0.0), "beta is 0"),
    (lambda: of.Guard(clip=-1.0), "clip is -1"),
    (lambda: Mask(threshold=0.5), "threshold is 0.5"),
]


@pytest.mark.parametrize(("make", "says"), REFUSED, ids=[f"{place}: {says[:40]}" for place, (_, says) in enumerate(REFUSED)])
def test_what_has_no_meaning(make: Callable[[], Any], says: str) -> None:
    """It is refused when it is built, in one line that names the field and says why."""
    with pytest.raises(ValueError, match=says) as refused:
        make()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("form", [Dora(), Lokr()], ids=str)
def test_servers_take_merged_weights_of_any_form(form: Any) -> None:
    lora(lora=LoraConfig(form=form), rollout=SERVED)
