"""Rollouts that are written to a folder, and runs that are trained from one."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
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
    run = config(tmp_path, **{"rollout.source": f"replayed:{folder}"})
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
        monkeypatch.setattr(trainer, "learn", called)
        monkeypatch.setattr(tiny.Net, "forward", called)
        with pytest.raises(AssertionError):
            trainer.update()
    assert [chunk.version for chunk in seen] == [1, 1]
    (index,) = [path for path in indices(folder) if json.loads(path.read_text())["chunks"][0]["version"] == 1]
    assert torch.equal(seen[0].images, load_file(index.with_suffix(".safetensors"))["0.images"])


def test_a_chunk_is_as_old_as_its_oldest_sample(one: World, folder: Path, tmp_path: Path) -> None:
    """A larger chunk than the stored ones has samples of several, and a folder that was written before has no negatives."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    older = edited(lambda index: [each.update(version=5 - n, negatives=None) for n, each in enumerate(index["chunks"])])
    older(copy)
    run = config(tmp_path, **{"engine.micro_batch": 8, "rollout.source": f"replayed:{copy}"})
    with Trainer(run, tiny.job(), one) as trainer:
        spec = trainer.sampler.specify(*first_rollout(trainer))
        (chunk,) = trainer.sampler.source.generate(spec.requests, spec.sampling, micro_batch=8)
    assert chunk.version == 4


def test_a_rollout_of_other_images_is_refused(one: World, folder: Path, tmp_path: Path) -> None:
    with Trainer(config(tmp_path, **{"rollout.source": f"replayed:{folder}"}), tiny.job(), one) as trainer:
        spec = trainer.sampler.specify(*first_rollout(trainer))
        prompts = [replace(prompt, media={"image": b"an image"}) for prompt in spec.requests.prompts]
        requests = spec.requests._replace(prompts=prompts)
        with pytest.raises(RunError, match=f"{sha256(b'an image').hexdigest()}': use the prompts of the run that stored it"):
            next(trainer.sampler.source.generate(requests, spec.sampling, micro_batch=4))


def first_rollout(trainer: Trainer) -> tuple[Any, list[Any], int]:
    """Return the key, the prompts and the number of updates of a run's first rollout."""
    root = fold_in(key(trainer.config.seed), 0)
    return root, trainer.sampler.choose_prompts(root, 0), 0


def test_chunks_may_have_another_size(one: World, folder: Path, tmp_path: Path) -> None:
    smaller = {"engine.micro_batch": 2, "rollout.source": f"replayed:{folder}", "rollout.max_log_ratio": 1e-2}
    run = config(tmp_path, **smaller)
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


def of_files(change: Callable[[bytes], bytes | None]) -> Callable[[Path], None]:
    """Return a function that changes the bytes of every file of tensors; None removes it."""

    def act(folder: Path) -> None:
        for path in folder.glob("*.safetensors"):
            data = change(path.read_bytes())
            path.unlink() if data is None else path.write_bytes(data)

    return act


def rewritten(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[Path], None]:
    """Return a function that changes a tensor of every file, and the index with it."""

    def rewrite(folder: Path) -> None:
        for path in indices(folder):
            file = path.with_suffix(".safetensors")
            held = load_file(file)
            held.update({key: change(held[key]) for key in held if key.endswith(f".{name}")})  # type: ignore[misc]
            save_file({key: tensor.contiguous() for key, tensor in held.items() if tensor is not None}, file)
            known = {"bytes": file.stat().st_size, "sha256": stored._hash_file(file)}
            path.write_text(json.dumps(json.loads(path.read_text()) | known))

    return rewrite


def no_rollout_of_this_key(folder: Path) -> None:
    for path in indices(folder):
        path.rename(path.with_name(f"{'0' * 16}{path.name[16:]}"))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (of_files(lambda data: data[:-1]), "bytes, expected .* it is damaged"),
        (of_files(lambda data: data[:-1] + bytes([data[-1] ^ 1])), "its SHA-256 is not that of its index"),
        (of_files(lambda data: None), "cannot be read: No such file"),
        (no_rollout_of_this_key, "has no rollout of key"),
        (lambda folder: [path.write_text("[1") for path in indices(folder)], "is not an index of format 1"),
        (lambda folder: [path.write_text("[" * 100000) for path in indices(folder)], "is not an index of format 1"),
        (edited(lambda index: index.update(format=2)), "is not an index of format 1"),
        (edited(lambda index: index.pop("chunks")), "is not an index of format 1"),
        (edited(lambda index: index["chunks"][0].update(ids=["0"] * 4)), "is not an index of format 1"),
        (edited(lambda index: index["chunks"].pop()), "has no sample 4"),
        (edited(lambda index: index["chunks"][0].update(prompts=["9"] * 4)), "has the prompt '9', expected"),
        (edited(lambda index: index["sampling"].update(levels=[1, 0])), r"its levels is \[1, 0\], expected"),
        (edited(lambda index: index["sampling"].update(form="unscaled")), 'its form is "unscaled", expected "density"'),
        (edited(lambda index: index["sampling"].update({"negative prompt": "x"})), 'negative prompt is "x", expected ""'),
        (edited(lambda index: index["chunks"][0].update(negatives=["x"] * 4)), "the negative prompt 'x', expected None"),
        (edited(lambda index: index["chunks"][0].update(negatives=[None])), "is not an index of format 1"),
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
    run = config(tmp_path, **{"rollout.source": f"replayed:{copy}"})
    with Trainer(run, tiny.job(), one) as trainer, pytest.raises(RunError, match=says) as caught:
        trainer.update()
    assert "\n" not in str(caught.value)
    assert trainer.engine.updates == 0


def test_a_run_that_asks_for_other_rollouts_is_one_line(one: World, folder: Path, tmp_path: Path) -> None:
    others: dict[str, dict[str, Any]] = {
        "has no rollout of key .* use the seed": {"seed": 1},
        "its coefficient": {"sampling": replace(STEPS, sampler=Stochastic(eta=0.6))},
        "other stochastic steps": {"sampling": replace(STEPS, window=RandomWindow(2))},
        "has no predictions": {"method": Dppo(), "train": "lora"},
    }
    for says, changes in others.items():
        run = with_values(config(tmp_path, **changes), {"rollout.source": f"replayed:{folder}"})
        with Trainer(run, tiny.job(), one) as trainer, pytest.raises(RunError, match=says):
            trainer.update()


def test_a_rollout_that_ends_early_is_not_stored(one: World, tmp_path: Path) -> None:
    """A reward that raises ends the run; of the rollout there is nothing, not even a partial file."""
    run = config(tmp_path, **{"rollout.store": tmp_path / "stored"})
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
    trained(config(tmp_path, updates=1, rollout=rollout), one)
    before = {path.name: path.read_bytes() for path in (tmp_path / "stored").iterdir()}
    with pytest.raises(UsageError, match="which holds rollouts already"):
        trained(config(tmp_path, updates=1, rollout=rollout), one)
    resumed = config(tmp_path, updates=1, rollout=rollout, resume=True)
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
    trained(config(tmp_path, updates=1, **{"rollout.store": folder}), one)
    moves = [line.split() for line in done if line.startswith("move")]
    assert [suffix for _, _, suffix in moves] == [".safetensors", ".json"]
    for _, partial, suffix in moves:
        assert done.index(f"sync {partial}") < done.index(f"move {partial} {suffix}")
    assert done[-1] == "sync stored"


def test_folders_that_cannot_be_used_are_refused(one: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="which holds no rollouts"):
        Trainer(config(tmp_path, **{"rollout.source": f"replayed:{tmp_path}"}), tiny.job(), one)
    with pytest.raises(UsageError, match="which cannot be written"):
        Trainer(config(tmp_path, **{"rollout.store": tmp_path / "file" / "x"}), tiny.job(), one)
