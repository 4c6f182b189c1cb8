"""Methods of few steps and of reward gradients: their limits are other methods, and their losses the published formulas."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers.tables import normals
from torch import Tensor
from torch.testing import assert_close

from fluvial.core import gaussian
from fluvial.core.distill import ambient_velocity, ambient_weight, renoise
from fluvial.core.random import key
from fluvial.core.transitions import cps
from fluvial.engines.data.records import Prompt
from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.methods.losses import HeadGan, NoGan, RewardTermConfig
from fluvial.engines.methods.srpo import prefix
from fluvial.engines.methods.surrogate import SurrogateConfig
from fluvial.engines.methods.table import AcDmd, Dmd2, Grpo, Refl, Rtdmd, Srpo, Tdm, TdmR1
from fluvial.engines.run.declared import Follower, Trained
from fluvial.engines.run.networks import BuiltNetworks
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.items import RenoisedSamples
from fluvial.engines.sampling.noising import AutoLevels, UniformLevels
from fluvial.engines.sampling.samplers import Ode, Stochastic
from fluvial.engines.sampling.window import AllSteps, FirstRecorded, OneRecorded
from fluvial.models.guidance import Guided
from fluvial.models.lora import HEADS

CPS = SamplingConfig(prompts=3, group=4, steps=4, sampler=Stochastic("cps", 0.9))
WEIGHT = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


def gradient(method: Any, one: World, **changes: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the record of one update, and its gradient."""
    settings = {"method": method, "sampling": method.sampling, "optimizer": OptimizerConfig(weight_decay=0.0), **changes}
    run = tiny.Run(tiny.config(Path("out"), **settings), one)
    return run.rollout(), run.gradient()


def test_rtdmd_without_its_last_step_is_grpo(one: World) -> None:
    """To the bit; with it, the gradients of the surrogate and of the matching loss are added."""
    grpo = Grpo(sampling=CPS, form="unscaled", clip_low=1e-5, clip_high=1e-5, trained=FirstRecorded(0.5))
    (_, want), (_, zero) = gradient(grpo, one), gradient(Rtdmd(sampling=CPS, coef=0.0), one)
    assert all(torch.equal(want[name], zero[name]) for name in want)
    _, both = gradient(Rtdmd(sampling=CPS, coef=1.0), one)
    _, twice = gradient(Rtdmd(sampling=CPS, coef=2.0), one)
    norm = sum(float((both[name] - want[name]).norm()) for name in want)
    assert norm > 1e-6
    for name in want:  # clipping of the gradient's norm is off at this size
        assert_close(twice[name] - want[name], 2 * (both[name] - want[name]), rtol=1e-3, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("term", [{"coef": 1.0}, {"coef": 0.0, "reward_term": RewardTermConfig(1.0)}])
def test_every_step_of_rtdmd_counts_alike(one: World, term: dict[str, Any]) -> None:
    """The last one as each of the first ones: in Harahan/RTDMD (rtdmd_trainer.py) each has a pass, all divided alike."""
    lasts = []
    for first in (1, 2):
        off, on = (gradient(Rtdmd(sampling=CPS, first=first, **each), one)[1] for each in ({"coef": 0.0}, term))
        lasts.append({name: (on[name] - off[name]) * first for name in on})
    assert sum(float(values.norm()) for values in lasts[0].values()) > 1e-6
    for name, values in lasts[0].items():
        assert_close(lasts[1][name], values, rtol=1e-3, atol=1e-5)


def test_ac_dmd_of_the_last_step_is_dmd2(one: World) -> None:
    """Of one step from noise to a clean sample: the end is that sample, and the step back to it what each predicts."""
    numbers: Any = {"sampling": replace(CPS, prompts=12, group=1, steps=1), "fake_updates": 1, "guidance": 3.0}
    (_, want), (_, found) = gradient(Dmd2(**numbers), one), gradient(AcDmd(**numbers), one)
    assert sum(float(values.norm()) for values in want.values()) > 1e-3
    for name, values in want.items():
        assert_close(found[name], values, rtol=1e-3, atol=1e-6)


def test_the_fake_of_ac_dmd_agrees_with_its_own_mean() -> None:
    """Its loss in float64, of a fake v = w x: two steps to one lower level, and the clean samples that it predicts there."""
    method, slope = AcDmd(consistency=0.5), torch.tensor(0.7).double().requires_grad_()
    x_s, noise, first, second = normals(2, 4, 2, 3, 4)
    s, t, lower = (torch.tensor(pair).double() for pair in ([0.5, 0.25], [0.9, 0.6], [0.7, 0.45]))
    x, u = renoise(x_s, noise, s, t), ambient_velocity(x_s, noise, s, t)
    drawn = {"first": first, "second": second}
    rows: Any = RenoisedSamples(*(x, t, None, s, s, s, x_s, s, noise), drawn, context=lower)
    run: Any = SimpleNamespace(forward=lambda items, rows, network: {"fake": slope}[network] * rows.x)
    loss, info = method.ambient_loss(run, None, slope * x, rows)  # type: ignore[arg-type]
    step = cps(t, lower, eta=0.9)
    with torch.no_grad():
        ends = [gaussian.sample(step, x, slope * x, each) for each in (first, second)]
    gaps = [end * (1 - lower.view(-1, 1, 1) * slope) - x * (1 - t.view(-1, 1, 1) * slope) for end in ends]
    want = ambient_weight(s, t) * ((slope * x - u) ** 2).mean((1, 2)) + 0.5 * (gaps[0] * gaps[1]).mean((1, 2))
    assert_close(loss, want)
    got, expected = (torch.autograd.grad(values.sum(), slope, retain_graph=True)[0] for values in (loss, want))
    assert_close(got, expected)
    assert not info.error.requires_grad


@pytest.mark.parametrize("train", ["lora", "full"])
def test_the_fake_of_ac_dmd_takes_two_steps_of_its_own_noise(
    one: World, monkeypatch: pytest.MonkeyPatch, train: str
) -> None:
    """To a level below, never above, that of the sample; every share of the samples draws its own."""
    seen, loss = list[RenoisedSamples](), AcDmd.ambient_loss

    def note(method: AcDmd, run: Any, items: Any, v: Tensor, rows: RenoisedSamples) -> Any:
        seen.append(rows)
        assert torch.equal(run.forward(items, rows, "fake"), v)  # the network that takes them is the fake itself
        return loss(method, run, items, v, rows)

    monkeypatch.setattr(AcDmd, "ambient_loss", note)
    method = AcDmd(sampling=replace(CPS, prompts=12, group=1), fake=OptimizerConfig(lr=0.1), fake_updates=2, span=0.2)
    gradient(method, one, train=train)
    noises = [rows.predictions[name][:1] for rows in seen for name in ("first", "second")]
    assert len({tuple(noise.flatten().tolist()) for noise in noises}) == len(noises) >= 4
    for rows in seen:
        assert rows.context is not None
        assert (rows.context < rows.level).all()
        assert (rows.context >= (rows.level - 0.2 - 1e-6).clamp(min=0)).all()


def test_a_reward_joins_a_matching_loss_after_some_updates(one: World) -> None:
    """The gradient is then the sum of the two; a margin that every sample reaches gives none."""
    sampling, rewards = replace(CPS, prompts=12, group=1, sampler=Stochastic("cps", 1.0)), ("brightness",)
    method = Dmd2(sampling=sampling, fake_updates=2)
    _, plain = gradient(method, one)
    terms = {"on": (1.0, None, 0), "reached": (1.0, -9.0, 0), "later": (1.0, None, 1)}
    methods = {name: replace(method, reward_term=RewardTermConfig(*term)) for name, term in terms.items()}
    found = {name: gradient(each, one, rewards=rewards)[1] for name, each in methods.items()}
    for name, values in plain.items():
        assert_close(found["reached"][name], values)
        assert_close(found["later"][name], values)
    assert any((found["on"][name] - plain[name]).abs().max() > 1e-6 for name in plain)


OPPOSED = Dmd2(sampling=replace(CPS, prompts=12, group=1, sampler=Stochastic("cps", 1.0)), fake_updates=2)


def fakes(run: Any) -> dict[str, Tensor]:
    """Return the weights of the fake, without those of its head."""
    trained = run.trainer.run.networks.trained["fake"]
    return {name: tensor.clone() for name, tensor in trained.state().items() if HEADS not in name}


@pytest.mark.long
@pytest.mark.parametrize("train", ["lora", "full"])
def test_an_adversary_of_no_weight_is_none(one: World, train: str) -> None:
    """To the bit, after two rollouts, of the student and the fake; with a weight both are others."""
    found = []
    for gan in (NoGan(), HeadGan(0.0, 0.0), HeadGan(0.0, 1.0), HeadGan(1.0, 0.0)):
        method = replace(OPPOSED, gan=gan, fake=OptimizerConfig(lr=1e-2))
        run = tiny.Run(tiny.config(Path("out"), method=method, sampling=method.sampling, train=train, updates=2), one)
        records = [run.rollout() for _ in range(2)]
        engines = run.trainer.engine, run.trainer.run.networks.trained["fake"]
        learnt = [any(name.startswith(HEADS) for name in engine.trainable) for engine in engines]
        assert learnt == [False, gan.kind == "head"]
        found.append(({name: t for name, t in run.weights().items() if HEADS not in name}, fakes(run), records[-1]))
    (student, fake, _), *others = found
    same = [
        [all(torch.equal(values, each[name]) for name, values in alone.items()) for alone, each in pairs]
        for pairs in (((student, other[0]), (fake, other[1])) for other in others)
    ]
    assert same == [[True, True], [False, False], [False, False]]
    told = found[2][2]["networks"]["fake"]["objective"]
    assert 0 < told["generated"] < 1
    assert 0 < told["real"] < 1
    assert told["error"] > 0


def zeroed(run: Any, name: str = "out") -> None:
    """Set what a layer of the fake's head has to 0."""
    module = run.trainer.run.networks.trained["fake"].module
    for parameter in module.get_submodule(f"{HEADS}.fake.{name}").parameters():
        parameter.data.zero_()


@pytest.mark.long
def test_a_head_that_knows_nothing_pays_log_2_and_moves_nobody(one: World) -> None:
    """The student's loss is higher by the weight times log 2, and its gradient that of DMD2."""
    once, found = replace(OPPOSED, fake_updates=1), []  # so that the head has learnt nothing when the student learns
    for gan in (NoGan(), HeadGan(3.0, 0.5)):
        run = tiny.Run(tiny.config(Path("out"), method=replace(once, gan=gan), sampling=once.sampling), one)
        if gan.kind == "head":
            zeroed(run)
        found.append((run.rollout(), run.gradient()))
    (plain, want), (opposed, got) = found
    assert opposed["loss"] - plain["loss"] == pytest.approx(3 * math.log(2), rel=1e-5)
    assert all(torch.equal(got[name], values) for name, values in want.items())
    losses = [record["networks"]["fake"]["loss"] for record in (plain, opposed)]
    assert losses[1] - losses[0] == pytest.approx(0.5 * 2 * math.log(2), rel=1e-5)
    told = opposed["networks"]["fake"]["objective"]
    assert told["generated"] == told["real"] == 0.5


@pytest.mark.long
def test_the_students_term_is_the_gradient_through_the_fake(one: World) -> None:
    """Of each row's loss with respect to its clean sample, against a chain of passes with the graph kept."""
    method = replace(OPPOSED, fake_updates=1, gan=HeadGan())
    watched = Watched(method, one, optimizer=OptimizerConfig(lr=0.0))
    watched.rollout()
    run: Any = watched.trainer.run
    items = watched.seen["update"][0]
    for level in (0.0, 0.4):

        def noise(x0: Tensor, level: float = level) -> Any:
            return run.renoise(items, x0, items.rows.level * 0, UniformLevels(level, level + 1e-6), key(5))

        x0 = (items.rows.x - items.rows.level.view(-1, 1, 1, 1) * items.rows.predictions["old"]).requires_grad_()
        rows = method.gan.differentiate_head(run, items, x0.detach(), noise, "fake").rows
        judged = run.predict_head(items, noise(x0).rows, "fake")
        loss = torch.nn.functional.softplus(-judged)
        assert_close(rows.predictions["head_loss"], loss.detach())
        (want,) = torch.autograd.grad(loss.sum(), x0)
        assert float(want.abs().max()) > 1e-4
        assert_close(rows.predictions["head_gradient"], want)
        term = method.gan.get_term(rows, x0)
        assert_close(term.detach(), 5e-3 * loss.detach())  # type: ignore[union-attr]
        assert_close(torch.autograd.grad(term.sum(), x0)[0], 5e-3 * want)  # type: ignore[union-attr]


@pytest.mark.long
def test_the_fake_sees_images_of_the_prompts_with_the_noise_of_the_samples(one: World) -> None:
    """At the same level; a sample's image has its prompt."""
    asked = list[str]()

    def images(drawn: Any, prompts: Any) -> Tensor:
        asked.extend(prompt.text for prompt in prompts)
        return torch.stack([torch.full(tiny.SHAPE, 10.0 * int(prompt.text)) for prompt in prompts])

    watched = Watched(replace(OPPOSED, gan=HeadGan()), one, job=tiny.job(data=images))
    batch = watched.rollout()
    assert len(asked) == batch["samples"]
    of_fake = [items for items in watched.seen["update"] if hasattr(items.rows, "noise")]
    assert len(of_fake) == OPPOSED.fake_updates
    for items in of_fake:
        rows, each = items.rows, items.used.shape[1]
        level = rows.level.view(-1, 1, 1, 1)
        image = (rows.predictions["image"] - level * rows.noise) / (1 - level)
        numbers = [10.0 * int(items.batch.prompt(place // each).text) for place in rows.place.tolist()]
        assert_close(image.mean((1, 2, 3)), torch.tensor(numbers), rtol=1e-3, atol=1e-2)


def test_refl_of_the_last_step_is_the_gradient_of_the_sample(one: World) -> None:
    """The reward recorded is that of the finished samples; below the margin its gradient is whole, above it is 0."""
    sampling = replace(CPS, prompts=12, group=1, sampler=Ode(), window=AllSteps(low=3))
    method = Refl(sampling=sampling, trained=OneRecorded("rollout"))
    record, free = gradient(method, one, rewards=("brightness",))
    assert record["objective"]["reward"] == pytest.approx(record["reward"]["mean"], abs=1e-5)
    below, above = (gradient(replace(method, margin=each), one, rewards=("brightness",))[1] for each in (9.0, -9.0))
    for name, values in free.items():
        assert_close(below[name], values)
        assert not above[name].any()


@pytest.mark.parametrize("form", ["code", "paper"])
def test_srpo_is_its_formula_and_both_branches_agree(form: Any) -> None:
    """With rewards w . x0 and -w . x0 of wanted and unwanted words, a step of either branch moves v towards the wanted."""
    x0, noise, error = normals(0, 3, 2, 3, 4)
    level, level_next = torch.tensor([0.8, 0.6]).double(), torch.tensor([0.6, 0.8]).double()  # towards, and away
    x = torch.lerp(x0, noise, level.view(-1, 1, 1))
    v, k = (noise - x0 + error).requires_grad_(), torch.tensor([0.25, 0.1]).double()
    rows: Any = SimpleNamespace(x=x, x0=x0, target=noise - x0, level=level, context=torch.stack([level_next, k], dim=1))
    score = lambda rows, sample: [(WEIGHT * sample).sum((1, 2)), -(WEIGHT * sample).sum((1, 2))]  # noqa: E731
    loss, info = Srpo(form=form, margin=99.0).loss(v, rows, score)
    seen = (WEIGHT * (x0 + error * ((level_next - level) / (1 - level_next)).view(-1, 1, 1))).sum((1, 2))
    wanted, unwanted = torch.stack([seen[0], -seen[1]]), torch.stack([-seen[0], seen[1]])
    relative = (1 + k) * wanted - unwanted if form == "code" else k * wanted + (1 - k) * unwanted
    assert_close(loss, 99 - relative)
    assert_close(info.reward, relative.detach())
    (slope,) = torch.autograd.grad(loss.sum(), v)
    if form == "code":  # x0 falls with v, so v has to go against w
        assert all(float((slope[n] * WEIGHT).sum()) > 0 for n in range(2))


def test_srpo_takes_steps_of_one_length_towards_and_away() -> None:
    """Between the two levels; the weights are those of where the image is recovered, linear in its place."""
    method = Srpo(highest=0.9, lowest=0.5, towards=(0.0, 1.0), away=(1.0, 0.0), length=0.1)
    for number in range(50):
        (start, away), (end, further), (near, far) = method.steps(key(number)).tolist()
        assert 0.5 <= end < start <= 0.9 + 1e-6
        assert 0.5 <= away < further <= 0.9 + 1e-6
        assert max(start - end, further - away) <= 0.04 + 1e-6
        assert near == pytest.approx((end - 0.5) / 0.4, abs=1e-5)
        assert far == pytest.approx(1 - (away - 0.5) / 0.4, abs=1e-5)
    assert prefix("old")(Prompt("cat")).text == "old cat"
    assert prefix("")(Prompt("cat")).text == "cat"


def test_tdm_r1_is_the_sum_of_three_matching_losses(one: World) -> None:
    """Where the surrogate is the base, nothing leads; its weight is of the steps that it leads alone."""
    method = TdmR1(tdm=0.3)
    x, v, real, kl, cfg, guide, rl = normals(1, 7, 2, 3, 4)
    v.requires_grad_()
    level, led = torch.tensor([0.9, 0.5]).double(), torch.tensor([True, False])
    predictions = {"real": real, "kl": kl, "cfg": cfg, "guide": guide, "rl": rl}
    rows: Any = SimpleNamespace(x=x, level=level, predictions=predictions, context=led)
    (slope,) = torch.autograd.grad(method.loss(v, rows)[0].sum(), v)
    x0 = (x - level.view(-1, 1, 1) * v).detach()
    mean, scale = (lambda t: t.abs().mean((1, 2), keepdim=True)), level.view(-1, 1, 1) / 12
    pull = {name: 2 * d / mean(x0 - y) for name, d, y in (("kl", kl, real), ("cfg", cfg, real), ("rl", rl, guide))}
    want = 0.3 * pull["cfg"] + 0.7 * pull["rl"] + pull["kl"], 0.3 * (pull["cfg"] + pull["kl"])
    assert_close(slope, scale * torch.where(led.view(-1, 1, 1), *want))
    sampling = replace(CPS, sampler=Ode())
    still = TdmR1(sampling=sampling, guidance=1.0, surrogate=SurrogateConfig(OptimizerConfig(lr=0.0), guidance=1.0))
    _, of_base = gradient(still, one, train="lora")
    _, of_less = gradient(replace(still, tdm=1.0), one, train="lora")
    assert all(torch.equal(of_base[name], of_less[name]) for name in of_base)  # guidance 1, and a surrogate that is the base


class Watched(tiny.Run):
    """A run that keeps the items of every prediction, update and accumulated term, in order."""

    def __init__(self, method: Any, one: World, job: Any = None, **changes: Any) -> None:
        super().__init__(tiny.config(Path("out"), method=method, sampling=method.sampling, **changes), one, job)
        self.seen: dict[str, list[Any]] = {"predict": [], "update": [], "accumulate": []}
        run: Any = self.trainer.run

        def note(call: Any, kept: list[Any], items: Any, *args: Any, **options: Any) -> Any:
            done = call(items, *args, **options)
            kept.append(done if hasattr(done, "rows") else items)
            return done

        for verb, kept in self.seen.items():
            setattr(run, verb, partial(note, getattr(run, verb), kept))


def test_rtdmd_matches_the_last_step_alone(one: World) -> None:
    """The surrogate has the first steps; the fake learns clean samples, and both networks are asked at the same noise."""
    run = Watched(Rtdmd(sampling=CPS, first=2, levels=AutoLevels()), one)  # auto is any level between the two
    run.rollout()
    fake, first = (items.rows for items in run.seen["update"])
    (last,) = run.seen["accumulate"]
    assert {*last.rows.level_next.tolist()} == {0.0}
    assert len(last.rows.level) == len(first.level) / 2 == last.count
    assert len({*first.level.tolist()}) == 2
    assert torch.equal(fake.start, last.rows.x_next)
    assert not fake.start_level.any()


@pytest.mark.parametrize("interval", ["separate", "reverse"])
def test_tdm_compares_the_ends_of_steps(one: World, interval: Any) -> None:
    """With new noise each time, up to the step's level or above it; the fake learns clean samples by their likelihood."""
    method = Tdm(sampling=replace(CPS, prompts=12, group=1, sampler=Ode()), interval=interval, fake_updates=2)
    run = Watched(method, one)
    run.rollout()
    *fakes, step = (items.rows for items in run.seen["update"])
    noisy = [*fakes, run.seen["predict"][0].rows]
    assert len({float(rows.noise.flatten()[0]) for rows in noisy}) == 3
    for rows in noisy:
        x0, e = rows.predictions["x0"], rows.predictions["noise"]
        at, below, t = (values.view(-1, *[1] * (x0.ndim - 1)) for values in (step.level, step.level_next, rows.level))
        assert_close((1 - at) * x0 + at * e, step.x)
        assert_close((1 - below) * x0 + below * e, step.x_next)
        assert_close(rows.x, renoise(step.x_next, rows.noise, step.level_next, rows.level))
        assert ((rows.level > step.level_next) & (rows.level < (step.level if interval == "separate" else 1))).all()
        mixed = (rows.x - (1 - t) * x0) / t
        ratio = ((rows.noise**2 - mixed**2).flatten(1).mean(1) / 2).exp() * ((1 - rows.level) / rows.level).square().clamp(
            max=5
        )
        assert_close(method.fake_loss(torch.zeros_like(x0), rows)[0], ratio * ((rows.x - x0) ** 2).flatten(1).mean(1))
    assert interval == "separate" or (noisy[0].level > step.level).any()


def test_a_reward_term_is_its_formula() -> None:
    """With and without a margin, from the update on that it begins with."""
    score = torch.tensor([0.5, 3.0])
    run: Any = SimpleNamespace(clock=4, compute_rewards=lambda items, rows, x0: [score])
    for term, want in (((2.0,), -2 * score), ((2.0, 1.0), torch.tensor([1.0, 0.0])), ((2.0, None, 5), 0.0)):
        assert_close(torch.as_tensor(RewardTermConfig(*term).bind(run, None)(None, score)), torch.as_tensor(want))  # type: ignore


def test_the_surrogate_prefers_the_better_samples_of_its_group(one: World) -> None:
    """Groups share noise; the student is led from the base to it; the average follows it, and not the policy."""
    method = TdmR1(sampling=replace(CPS, sampler=Ode()), surrogate=SurrogateConfig(OptimizerConfig(lr=0.1), steps=2))
    run = Watched(method, one, train="lora", optimizer=OptimizerConfig(lr=1e-9))
    run.rollout()
    _, judged, _, read = (items.rows for items in run.seen["predict"])
    noise = judged.noise.unflatten(0, (3, 4))
    assert torch.equal(noise, noise[:, :1].expand_as(noise))
    assert not torch.equal(noise[0], noise[1])
    _, surrogate, student = (items.rows for items in run.seen["update"])
    levels = run.trainer.schedule.levels
    assert_close(surrogate.context[:, 2], 0.25 + (levels[1:] > surrogate.start_level[:, None]).sum(1) / 4)  # late steps more
    assert torch.equal(student.context, student.level >= levels[1])  # the first two steps are led by the surrogate
    assert 0 < student.context.sum() < len(student.context)
    led = student.predictions["rl"]
    v, level = read.predictions, read.level.view(-1, *[1] * (read.x.ndim - 1))
    assert_close(led, level * (v["base"] - v["guide"]))
    state = run.weights()
    for name in (name for name in state if ".average." in name):
        assert_close(state[name], state[name.replace(".average.", ".surrogate.")], rtol=0, atol=2e-2)
        assert not torch.allclose(state[name], state[name.replace(".average.", ".default.")], atol=2e-2) or "lora_A" in name


def test_the_surrogate_leaves_what_it_prefers_once_it_is_far() -> None:
    """Far from the base, a sample that it fits better than the base (A > 0) or worse (A < 0) adds no gradient."""
    v, target, average, base = normals(2, 4, 4, 3, 4)
    v.requires_grad_()
    far = torch.tensor([1, 1, 0, 1]).double()
    error, error_ref = (((each - target) ** 2).mean((1, 2)).detach() for each in (v, base))
    signal = torch.where(torch.arange(4) < 3, (error_ref - error).sign(), (error - error_ref).sign())
    context = torch.stack([torch.full_like(far, 0.5), far, torch.ones_like(far)], dim=1)
    rows: Any = SimpleNamespace(
        target=target, predictions={"average": average, "base": base}, signal=signal, context=context
    )
    loss, _ = SurrogateConfig(kl=0.0, clip=1.0).prefer(v, rows)
    (slope,) = torch.autograd.grad(loss.sum(), v)
    assert [bool(each.any()) for each in slope] == [False, False, True, True]


def test_the_average_of_the_surrogate_forgets_as_in_the_code_of_tdm_r1() -> None:
    """After n updates its decay is min(0.3, 0.001 + 0.001 (n - 1)), of the updates before (train_tdmr1_pub.py)."""
    average = SurrogateConfig().networks()["average"]
    assert isinstance(average, Follower)
    assert [average.decay(9, n) for n in (1, 2, 300, 999)] == pytest.approx([0.001, 0.002, 0.3, 0.3])


def test_a_follower_of_another_network_has_its_guidance() -> None:
    """The average of the surrogate is asked without guidance, as the surrogate is, though the rollout has some."""
    declared = {
        "average": Follower(lambda rollouts, updates: 0.5, network="surrogate"),
        "surrogate": Trained(OptimizerConfig()),
    }
    plain, guided = torch.zeros(2, 3), Guided(torch.zeros(2, 3), torch.ones(2, 3), torch.full((2,), 4.0))
    networks: Any = SimpleNamespace(declared=declared | {"old": Follower(lambda rollouts, updates: 0.5)})
    for name in ("surrogate", "average"):
        assert torch.equal(BuiltNetworks.condition(networks, name, guided), plain)
    assert BuiltNetworks.condition(networks, "old", guided) is guided
