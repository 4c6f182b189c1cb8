"""The recording scheduler: diffusers' steps to the bit, the core's where they are stochastic, and nothing for free."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
)
from helpers import tiny_replayed
from helpers.refusals import refuses
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fluvial.core import gaussian
from fluvial.core.random import fold_in, key
from fluvial.core.rollout import rollout
from fluvial.core.sigmas import from_scheduler
from fluvial.core.table import Record
from fluvial.core.transitions import SamplerName, bind
from fluvial.models.replay.scheduler import RecordingScheduler

BATCH, T = 3, 5
EVENT = (2, 3, 4)
STOCHASTIC: tuple[SamplerName, ...] = ("flow_sde", "dance_sde", "cps")
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shifted": {"shift": 3.0},
    "dynamic": {"use_dynamic_shifting": True},
    "terminal": {"shift_terminal": 0.1},
    "karras": {"use_karras_sigmas": True},
}
Scheduler = FlowMatchEulerDiscreteScheduler


def velocity(x: Tensor) -> Tensor:
    return torch.sin(3 * x) - 0.5 * x


def start(dtype: torch.dtype = torch.float32, batch: int = BATCH) -> Tensor:
    return torch.randn(batch, *EVENT, generator=torch.Generator().manual_seed(3)).to(dtype)


def made(sampler: SamplerName = "ode", eta: float = 0.0, **config: Any) -> RecordingScheduler:
    scheduler = RecordingScheduler.from_config(Scheduler(**config).config, sampler=sampler, eta=eta)
    scheduler.set_timesteps(T, **({"mu": 0.7} if config.get("use_dynamic_shifting") else {}))
    return scheduler


def walk(scheduler: Any, x: Tensor, *, first: int = 0, **options: Any) -> Tensor:
    for timestep in scheduler.timesteps[first:]:
        x = scheduler.step(velocity(x), timestep, x, return_dict=False, **options)[0]
    return x


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    folder = tmp_path_factory.mktemp("pipelines")
    return lambda name: tiny_replayed.load(name, Path(folder) / name)


@pytest.mark.parametrize("name", tiny_replayed.ROWS)
def test_images_are_diffusers_to_the_bit(name: str, load: Callable[[str], Any]) -> None:
    pipe = load(name)

    def run() -> Tensor:
        generator = torch.Generator().manual_seed(0)
        options = {**tiny_replayed.ROWS[name].options, "output_type": "pt", "return_dict": False}
        return pipe(prompt=tiny_replayed.PROMPTS, num_inference_steps=3, generator=generator, **options)[0]

    want = run()
    pipe.scheduler = RecordingScheduler.from_config(pipe.scheduler.config)
    assert torch.equal(run(), want)
    with pipe.scheduler.recording(record=Record(form="unscaled")) as recorder:
        assert torch.equal(run(), want)
    trajectory = recorder.trajectory()
    assert trajectory.steps[0].tolist() == [0, 1, 2]
    assert torch.equal(trajectory.x[:, 1:], trajectory.x_next[:, :-1])
    assert not torch.equal(trajectory.x[:, 0], trajectory.x_next[:, 0])
    pipe.scheduler = RecordingScheduler.from_config(pipe.scheduler.config, sampler="cps", eta=0.5)
    assert not torch.equal(run(), want)


@pytest.mark.parametrize("sampler", ["ode", *STOCHASTIC])
def test_rising_sigmas_are_those_of_the_same_flow(sampler: SamplerName) -> None:
    """A network of rising sigmas (Mochi, OmniGen) predicts x0 - noise: the samples, levels and log-probabilities agree."""
    eta = 0.0 if sampler == "ode" else 0.5
    record = Record(form="unscaled")

    def run(scheduler: RecordingScheduler, sign: float) -> Any:
        x = start()
        with scheduler.recording(key=key(0), record=record) as recorder:
            for timestep in scheduler.timesteps:
                x = scheduler.step(sign * velocity(x), timestep, x, return_dict=False)[0]
        return recorder.trajectory()

    falling, rising = run(made(sampler, eta), 1.0), run(made(sampler, eta, invert_sigmas=True), -1.0)
    for got, want in ((rising.final, falling.final), (rising.x, falling.x), (rising.log_prob, falling.log_prob)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", CONFIGS)
def test_the_ode_is_diffusers_to_the_bit(config: str, dtype: torch.dtype) -> None:
    stock = Scheduler(**CONFIGS[config])
    scheduler = made(**CONFIGS[config])
    stock.set_timesteps(T, **({"mu": 0.7} if config == "dynamic" else {}))
    assert torch.equal(stock.sigmas, scheduler.sigmas)
    want = walk(stock, start(dtype))
    got = walk(scheduler, start(dtype))
    assert got.dtype == want.dtype == dtype
    assert torch.equal(got, want)
    other = made("flow_sde", 0.7, **CONFIGS[config])
    with other.recording(window=(), record=()) as recorder:
        assert torch.equal(walk(other, start(dtype)), want)
    assert torch.equal(recorder.trajectory().final, want.to(torch.float32))


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_recording_off_adds_nothing() -> None:
    stock, scheduler = Scheduler(), made()
    stock.set_timesteps(T)
    with scheduler.recording(record=Record(form="unscaled")):
        walk(scheduler, start())
    scheduler.set_timesteps(T)
    counts = []
    for one in (stock, scheduler):
        with _Count() as count:
            walk(one, start())
        counts.append(count.names)
    assert counts[0] == counts[1]
    assert scheduler._recorder is None
    assert scheduler._scheduled is None


@pytest.mark.parametrize("window", [None, (1, 2)])
@pytest.mark.parametrize("sampler", STOCHASTIC)
def test_steps_are_those_of_a_rollout(sampler: SamplerName, window: tuple[int, ...] | None) -> None:
    """To the bit: the trajectory, its log-probs in every form and reduction, and what it was made of."""
    scheduler = made(sampler, 0.6, shift=2.0)
    sigmas = from_scheduler(scheduler)
    for keys in (key(5), fold_in(key(5), torch.tensor([7, 1, 9]))):
        for form, reduction in (("density", "mean"), ("no_const", "sum"), ("unscaled", "mean")):
            steps = (0, 2, 4) if form == "unscaled" else None
            record = Record(steps, form=form, reduction=reduction, velocity=True, debug=True)  # type: ignore[arg-type]
            options: dict[str, Any] = {"key": keys, "window": window, "record": record}
            want = rollout(
                lambda x, sigma, step: velocity(x), start(), sigmas, transition=bind(sampler, 0.6, sigmas), **options
            )
            scheduler.set_timesteps(T)
            with scheduler.recording(**options) as recorder:
                final = walk(scheduler, start())
            got = recorder.trajectory()
            assert torch.equal(final, want.final)
            assert want.velocity is not None
            assert want.debug is not None
            assert got.velocity is not None
            assert got.debug is not None
            for name in ("x", "x_next", "steps", "final", "velocity"):
                assert torch.equal(getattr(got, name), getattr(want, name)), name
            for left, right in zip(got.debug, want.debug, strict=True):
                torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7)
            # Outside the window the next sample is diffusers', a rounding away from the core's mean.
            torch.testing.assert_close(got.log_prob, want.log_prob, rtol=1e-6, atol=1e-12)
            if window is None:
                assert torch.equal(got.log_prob, want.log_prob)
            assert torch.equal(recorder.scheduled.sigmas, sigmas)
            level = torch.tensor(0.5)
            assert recorder.scheduled.transition(level, level / 2) == bind(sampler, 0.6, sigmas)(level, level / 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_log_probs_are_those_of_the_stored_tensors(dtype: torch.dtype) -> None:
    """The sample is rounded to the pipeline's dtype before its log-prob is taken: the first ratio is exactly 1."""
    scheduler = made("flow_sde", 0.7)
    with scheduler.recording(key=key(0), record=Record(velocity=True)) as recorder:
        walk(scheduler, start(dtype))
    trajectory = recorder.trajectory()
    assert trajectory.x.dtype == trajectory.x_next.dtype == dtype
    assert trajectory.velocity is not None
    for place, step in enumerate(trajectory.steps[0].tolist()):
        sigma, sigma_next = (level.expand(BATCH).contiguous() for level in recorder.scheduled.sigmas[step : step + 2])
        parts = (trajectory.x[:, place], trajectory.velocity[:, place], trajectory.x_next[:, place])
        again = gaussian.log_prob(recorder.scheduled.transition(sigma, sigma_next), *parts)
        assert torch.equal(again, trajectory.log_prob[:, place])


def test_what_is_kept_is_kept_apart() -> None:
    """A pipeline that writes to its samples or to the model's output afterwards does not change the record."""
    trajectories = []
    for meddle in (False, True):
        scheduler = made("flow_sde", 0.7)
        with scheduler.recording(key=key(0), window=[0], record=Record([0], velocity=True)) as recorder:
            x = start()
            v = velocity(x)
            after = scheduler.step(v, scheduler.timesteps[0], x)[0]
            if meddle:
                for tensor in (x, v, after):
                    tensor.zero_()
        trajectories.append(recorder.trajectory())
    for name in ("x", "x_next", "velocity"):
        assert torch.equal(getattr(trajectories[0], name), getattr(trajectories[1], name)), name


def test_a_key_per_sample_makes_its_noise_its_own() -> None:
    keys = fold_in(key(1), torch.arange(BATCH))

    def run(rows: list[int]) -> Tensor:
        scheduler = made("cps", 0.8)
        with scheduler.recording(key=type(keys)(keys.low[rows], keys.high[rows])):  # type: ignore[index]
            return walk(scheduler, start()[rows])

    assert torch.equal(run([2, 0]), run([0, 1, 2])[[2, 0]])
    assert not torch.equal(run([0]), run([1]))


def test_noise_comes_from_generators_where_there_is_no_key() -> None:
    """The recording's, one or one per sample; else the pipeline's; else torch's own. Recorded or not."""

    def seeded(*seeds: int) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    def run(recorded: Any = None, passed: Any = None) -> Tensor:
        scheduler = made("flow_sde", 0.7)
        with scheduler.recording(generator=recorded):
            return walk(scheduler, start(), generator=passed)

    many = run(seeded(1, 2, 3))
    assert torch.equal(many, run(None, seeded(1, 2, 3)))
    assert torch.equal(many, run(seeded(1, 2, 3), seeded(4, 5, 6)))
    assert torch.equal(many[1], run(seeded(9, 2, 9))[1])
    one = run(seeded(1)[0])
    assert torch.equal(one, run(None, seeded(1)[0]))
    assert torch.equal(one, walk(made("flow_sde", 0.7), start(), generator=seeded(1)[0]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        assert torch.equal(one, walk(made("flow_sde", 0.7), start()))


def test_schedules_that_begin_late_or_change() -> None:
    scheduler = made("dance_sde", 0.3)
    scheduler.set_begin_index(2)
    with scheduler.recording(key=key(0)) as recorder:
        walk(scheduler, start(), first=2)
    assert recorder.trajectory().steps[0].tolist() == [2, 3, 4]
    scheduler = made("flow_sde", 0.7)
    walk(scheduler, start(), generator=torch.Generator().manual_seed(1))
    scheduler.set_timesteps(2)
    fresh = RecordingScheduler.from_config(scheduler.config, sampler="flow_sde", eta=0.7)
    fresh.set_timesteps(2)
    ends = [walk(one, start(), generator=torch.Generator().manual_seed(1)) for one in (scheduler, fresh)]
    assert torch.equal(*ends)


def test_recordings_of_nothing_and_after_an_error() -> None:
    scheduler = made()
    with scheduler.recording(record=Record((), velocity=True, debug=True)) as recorder:
        walk(scheduler, start())
    trajectory = recorder.trajectory()
    assert trajectory.x.shape == (BATCH, 0, *EVENT)
    assert trajectory.log_prob.shape == (BATCH, 0)
    assert trajectory.debug is not None
    assert trajectory.debug.std.shape == (BATCH, 0)
    scheduler = made("cps", 0.5)
    refuses("window", recorded, scheduler, key=key(0), window=[9])
    scheduler.set_timesteps(T)
    recorded(scheduler, key=key(0))


def recorded(scheduler: RecordingScheduler, **options: Any) -> None:
    with scheduler.recording(**options):
        walk(scheduler, start())


def twice(scheduler: RecordingScheduler) -> None:
    with scheduler.recording(key=key(0)):
        walk(scheduler, start())
        scheduler.set_timesteps(T)
        walk(scheduler, start())


def rising(scheduler: RecordingScheduler) -> None:
    scheduler.set_timesteps(sigmas=[0.5, 0.8])
    recorded(scheduler, key=key(0))


def within(scheduler: RecordingScheduler) -> None:
    with scheduler.recording(), scheduler.recording():
        pass


def unread(scheduler: RecordingScheduler) -> None:
    with scheduler.recording() as recorder:
        pass
    recorder.trajectory()


def config_of(kind: Any, **options: Any) -> Callable[[], Any]:
    return lambda: RecordingScheduler.from_config(json.loads(kind(**options).to_json_string()))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "tokens": (
        lambda: made().step(start(), made().timesteps[0], start(), per_token_timesteps=torch.ones(BATCH, 4)),
        "per_token_timesteps is given, expected None",
    ),
    "stochastic": (config_of(Scheduler, stochastic_sampling=True), "stochastic_sampling is on"),
    "other": (config_of(FlowMatchHeunDiscreteScheduler), "is of FlowMatchHeunDiscreteScheduler, expected FlowMatchEuler"),
    "solver": (
        config_of(DPMSolverMultistepScheduler, use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0),
        r"DPMSolverMultistepScheduler, expected .* FlowMatchEulerDiscreteScheduler\(shift=3.0\) steps",
    ),
    "unnamed": (lambda: RecordingScheduler.from_config(DDIMScheduler().config), "is of a scheduler with beta_start,"),
    "sampler": (lambda: made("euler"), "sampler is 'euler', expected one of 'flow_sde', 'dance_sde'"),  # type: ignore[arg-type]
    "ddim": (lambda: made("ddim", 0.5), "sampler is 'ddim', which is not a flow's"),
    "eta": (lambda: made("flow_sde", -1.0), "eta is -1.0, expected a finite number >= 0"),
    "share": (lambda: made("cps", 1.5), r"eta is 1.5, expected a finite number in \[0, 1\]"),
    "dtype": (lambda: recorded(made(), record=Record(dtype=torch.bfloat16)), "record.dtype is torch.bfloat16"),
    "both": (lambda: recorded(made(), key=key(0), generator=torch.Generator()), "key and generator are both given"),
    "density": (lambda: recorded(made()), "ode takes no stochastic step in .* use a stochastic sampler with eta > 0"),
    "last": (lambda: recorded(made("cps", 0.5), key=key(0), record=[4]), "cps has std 0 at step 4"),
    "window": (lambda: recorded(made("cps", 0.5), key=key(0), window=[5]), r"window holds steps \[5\], expected 0 to 4"),
    "record": (lambda: recorded(made("cps", 0.5), key=key(0), record=[-1]), r"record holds steps \[-1\]"),
    "keys": (lambda: recorded(made("cps", 0.5), key=fold_in(key(0), torch.arange(2))), "2 keys for 3 samples"),
    "generators": (lambda: recorded(made("cps", 0.5), generator=[torch.Generator()]), "1 generators for 3 samples"),
    "rising": (lambda: rising(made("cps", 0.5)), r"sigmas rise at step 0 \(0.5 to 0.8\),"),
    "twice": (lambda: twice(made("cps", 0.5)), "step 0 is taken twice"),
    "within": (lambda: within(made()), "records already"),
    "unread": (lambda: unread(made()), "no step was taken"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_do_it_says_in_one_line(case: str) -> None:
    act, message = REFUSED[case]
    refuses(message, act)
