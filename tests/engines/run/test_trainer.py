"""The trainer, driven update by update: the same updates as a whole run, and the weights that it evaluates and exports."""

import json
from pathlib import Path

import pytest
import torch
from helpers import handwriting_jobs, launch
from helpers import tiny_jobs as tiny
from safetensors.torch import load_file

from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.world import init_world
from fluvial.engines.errors import UsageError
from fluvial.engines.run import train
from fluvial.engines.run.evaluation.evaluate import evaluate
from fluvial.engines.run.trainer import Trainer

AVERAGED = OptimizerConfig(lr=0.05, ema_decay=0.9)


def test_update_by_update_is_the_run(tmp_path: Path) -> None:
    """The records and the exported weights of `train`, to the bit; nothing else is written."""
    config = handwriting_jobs.config(tmp_path / "run", optimizer=OptimizerConfig(ema_decay=0.5))
    train(config, handwriting_jobs.job())
    with Trainer(config, handwriting_jobs.job()) as trainer:
        records = [trainer.update(), *trainer]
        assert list(trainer) == []
        trainer.export(tmp_path / "own")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "own"}
    assert launch.weights(tmp_path / "own") == launch.weights(tmp_path / "run")
    known = [record for record in launch.records(tmp_path / "run") if "loss" in record]
    for own, record in zip(json.loads(json.dumps(records)), known, strict=True):
        for timed in ("seconds", "speed", "memory"):
            assert set(own.pop(timed)) == set(record.pop(timed))
        assert own == record


def test_what_is_evaluated_is_the_moving_average(tmp_path: Path) -> None:
    """Scores of the averaged weights, and not of the last ones, which score differently."""
    job = tiny.job(evaluators={"brightness": tiny.brightness})
    with Trainer(tiny.config(tmp_path, updates=3, optimizer=AVERAGED), job) as trainer:
        list(trainer)
        found = trainer.evaluate(8).score["brightness"]
        scores = {}
        for average in (True, False):
            module = tiny.Net(0)
            module.load_state_dict(dict(trainer.engine.weights(average=average)))
            with torch.no_grad():
                result = evaluate(
                    job, module.eval(), schedule=trainer.schedule, samples=8, micro_batch=2, world=trainer.world
                )
            scores[average] = result.score["brightness"]
    assert found == pytest.approx(scores[True], rel=1e-6)
    assert abs(scores[True] - scores[False]) > 1e-4


def test_what_is_exported_is_the_moving_average(tmp_path: Path) -> None:
    """To the bit, and the last weights are others."""
    config = handwriting_jobs.config(tmp_path / "run", updates=1, optimizer=OptimizerConfig(ema_decay=0.5))
    with Trainer(config, handwriting_jobs.job()) as trainer:
        list(trainer)
        trainer.export(tmp_path / "own")
        averaged, last = (dict(trainer.engine.weights(average=average)) for average in (True, False))
        exported = load_file(tmp_path / "own" / "weights" / "diffusion_pytorch_model.safetensors")
        trained = list(trainer.engine.read_average())
    assert trained
    for name in trained:
        assert torch.equal(exported[name], averaged[name])
    assert any(not torch.equal(exported[name], last[name]) for name in trained)


def test_a_trainer_continues_from_its_checkpoint(tmp_path: Path) -> None:
    """With the counters, and to the bit."""
    config = tiny.config(tmp_path / "run", updates=3, optimizer=AVERAGED)
    with Trainer(config, tiny.job()) as trainer:
        trainer.update()
        trainer.save()
        straight = list(trainer)
    with Trainer(config, tiny.job()) as trainer:
        trainer.resume(tmp_path / "run" / "checkpoints" / "000001")
        assert trainer.progress.samples == 4
        resumed = list(trainer)
    timed = dict.fromkeys(("seconds", "speed", "memory"), 0)
    for one, two in zip(straight, resumed, strict=True):
        assert {**one, **timed} == {**two, **timed}


def test_a_request_to_stop_ends_the_iteration(tmp_path: Path) -> None:
    """After the update that was going on."""
    with Trainer(tiny.config(tmp_path, updates=9), tiny.job()) as trainer:
        done = []
        for record in trainer:
            done.append(record["update"])
            if len(done) == 2:
                trainer.stop.name = "asked"
        assert done == [1, 2, 3]
        assert trainer.stopping


def test_the_world_is_the_callers_where_there_is_one(tmp_path: Path) -> None:
    """A trainer closes the world that it opened, and no other; in either it computes as `engine.deterministic` says."""
    strict = tiny.config(tmp_path, **{"engine.deterministic": True})
    with init_world() as world:
        with Trainer(strict, tiny.job(), world) as trainer:
            assert torch.are_deterministic_algorithms_enabled()
            trainer.update()
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.distributed.is_initialized()
        with pytest.raises(UsageError, match=r"a process group is open already: pass the world of init_world\(\)"):
            Trainer(tiny.config(tmp_path), tiny.job())
        assert torch.distributed.is_initialized()
    with Trainer(tiny.config(tmp_path), tiny.job()):
        assert torch.distributed.is_initialized()
    assert not torch.distributed.is_initialized()
