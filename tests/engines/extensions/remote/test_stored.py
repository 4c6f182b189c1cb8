"""Rollouts that are written to a folder, and runs that are trained from one."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

from fluvial.core.random import fold_in, key
from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.extensions.remote import stored
from fluvial.engines.methods.table import Dppo, Nft
from fluvial.engines.run.config import TrainConfig, with_values
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import RolloutConfig, SamplingConfig
from fluvial.engines.sampling.samplers import Ode, Stochastic
from fluvial.engines.sampling.window import RandomWindow

STEPS = SamplingConfig(prompts=2, group=4, steps=tiny.STEPS, sampler=Stochastic(eta=0.5))


def config(out: Path, **changes: Any) -> TrainConfig:
    return tiny.config(out, **{"updates": 2, "engine.micro_batch": 4, "sampling": STEPS, **changes})


def trained(run: TrainConfig, one: World) -> dict[str, Tensor]:
    with Trainer(run, tiny.job(), one) as trainer:
        for _ in trainer:
            pass
        return {name: tensor.clone() for name, tensor in trainer.engine.sharded.shards().items()}


@pytest.fixture(scope="module")
def folder(one: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    trained(config(out, sampling=STEPS, **{"rollout.store": out / "stored"}), one)
    return out / "stored"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sampling": replace(STEPS, window=RandomWindow(2))},
        {"sampling": replace(STEPS, window=RandomWindow(1, draw="call"))},
        {"sampling": replace(STEPS, window=RandomWindow(2, high=3, draw="sample")), "form": "no_const"},
        {"method": Dppo(), "train": "lora"},
        {"method": Nft(), "train": "lora", "sampling": replace(STEPS, sampler=Ode("dpmpp_2m"))},
    ],
    ids=["all steps", "a window", "a window per chunk", "a window per sample", "predictions kept", "clean samples"],
)
def test_replayed_rollouts_give_the_weights_to_the_bit(one: World, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Of the run that stored them, whose own weights storing does not change."""
    run = config(tmp_path, **changes)
    expected = trained(run, one)
    kept = trained(with_values(run, {"rollout.store": tmp_path / "stored"}), one)
    replayed = trained(with_values(run, {"rollout.source": f"replayed:{tmp_path / 'stored'}"}), one)
    assert all(torch.equal(kept[name], tensor) and torch.equal(replayed[name], tensor) for name, tensor in expected.items())


def test_replaying_calls_no_network(one: World, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout is read; scored images and versions are the stored ones."""
    run = config(tmp_path, sampling=STEPS, **{"rollout.source": f"replayed:{folder}"})
    with Trainer(run, tiny.job(), one) as trainer:
        trainer.update()  # the weights are no longer those of the first rollout
        seen, generate = list[stored.Chunk](), trainer.sampler.source.generate

        def noted(*args: Any, **options: Any) -> Any:
            for chunk in generate(*args, **options):
                seen.append(chunk)
                yield chunk

        def called(*args: Any, **options: Any) -> None:
            raise AssertionError("the network was called in a rollout")

        monkeypatch.setattr(trainer.sampler.source, "generate", noted)
        monkeypatch.setattr(trainer.loop, "learn", called)
        monkeypatch.setattr(tiny.Net, "forward", called)
        with pytest.raises(AssertionError):
            trainer.update()
    assert [chunk.version for chunk in seen] == [1, 1]
    files = sorted(
        folder.glob("*.safetensors"),
        key=lambda file: json.loads(file.with_suffix(".json").read_text())["chunks"][0]["version"],
    )
    assert torch.equal(seen[0].images, load_file(files[1])["0.images"])


def test_a_chunk_is_as_old_as_its_oldest_sample(one: World, folder: Path, tmp_path: Path) -> None:
    """A larger chunk than the stored ones has samples of several, and a folder that was written before has no negatives."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    edited(lambda index: [chunk.update(version=5 - number, negatives=None) for number, chunk in enumerate(index["chunks"])])(
        copy
    )
    run = config(tmp_path, sampling=STEPS, **{"engine.micro_batch": 8, "rollout.source": f"replayed:{copy}"})
    with Trainer(run, tiny.job(), one) as trainer:
        plan = trainer.sampler.plan(*first_rollout(trainer))
        (chunk,) = trainer.sampler.source.generate(plan.requests, plan.sampling, micro_batch=8)
    assert chunk.version == 4


def first_rollout(trainer: Trainer) -> tuple[Any, list[Any], int]:
    """Return the key, the prompts and the number of updates of a run's first rollout."""
    root = fold_in(key(trainer.config.seed), 0)
    return root, trainer.sampler.prompts(root, 0), 0


def test_chunks_may_have_another_size(one: World, folder: Path, tmp_path: Path) -> None:
    run = config(
        tmp_path,
        sampling=STEPS,
        **{"engine.micro_batch": 2, "rollout.source": f"replayed:{folder}", "rollout.max_log_ratio": 1e-2},
    )
    found, expected = trained(run, one), trained(config(tmp_path), one)
    assert all(torch.allclose(found[name], tensor, atol=1e-5) for name, tensor in expected.items())


def indices(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        for path in indices(folder):
            index = json.loads(path.read_text())
            change(index)
            path.write_text(json.dumps(index))

    return edit


def cut(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])


def flipped(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


def deleted(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()


def rewritten(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[Path], None]:
    """Return a function that changes a tensor of every file, and the index with it."""

    def rewrite(folder: Path) -> None:
        for path in indices(folder):
            file = path.with_suffix(".safetensors")
            tensors = {
                key: change(tensor) if key.endswith(f".{name}") else tensor for key, tensor in load_file(file).items()
            }
            save_file({key: tensor.contiguous() for key, tensor in tensors.items() if tensor is not None}, file)
            known = {"bytes": file.stat().st_size, "sha256": stored._digest(file)}
            path.write_text(json.dumps(json.loads(path.read_text()) | known))

    return rewrite


def no_rollout_of_this_key(folder: Path) -> None:
    for path in indices(folder):
        path.rename(path.with_name(f"{'0' * 16}{path.name[16:]}"))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut, "bytes, expected .* it is damaged"),
        (flipped, "its SHA-256 is not that of its index"),
        (deleted, "cannot be read: No such file"),
        (no_rollout_of_this_key, "has no rollout of key"),
        (lambda folder: [path.write_text("[1") for path in indices(folder)], "is no index of format 1"),
        (lambda folder: [path.write_text("[" * 100000) for path in indices(folder)], "is no index of format 1"),
        (edited(lambda index: index.update(format=2)), "is no index of format 1"),
        (edited(lambda index: index.pop("chunks")), "is no index of format 1"),
        (edited(lambda index: index["chunks"][0].update(ids=["0"] * 4)), "is no index of format 1"),
        (edited(lambda index: index["chunks"].pop()), "has no sample 4"),
        (edited(lambda index: index["chunks"][0].update(prompts=["9"] * 4)), "is of the prompt '9', expected"),
        (edited(lambda index: index["sampling"].update(levels=[1, 0])), r"its levels is \[1, 0\], expected"),
        (edited(lambda index: index["sampling"].update(form="unscaled")), 'its form is "unscaled", expected "density"'),
        (
            edited(lambda index: index["sampling"].update({"negative prompt": "blurred"})),
            'its negative prompt is "blurred", expected ""',
        ),
        (
            edited(lambda index: index["chunks"][0].update(negatives=["blurred"] * 4)),
            "is of the negative prompt 'blurred', expected None",
        ),
        (edited(lambda index: index["chunks"][0].update(negatives=[None])), "is no index of format 1"),
        (edited(lambda index: index["sampling"]["coefficient std"].append(1)), "its coefficient std is"),
        (rewritten("x", lambda tensor: tensor[:, :1]), r"x of a stored rollout has shape \[4, 1, 1, 4, 4\], expected"),
        (rewritten("final", lambda tensor: tensor[:1]), r"0.final has shape \[1, 1, 4, 4\], and no row 1"),
        (rewritten("log_prob", lambda tensor: None), "has no tensor 0.log_prob"),
        (rewritten("steps", lambda tensor: tensor + 1), "has steps that are not steps of the schedule"),
    ],
)
def test_a_damaged_folder_is_one_line(
    one: World, folder: Path, tmp_path: Path, damage: Callable[[Path], Any], says: str
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    damage(copy)
    with (
        Trainer(config(tmp_path, sampling=STEPS, **{"rollout.source": f"replayed:{copy}"}), tiny.job(), one) as trainer,
        pytest.raises(RunError, match=says) as caught,
    ):
        trainer.update()
    assert "\n" not in str(caught.value)
    assert trainer.engine.updates == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seed": 1}, "has no rollout of key .* use the seed"),
        ({"sampling": replace(STEPS, sampler=Stochastic(eta=0.6))}, "its coefficient"),
        ({"sampling": replace(STEPS, window=RandomWindow(2))}, "other stochastic steps"),
        ({"method": Dppo(), "train": "lora"}, "has no predictions"),
    ],
)
def test_a_run_that_asks_for_other_rollouts_is_one_line(
    one: World, folder: Path, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    run = config(tmp_path, **changes)
    run = with_values(run, {"rollout.source": f"replayed:{folder}"})
    with Trainer(run, tiny.job(), one) as trainer, pytest.raises(RunError, match=says):
        trainer.update()


def test_a_rollout_that_ends_early_is_not_stored(one: World, tmp_path: Path) -> None:
    """A reward that raises ends the run; of the rollout there is nothing, not even a partial file."""
    run = config(tmp_path, sampling=STEPS, **{"rollout.store": tmp_path / "stored"})
    with Trainer(run, tiny.job(), one) as trainer:
        generate = trainer.sampler.source.source.generate  # type: ignore[attr-defined]

        def half(*args: Any, **options: Any) -> Any:
            yield next(generate(*args, **options))
            raise RunError("the second chunk failed")

        trainer.sampler.source.source.generate = half  # type: ignore[attr-defined]
        with pytest.raises(RunError, match="the second chunk"):
            trainer.update()
    assert [*(tmp_path / "stored").iterdir()] == []


def test_a_rollout_that_is_written_again_replaces_the_first(
    one: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run repeats the rollout it was killed in; a process that dies while it writes leaves whole ones alone."""
    rollout = RolloutConfig(store=tmp_path / "stored")
    trained(config(tmp_path, updates=1, sampling=STEPS, rollout=rollout), one)
    before = {path.name: path.read_bytes() for path in (tmp_path / "stored").iterdir()}
    with pytest.raises(UsageError, match="which holds rollouts already"):
        trained(config(tmp_path, updates=1, sampling=STEPS, rollout=rollout), one)
    resumed = config(tmp_path, updates=1, sampling=STEPS, rollout=rollout, resume=True)
    trained(resumed, one)
    assert {path.name: path.read_bytes() for path in (tmp_path / "stored").iterdir()} == before

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stored, "save_tensors", full)
    with pytest.raises(RunError, match="cannot be written: No space left on device"):
        trained(resumed, one)
    assert {path.name: path.read_bytes() for path in (tmp_path / "stored").iterdir()} == before


def test_a_rollout_is_on_the_disk_before_it_has_its_name(
    one: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut could leave a name without the data, which the index says is there; the index comes last."""
    folder, done, sync, move = tmp_path / "stored", list[str](), stored.sync, os.replace

    def synced(path: Path) -> None:
        done.append(f"sync {path.name}")
        sync(path)

    def moved(source: Any, target: Any) -> None:
        if Path(target).parent == folder:
            done.append(f"move {Path(source).name} {Path(target).suffix}")
        move(source, target)

    monkeypatch.setattr(stored, "sync", synced)
    monkeypatch.setattr(os, "replace", moved)
    trained(config(tmp_path, updates=1, sampling=STEPS, **{"rollout.store": folder}), one)
    moves = [line.split() for line in done if line.startswith("move")]
    assert [suffix for _, _, suffix in moves] == [".safetensors", ".json"]
    for _, partial, suffix in moves:
        assert done.index(f"sync {partial}") < done.index(f"move {partial} {suffix}")
    assert done[-1] == "sync stored"


def test_folders_that_cannot_be_used_are_refused(one: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="which holds no rollouts"):
        Trainer(config(tmp_path, sampling=STEPS, **{"rollout.source": f"replayed:{tmp_path}"}), tiny.job(), one)
    with pytest.raises(UsageError, match="which cannot be written"):
        Trainer(config(tmp_path, sampling=STEPS, **{"rollout.store": tmp_path / "file" / "x"}), tiny.job(), one)


@pytest.mark.parametrize("source", ["replayed:", "stored:x", "somewhere"])
def test_a_source_of_another_kind_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=rf"rollout\.source is '{source}', expected addresses of servers .*replayed:FOLDER"):
        RolloutConfig(source=source)


def test_replayed_rollouts_are_not_stored_again(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rollout\.store has no effect with rollouts that are stored"):
        RolloutConfig(source="replayed:x", store=tmp_path)
