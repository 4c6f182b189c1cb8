"""Every version of the weights is proved: of each server one step is compared with the network that it should have."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers.fake_rollouts import FakeRollouts
from helpers.fake_servers import loopback
from helpers.marks import long
from torch import Tensor

from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError
from fluvial.engines.gathered import gather_weights
from fluvial.engines.run import sampler
from fluvial.engines.run.config import TrainConfig, with_values
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import SamplingConfig, ServersConfig, Truncate
from fluvial.engines.sampling.samplers import Stochastic
from fluvial.engines.sampling.source import Holder

ROLLOUT = SamplingConfig(prompts=2, group=4, steps=tiny.STEPS, sampler=Stochastic(eta=0.5))
UPDATES = 4


def config(ahead: int) -> TrainConfig:
    """Return a run with a correction, which would train on the samples of any policy."""
    return tiny.config(
        Path("out"),
        updates=UPDATES,
        sampling=ROLLOUT,
        correction=Truncate(threshold=2.0),
        optimizer=OptimizerConfig(lr=0.02),
        **{"engine.micro_batch": 4, "rollout.ahead": ahead},
    )


class Sync:
    """Gives servers the weights of each version; some take others over."""

    def __init__(self, fakes: Sequence[FakeRollouts], bad: dict[int, set[int]]) -> None:
        self.fakes, self.bad = fakes, bad
        self.pushed: list[int] = []

    def push(
        self, engine: Holder, version: int, peers: Sequence[Any], *, adapter: str = "default", label: str = ""
    ) -> dict[str, str]:
        self.pushed.append(version)
        given = {
            name: tensor.clone() for name, tensor in gather_weights(engine.module, adapter=None, merge=False, dtype=None)
        }
        for place, fake in enumerate(self.fakes):
            wrong = version in self.bad.get(place, ())
            fake.module.load_state_dict({name: tensor + 0.1 * wrong for name, tensor in given.items()})
            fake.version = version
        return {}

    def close(self) -> None:
        """Do nothing."""


class Run:
    """A run with servers in this process."""

    def __init__(self, trainer: Trainer, sync: Sync, fakes: Sequence[FakeRollouts], source: Any) -> None:
        self.trainer, self.sync, self.fakes, self.source = trainer, sync, fakes, source
        self.steps: list[int] = []  # of each comparison

    def finish(self) -> tuple[list[Any], dict[str, Tensor]]:
        """Train, and return what the records say of samples, and the last weights."""
        records = [[record["reward"], record.get("staleness")] for record in self.trainer]
        return records, {name: shard.clone() for name, shard in self.trainer.engine.sharded.shards().items()}


@contextmanager
def opened(
    world: World, monkeypatch: pytest.MonkeyPatch, *, ahead: int, bad: dict[int, set[int]] | None = None
) -> Iterator[Run]:
    fakes = [FakeRollouts(tiny.Tiny().build()) for _ in range(2)]
    with loopback(fakes[0]) as first, loopback(fakes[1]) as second:
        served = {"rollout.source": f"{first},{second}", "rollout.servers": ServersConfig(timeout=5, patience=1)}
        with Trainer(with_values(config(ahead), served), tiny.job(), world) as trainer:
            source: Any = trainer.sampler.source
            source.sync.close()
            source.sync = sync = Sync(fakes, bad or {})
            run, compared = Run(trainer, sync, fakes, source), sampler.differences

            def counted(model: Any, module: Any, served: Any, sampling: Any) -> dict[str, float]:
                run.steps.append(len(served))
                return compared(model, module, served, sampling)

            monkeypatch.setattr(sampler, "differences", counted)
            yield run


def inside(world: World, ahead: int) -> tuple[list[Any], dict[str, Tensor]]:
    with Trainer(config(ahead), tiny.job(), world) as trainer:
        records = [[record["reward"], record.get("staleness")] for record in trainer]
        return records, {name: shard.clone() for name, shard in trainer.engine.sharded.shards().items()}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(tensor, two[name]) for name, tensor in one.items())


@pytest.mark.parametrize("ahead", [0, 1, long(2)])
def test_each_version_is_proved_by_one_step_of_each_server(one: World, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    """Rollouts made ahead are compared with the weights that made them, and nobody is left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with opened(one, monkeypatch, ahead=ahead) as run:
            records, last = run.finish()
            assert len(run.source.pool.servers) == 2
            assert run.steps == [2] * UPDATES
            assert run.sync.pushed == sorted({max(0, number - ahead) for number in range(UPDATES)})
    expected, reached = inside(one, ahead)
    assert records == expected
    assert same(last, reached)


@pytest.mark.parametrize(("ahead", "version"), [long(0, 2), long(1, 0), (1, 1), long(1, 2), long(2, 1)])
def test_a_server_that_gets_a_later_version_wrong_is_left_out(
    one: World, monkeypatch: pytest.MonkeyPatch, ahead: int, version: int
) -> None:
    """With its version named rightly. The other one makes the rollout again, so that the run has the bits of one without."""
    with opened(one, monkeypatch, ahead=ahead, bad={1: {version}}) as run:
        bad = run.source.pool.servers[1].address
        run.trainer.sampler._compared = version == 0  # the first handshake would end the run
        with pytest.warns(RuntimeWarning, match=rf"^{bad} is left out: its log-prob[^\n]* above `rollout.servers.tol"):
            records, last = run.finish()
        assert [server.address for server in run.source.pool.servers] != [bad]
        assert bad not in [server.address for server in run.source.pool.servers]
        known = len(run.fakes[1].requests)
        assert len(run.fakes[0].requests) > known
    expected, reached = inside(one, ahead)
    assert records == expected
    assert same(last, reached)


@pytest.mark.parametrize("ahead", [long(0), 1])
def test_servers_that_all_get_a_version_wrong_end_the_run(one: World, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    with opened(one, monkeypatch, ahead=ahead, bad={0: {1}, 1: {1}}) as run:
        run.trainer.update()
        with pytest.raises(RunError, match=r"log-probabilities are up to [^\n]* from the trainer's own, above .* 0\.001"):
            list(run.trainer)
        assert run.trainer.engine.updates == 1 + ahead
