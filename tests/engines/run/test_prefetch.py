"""Rollouts ahead of the trainer: which weights make them, that timing changes nothing, what a killed run goes on with."""

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import handwriting_jobs, launch
from helpers import tiny_jobs as tiny
from helpers.marks import long
from helpers.refusals import fails
from rich.console import Console
from torch import Tensor, nn
from workers import ahead_ranks

from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.errors import ElsewhereError, LostProcessError, RunError
from fluvial.engines.methods.table import Nft
from fluvial.engines.run.checkpoint import checkpoint
from fluvial.engines.run.config import TrainConfig, with_values
from fluvial.engines.run.prefetch import PushOrder
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import SamplingConfig, ServersConfig, Truncate
from fluvial.engines.sampling.generate import Chunk
from fluvial.engines.sampling.samplers import Ode, Stochastic
from fluvial.models.lora import use_adapter

ROLLOUTS = 5
TIMED = ("seconds", "speed", "memory")
STEPS = SamplingConfig(prompts=2, group=2, steps=tiny.STEPS, sampler=Stochastic(eta=0.5))
ODE = SamplingConfig(prompts=2, group=2, steps=tiny.STEPS, sampler=Ode())


def clipped(out: Path, ahead: int, **changes: Any) -> TrainConfig:
    """Return a run whose ratios are corrected."""
    settings = {"sampling": STEPS, "correction": Truncate(threshold=2.0), "updates": ROLLOUTS}
    saved = {"checkpoint.every": 2, "checkpoint.keep": 9, "rollout.ahead": ahead, "optimizer": OptimizerConfig(lr=0.02)}
    return tiny.config(out, **{**settings, **saved, **changes})


def nft(out: Path, ahead: int, **changes: Any) -> TrainConfig:
    """Return a run with adapters, one of which lags behind and makes the rollouts."""
    settings = {"sampling": ODE, "method": Nft(), "train": "lora", "updates": ROLLOUTS}
    return tiny.config(out, **{**settings, "rollout.ahead": ahead, "optimizer": OptimizerConfig(lr=0.02), **changes})


def untimed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return records without what depends on the machine, and without the age of the weights."""
    return [{name: value for name, value in record.items() if name not in (*TIMED, "staleness")} for record in records]


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Return copies of the weights, whole."""
    return {name: shard.clone() for name, shard in trainer.engine.sharded.shards().items()}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    """Return whether two sets of weights have the same bits."""
    return one.keys() == two.keys() and all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def run(config: TrainConfig, world: World) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return the records and the last weights of a run."""
    with Trainer(config, tiny.job(), world) as trainer:
        return list(trainer), weights(trainer)


def reference(config: TrainConfig, world: World, ahead: int) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return the records and the last weights of a run that puts K updates older weights in for each rollout."""
    with Trainer(with_values(config, {"rollout.ahead": 0}), tiny.job(), world) as trainer:
        versions: list[dict[str, Tensor]] = []
        source: Any = trainer.sampler.source

        @contextmanager
        def behaviour() -> Iterator[nn.Module]:
            now = weights(trainer)
            versions.append(now)
            number = len(versions) - 1
            written, made = trainer.engine.sharded.shards(), versions[max(0, number - ahead)]
            updates = max(0, number - ahead) * config.updates_per_rollout
            for name, tensor in written.items():
                tensor.copy_(made[name])
            adapter = trainer.run.networks.choose_sampler(updates)
            follower = partial(use_adapter, name=adapter) if adapter else nullcontext
            with trainer.engine.inference() as module, follower(module):
                yield module
            for name, tensor in written.items():
                tensor.copy_(now[name])

        source.behaviour = behaviour
        return list(trainer), weights(trainer)


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize(
    ("of", "changes"),
    [(clipped, {}), (clipped, {"updates": 10, "passes.minibatches": 2}), (nft, {})],
    ids=["steps", "two", "lora"],
)
def test_rollout_j_is_made_with_the_weights_of_version_j_minus_k(
    one: World, tmp_path: Path, of: Any, changes: dict[str, Any], ahead: int
) -> None:
    """To the bit as a synchronous run that puts older weights in for each rollout; and the age is recorded."""
    config = of(tmp_path, ahead, **changes)
    found, last = run(config, one)
    expected, reached = reference(config, one, ahead)
    assert untimed(found) == untimed(expected)
    assert same(last, reached)
    each = config.updates_per_rollout
    assert [record["staleness"] for record in found] == [{str(min(j, ahead) * each): 4} for j in range(ROLLOUTS)]
    # Else the test could not fail.
    assert untimed(found) != untimed(run(of(tmp_path, ahead - 1, **changes), one)[0])


def test_samples_are_made_while_an_update_is_computed(one: World, tmp_path: Path) -> None:
    """The next rollout begins before the update on this one ends; without rollouts ahead it does not."""
    for ahead, overlaps in ((0, False), (1, True)):
        events, second = list[str](), threading.Event()
        if not overlaps:
            second.set()
        with Trainer(clipped(tmp_path, ahead), tiny.job(), one) as trainer:
            generate, update = trainer.sampler.source.generate, trainer.engine.update

            def noted(*args: Any, **options: Any) -> Generator[Chunk, None, None]:
                events.append("begun")  # noqa: B023
                if len(events) > 1:  # noqa: B023
                    second.set()  # noqa: B023
                yield from generate(*args, **options)  # noqa: B023

            def waiting(*args: Any, **options: Any) -> Any:
                assert second.wait(60) or not overlaps  # noqa: B023
                events.append("updated")  # noqa: B023
                return update(*args, **options)  # noqa: B023

            trainer.sampler.source.generate, trainer.engine.update = noted, waiting  # type: ignore[method-assign]
            trainer.update()
        assert (events[:2] == ["begun", "begun"]) == overlaps


def test_the_end_of_a_run_is_saved_before_rollouts_made_ahead_are_waited_for(
    one: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers may have been stopped with it: without them the newest update is saved, and a resumed run goes on."""
    config, said = clipped(tmp_path, 1), StringIO()
    saved, save, calls = threading.Event(), checkpoint.save, list[bool]()

    def noted(*args: Any, **options: Any) -> Any:
        path = save(*args, **options)
        saved.set()
        return path

    monkeypatch.setattr(checkpoint, "save", noted)
    with Trainer(config, tiny.job(), one, console=Console(file=said, width=500)) as trainer:
        generate = trainer.sampler.source.generate

        def gone(*args: Any, **options: Any) -> Generator[Chunk, None, None]:
            calls.append(len(calls) == 1 and saved.wait(60))
            if calls[-1]:
                raise RunError("no server has answered")
            yield from generate(*args, **options)

        trainer.sampler.source.generate = gone  # type: ignore[method-assign]
        trainer.update()
        trainer.save(ends=True)
    assert calls == [False, True]
    line = "no server has answered: update 1 is saved; on resume, rollouts made ahead are generated again"
    assert line in said.getvalue()
    (path,) = checkpoint.list_checkpoints(config.checkpoint_folder)
    with Trainer(config, tiny.job(), one, resume_from=path) as trainer:
        assert [record["update"] for record in trainer] == [2, 3, 4, 5]


@pytest.mark.parametrize(("of", "ahead"), [(clipped, 2), long(nft, 1)])
def test_a_resumed_run_neither_loses_nor_repeats_a_rollout(one: World, tmp_path: Path, of: Any, ahead: int) -> None:
    """The rollouts that were asked for are in the checkpoint; what follows is the same to the bit."""
    config = of(tmp_path, ahead)
    with Trainer(config, tiny.job(), one) as trainer:
        for _ in range(2):
            trainer.update()
        trainer.save()
        straight, last = list(trainer), weights(trainer)
    asked = []
    with Trainer(config, tiny.job(), one) as trainer:
        generate = trainer.sampler.source.generate

        def noted(requests: Any, *args: Any, **options: Any) -> Generator[Chunk, None, None]:
            asked.append(requests.key)
            yield from generate(requests, *args, **options)

        trainer.sampler.source.generate = noted  # type: ignore[method-assign]
        trainer.resume(tmp_path / "checkpoints" / "000002")
        resumed = list(trainer)
        assert same(weights(trainer), last)
    for one_record, other in zip(straight, resumed, strict=True):
        timed = dict.fromkeys(TIMED, 0)
        assert {**one_record, **timed} == {**other, **timed}
    assert len(asked) == ROLLOUTS - 2 - ahead  # the others were in the checkpoint


def test_a_run_that_is_made_longer_begins_its_queue_again(one: World, tmp_path: Path) -> None:
    """After the last update nothing is asked for, so that the checkpoint holds no rollout."""
    with Trainer(clipped(tmp_path, 2, updates=2), tiny.job(), one) as trainer:
        list(trainer)
        trainer.save()
    with Trainer(clipped(tmp_path, 2, updates=4), tiny.job(), one) as trainer:
        trainer.resume(tmp_path / "checkpoints" / "000002")
        assert [record["staleness"] for record in trainer] == [{"0": 4}, {"1": 4}]


def test_a_source_that_fails_ends_the_run_in_its_line(one: World, tmp_path: Path) -> None:
    """The rollout that failed is the one that is named, after those before it were learnt from."""
    with Trainer(clipped(tmp_path, 1), tiny.job(), one) as trainer:
        generate, calls = trainer.sampler.source.generate, []

        def failing(*args: Any, **options: Any) -> Generator[Chunk, None, None]:
            calls.append(1)
            if len(calls) == 3:
                raise RunError("the server is gone")
            yield from generate(*args, **options)

        trainer.sampler.source.generate = failing  # type: ignore[method-assign]
        trainer.update()
        trainer.update()
        fails("the server is gone", trainer.update)


def test_samples_of_other_weights_are_refused(one: World, tmp_path: Path) -> None:
    """A source that was not pushed to, or says so."""
    with Trainer(clipped(tmp_path, 1), tiny.job(), one) as trainer:
        source: Any = trainer.sampler.source
        source.push = lambda engine, version: None
        trainer.update()
        trainer.update()
        fails("rollout 2: the source made samples with the weights of update 0, expected those", trainer.update)


def test_two_ranks_train_as_one_and_a_checkpoint_fits_either(one: World, tmp_path: Path) -> None:
    """Samples are the same, so rewards agree to the rounding of gradients; two ranks' queue goes on with on one."""
    found = launch.on_ranks(2, "workers.ahead_ranks:trained", tmp_path / "two")
    assert found[0] == found[1]
    alone = ahead_ranks.trained(one, str(tmp_path / "one"))
    config = replace(ahead_ranks.config(tmp_path / "two", 2), resume=True)
    with Trainer(config, tiny.job(), one) as trainer:
        trainer.resume(tmp_path / "two" / "checkpoints" / "000002")
        resumed = ahead_ranks.told(list(trainer))
    assert len(resumed) == ahead_ranks.UPDATES - 2
    for records in (found[0], alone[:2] + resumed):
        for own, expected in zip(records, alone, strict=True):
            assert own[2] == expected[2]
            assert own[:2] == pytest.approx(expected[:2], rel=2e-4)


def test_ranks_that_share_a_server_wait_for_each_other(tmp_path: Path) -> None:
    """Rank 0 pushes weights when the slow rank has its samples of the earlier ones, and the slow rank asks after that."""
    found = launch.on_ranks(2, "workers.ahead_ranks:shared", tmp_path)
    assert [record[2] for record in found[0]] == [{"0": 12}, *[{"1": 12}] * (ahead_ranks.UPDATES - 1)]


def test_a_rank_that_fails_or_is_silent_ends_the_wait_of_the_others(one: World) -> None:
    """In a line of its own; without waiting for the timeout where the other has said so."""
    store = torch.distributed.HashStore()
    orders = [PushOrder(one, lambda: False) for _ in range(2)]
    for rank, order in enumerate(orders):
        order.world, order.store = replace(one, rank=rank, size=2, timeout=0.2), store
        order.note_rollout(3)
    pushed: list[int] = []
    orders[0].push(4, lambda: pushed.append(0))
    orders[1].push(4, lambda: pushed.append(1))
    assert pushed == [0, 1]
    orders[0].note_rollout(4)
    with pytest.raises(LostProcessError, match="rank 0: another process has not made its rollout within"):
        orders[0].push(5, lambda: pushed.append(0))
    orders[1].report_failure()
    with pytest.raises(ElsewhereError, match="rank 1 failed"):
        orders[0].push(5, lambda: pushed.append(0))
    assert pushed == [0, 1]


def config(out: Path, train: str = "full") -> TrainConfig:
    """Return a run of three rollouts, made one ahead."""
    return handwriting_jobs.config(out, updates=3, train=train, correction=Truncate(threshold=2.0), **{"rollout.ahead": 1})


def numbers(trainer: Trainer) -> list[list[object]]:
    """Return what a run's records say of samples, weights and their age."""
    return [[record[name] for name in ("reward", "loss", "staleness", "correction")] for record in trainer]


@pytest.mark.long
def test_a_server_makes_rollouts_ahead_with_the_bits_of_this_process(one: World, tmp_path: Path) -> None:
    """All weights, and adapters, of the version that belongs to each rollout; then the server is killed."""
    own = config(tmp_path)
    size = str(own.samples_per_pass)
    args = ["serve", "handwriting", "--port", "0", "--micro-batch", size, "--weights-root", str(tmp_path)]
    with launch.start(*args) as server:
        quick = ServersConfig(weights_folder=tmp_path, patience=2)
        there = replace(own.rollout, source=server.address(), servers=quick)
        for train in ("full", "lora"):
            with Trainer(config(tmp_path, train), handwriting_jobs.job(), one) as trainer:
                expected, last = numbers(trainer), trainer.engine.sharded.shards()
            served = with_values(config(tmp_path, train), {"rollout": there})
            with Trainer(served, handwriting_jobs.job(), one) as trainer:
                assert numbers(trainer) == expected
                for name, shard in trainer.engine.sharded.shards().items():
                    assert torch.equal(shard, last[name])
            assert [row[2] for row in expected] == [{"0": 8}, *[{"1": 8}] * 2]
        with Trainer(served, handwriting_jobs.job(), one) as trainer:
            trainer.update()
            server.kill()
            fails(r"127\.0\.0\.1", list, trainer)
