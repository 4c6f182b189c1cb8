"""Settings of a run that published runs need: evaluation apart from the rollout, seeds of the data, steps one by one."""

import itertools
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import handwriting_jobs
from helpers import tiny_jobs as tiny
from helpers.graphs import Graphs
from helpers.refusals import refuses

from fluvial.core.random import key
from fluvial.core.sigmas import sde_steps
from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.methods.table import Awm, Nft
from fluvial.engines.run import trainer as trainers
from fluvial.engines.run.config import with_values
from fluvial.engines.run.declared import LinearOld, NoOld
from fluvial.engines.run.evaluation.config import EvaluationConfig
from fluvial.engines.run.record import as_record, read_record
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.batch import Batch
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.generate import Guidance
from fluvial.engines.sampling.noising import NoisingConfig
from fluvial.engines.sampling.samplers import Ode, SaSolver, Stochastic
from fluvial.engines.sampling.window import AllSteps, MovingWindow, RandomWindow, ScatteredSteps
from fluvial.models.step_cache import FirstBlockCache, GuidanceCache, NoCache

STEPS = SamplingConfig(prompts=2, group=4, steps=tiny.STEPS, sampler=Stochastic(eta=0.5))


def noted(trainer: Trainer) -> list[Any]:
    """Return a list that each rollout's samples will be added to."""
    learn, seen = trainer.learn, list[Any]()

    def learnt(batch: Batch, root: Any) -> Any:
        seen.append(batch.made.result())
        return learn(batch, root)

    trainer.learn = learnt  # type: ignore[method-assign]
    return seen


def rollouts(one: World, out: Path, **changes: Any) -> list[Any]:
    """Return the samples of each rollout of a run, whose first update is on policy to the bit."""
    with Trainer(tiny.config(out, **changes), tiny.job(prompts=("0", "1", "2", "3", "4")), one) as trainer:
        samples = noted(trainer)
        for record in trainer:
            assert record["update"] > 1 or record.get("first_pass_max_abs_log_ratio", 0.0) == 0.0
    return samples


def test_evaluation_has_settings_of_its_own(one: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps, guidance, solver and weights; by default they are the rollout's, and the moving average."""
    seen: list[dict[str, Any]] = []
    real = trainers.evaluate

    def spy(*args: Any, **options: Any) -> Any:
        seen.append(options)
        return real(*args, **options)

    monkeypatch.setattr(trainers, "evaluate", spy)
    base = tiny.config(tmp_path, sampling=replace(STEPS, guidance=Guidance(scale=1.0)))
    own = EvaluationConfig(micro_batch=3, steps=tiny.STEPS + 3, guidance=2.0, solver="dpmpp_2m")
    for evaluation in (EvaluationConfig(), own):
        with Trainer(with_values(base, {"evaluation": evaluation}), tiny.job(), one) as trainer:
            trainer.evaluate(4)
    assert [len(options["schedule"].timesteps) for options in seen] == [tiny.STEPS, tiny.STEPS + 3]
    assert [options["guidance"].scale for options in seen] == [1.0, 2.0]
    assert [options["solver"] for options in seen] == ["euler", "dpmpp_2m"]
    assert [options["micro_batch"] for options in seen] == [base.engine.micro_batch, 3]


@pytest.mark.parametrize("average", [True, False])
def test_the_weights_themselves_can_be_evaluated(
    one: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, average: bool
) -> None:
    """Without `evaluation.average` the scores are those of the weights, not of their moving average."""
    seen: list[list[torch.Tensor]] = []
    real = trainers.evaluate

    def spy(job: Any, module: Any, **options: Any) -> Any:
        seen.append([parameter.detach().clone() for parameter in module.parameters()])
        return real(job, module, **options)

    monkeypatch.setattr(trainers, "evaluate", spy)
    config = tiny.config(tmp_path, sampling=STEPS, optimizer=OptimizerConfig(lr=0.1, ema_decay=0.99))
    with Trainer(with_values(config, {"evaluation.average": average}), tiny.job(), one) as trainer:
        trainer.update()
        trainer.evaluate(4)
        for own in (True, False):
            with trainer.engine.inference(average=own) as module:
                assert all(map(torch.equal, module.parameters(), seen[0])) == (own == average)


def test_the_prompts_are_drawn_with_their_own_seed(one: World, tmp_path: Path) -> None:
    """Two runs with one data.seed see the same prompts, and other noise."""

    def run(seed: int, data_seed: int | None) -> tuple[list[str], torch.Tensor]:
        changes = {"seed": seed, "data.seed": data_seed, "engine.micro_batch": 8}
        (made,) = rollouts(one, tmp_path, sampling=replace(STEPS, prompts=8, group=2), **changes)
        return list(made.prompts), made.trajectory.final

    base, same, other = run(0, 7), run(1, 7), run(0, None)
    assert base[0] == same[0] == run(7, None)[0] != other[0]
    assert not torch.equal(base[1], same[1])


@pytest.mark.parametrize(
    ("window", "size"),
    [*((RandomWindow(1, draw=draw), 4) for draw in ("call", "sample", "group")), (RandomWindow(1, draw="group"), 2)],
    ids=str,
)
def test_windows_of_a_call_of_a_group_or_of_a_sample(one: World, tmp_path: Path, window: Any, size: int) -> None:
    """Samples that are generated together share a window, or those of a prompt, or none do."""
    made = rollouts(one, tmp_path, sampling=replace(STEPS, window=window), updates=4, **{"engine.micro_batch": size})
    steps = torch.cat([batch.trajectory.steps for batch in made]).unflatten(0, (-1, 4))
    assert len(steps.unique()) > 1
    assert ((steps == steps[:, :1]).all()) == (window.draw != "sample")


def test_stochastic_steps_one_by_one() -> None:
    """They are distinct, in order, within the range, and every set of them is drawn."""
    drawn = {tuple(sde_steps(key(seed), 9, 3, 1, 6)) for seed in range(300)}
    assert drawn == {*itertools.combinations(range(1, 6), 3)}
    refuses("size is 6", sde_steps, key(0), 9, 6, 1, 6)


def test_windows_that_are_apart_and_windows_that_move(one: World, tmp_path: Path) -> None:
    """Steps one by one may be apart; a window moves every second rollout, whatever the number of updates per rollout."""
    apart = replace(STEPS, window=ScatteredSteps(2))
    made = rollouts(one, tmp_path, sampling=apart, updates=8, **{"engine.micro_batch": 8})
    assert any(b - a > 1 for a, b in (batch.trajectory.steps[0].tolist() for batch in made))
    moving = replace(STEPS, window=MovingWindow(2, every=2, stride=1))
    made = rollouts(one, tmp_path, sampling=moving, updates=12, **{"passes.minibatches": 2})
    assert [int(batch.trajectory.steps[0, 0]) for batch in made] == [0, 0, 1, 1, 2, 2]


def test_windows_of_samples_do_not_depend_on_the_micro_batch(one: World, tmp_path: Path) -> None:
    """A sample's noise and its steps are its own."""
    rollout = replace(STEPS, window=RandomWindow(2, draw="sample"))
    ((two,), (eight,)) = (rollouts(one, tmp_path, sampling=rollout, **{"engine.micro_batch": size}) for size in (2, 8))
    assert torch.equal(two.trajectory.steps, eight.trajectory.steps)
    assert torch.allclose(two.trajectory.final, eight.trajectory.final, atol=1e-6)


def test_levels_of_a_call(one: World, tmp_path: Path) -> None:
    """The samples of a micro-batch share their levels and not their noise; other micro-batches have others."""
    rollout = SamplingConfig(prompts=6, group=2, steps=tiny.STEPS, sampler=Ode())
    changes = {"noising": NoisingConfig(each=2, draw="call"), "engine.micro_batch": 4}
    with Trainer(tiny.config(tmp_path, method=Awm(), sampling=rollout, **changes), tiny.job(), one) as trainer:
        noise, seen = trainer.run.noise_samples, list[Any]()

        def noted_rows(*args: Any, **options: Any) -> Any:
            items = noise(*args, **options)
            seen.append(items.rows)
            return items

        trainer.run.noise_samples = noted_rows  # type: ignore[method-assign]
        trainer.update()
    level = seen[0].level.unflatten(0, (2, 3, 4))
    assert torch.equal(level, level[:, :, :1].expand_as(level))
    assert len(level[:, :, 0].T.unique(dim=0)) > 1
    assert len(seen[0].target.flatten(1).unique(dim=0)) == 24


@pytest.mark.parametrize(
    ("settings", "decays"),
    [
        ({}, [0.1, 2 / 11]),
        ({"ema_warmup": False}, [0.9, 0.9]),  # as in DanceGRPO's 8-GPU script
        ({"ema_repeats": 3}, [0.1**3]),
        ({"ema_interval": 2, "ema_warmup": False}, [1.0, 0.9]),
    ],
)
def test_the_decay_of_the_average(one: World, tmp_path: Path, settings: dict[str, Any], decays: list[float]) -> None:
    """It starts at 1 / 10 unless it is the same from the first update on, and is taken at every nth update alone."""
    changes = {"sampling": STEPS, "optimizer": OptimizerConfig(lr=0.1, ema_decay=0.9, **settings), "updates": len(decays)}
    with Trainer(tiny.config(tmp_path, **changes), tiny.job(), one) as trainer:
        for decay in decays:
            before = {name: tensor.clone() for name, tensor in trainer.engine.average.items()}
            trainer.update()
            now = dict(trainer.engine._list_shards())
            for name, average in trainer.engine.average.items():
                torch.testing.assert_close(average, decay * before[name] + (1 - decay) * now[name].detach())


def test_an_old_policy_that_follows_every_second_rollout() -> None:
    """It stays as it is after the others (verl-omni)."""
    old = LinearOld(0.1, 0.5, every=2)
    assert [old.compute_decay(done, done) for done in (1, 2, 3, 4)] == [1.0, 0.2, 1.0, 0.4]


def test_a_rollout_of_sa_solver(one: World, tmp_path: Path) -> None:
    """Its noise is that of its eta, so that samples from the same noise differ; Euler's method has none."""
    rollout = SamplingConfig(prompts=2, group=4, steps=8, sampler=SaSolver(0.4), shared_noise=True)
    (made,) = rollouts(one, tmp_path, method=Awm(), sampling=rollout)
    assert torch.isfinite(made.trajectory.final).all()
    assert len(made.trajectory.final.flatten(1).unique(dim=0)) == 8
    assert "eta" not in {field.name for field in fields(Ode)}


CACHED = SamplingConfig(prompts=2, group=2, steps=6, window=RandomWindow(2, low=2, high=4), guidance=Guidance(2.0))


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.long)])
def test_deterministic_steps_leave_out_what_a_cache_has_and_the_window_does_not(
    one: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiles: bool
) -> None:
    """Counted in rows of the built-in model's last block; the update is exactly on policy."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    counts = []
    for cache in (NoCache(), FirstBlockCache(0.99), GuidanceCache(2), GuidanceCache(3)):
        changes = {"rollout.step_cache": cache, "engine.compile": compiles, "engine.micro_batch": 4}
        run = tiny.config(tmp_path, sampling=CACHED, **changes)
        with Trainer(run, handwriting_jobs.job(), one) as trainer:
            rows: list[int] = []
            last: Any = trainer.job.model.blocks(trainer.engine.module)[-1]

            def count(*args: Any, forward: Any = last.forward, rows: list[int] = rows, **kwargs: Any) -> Any:
                if not torch.is_grad_enabled():
                    rows.append(len(kwargs["hidden_states"]))
                return forward(*args, **kwargs)

            last.forward = count
            record = trainer.update()
        assert record["first_pass_max_abs_log_ratio"] == 0.0
        counts.append(sum(rows))
    # Of both halves of four samples in six steps. Step 0 has none before it, and steps 2 and 3 are the window: so steps 1, 4
    # and 5 are left, of which 5 computes both halves again if every second step does.
    assert counts == [48, 48 - 3 * 8, 48 - 2 * 4, 48 - 3 * 4]


def test_a_recorded_threshold_is_a_cache_of_blocks(tmp_path: Path) -> None:
    """And a method that records no steps may have one without a window."""
    run = tiny.config(tmp_path, sampling=CACHED)
    cached = with_values(run, {"rollout.step_cache": FirstBlockCache()})
    assert read_record({**as_record(run), "rollout": {**as_record(run)["rollout"], "step_cache": 0.1}}) == cached
    with_values(cached, {"method": Nft(old=NoOld()), "sampling": replace(CACHED, sampler=Ode(), window=AllSteps())})


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_rollout_that_reuses_what_the_prompt_decides_has_the_same_bits(
    one: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of a run of the built-in model with and without, and as one graph; the update is exactly on policy."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    found, graphs = [], Graphs(monkeypatch)
    for compiles, reuse in ((False, "exact"), (False, "none"), ("reduce-overhead", "exact")):
        rollout = SamplingConfig(prompts=2, group=2, steps=3)
        run = tiny.config(tmp_path, sampling=rollout, train="lora", **{"rollout.reuse": reuse})
        with Trainer(run, handwriting_jobs.job(), one) as trainer:
            trainer.sampler.config = with_values(run, {"engine.compile": compiles})
            spec = trainer.sampler.specify(key(0), trainer.sampler.choose_prompts(key(0), 0), 0)
            assert spec.sampling.reuse == ("none" if compiles else {"exact": "all"}.get(reuse, reuse))
            record = trainer.update()
        assert graphs.count == bool(compiles)
        assert record["first_pass_max_abs_log_ratio"] == 0.0
        del record["seconds"], record["speed"], record["memory"]
        found.append(record)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("optimizer", "refused"),
    [
        (OptimizerConfig(schedule="cosine"), True),
        (OptimizerConfig(warmup=0.5), True),
        (OptimizerConfig(warmup=0.01), False),  # the warm-up is over in both
    ],
)
def test_more_updates_never_change_a_planned_learning_rate(
    one: World, tmp_path: Path, optimizer: OptimizerConfig, refused: bool
) -> None:
    """A resumption with more updates is refused while the learning rate depends on their number; fewer are not."""
    config = tiny.config(tmp_path, updates=4, optimizer=replace(optimizer, lr=0.01))
    with Trainer(config, tiny.job(), one) as trainer:
        for _ in range(2):
            trainer.update()
        trainer.save()
    for updates in (3, 8):
        with Trainer(replace(config, updates=updates), tiny.job(), one) as trainer:
            if refused and updates == 8:
                refuses(
                    "updates is 8, expected at most 4: the learning rate was planned",
                    trainer.resume,
                    tmp_path / "checkpoints" / "000002",
                )
            else:
                trainer.resume(tmp_path / "checkpoints" / "000002")
