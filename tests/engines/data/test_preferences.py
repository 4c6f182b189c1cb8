"""Preferences from a folder: what `fluvial preferences` writes is read back and trained on; what is damaged is refused."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from PIL import Image
from torch import Tensor

from fluvial.core.random import Key
from fluvial.engines.data.preferences import PREFERENCES, Preference, read_preference_records, write_preferences
from fluvial.engines.data.preferences import read_preferences as read
from fluvial.engines.data.records import texts
from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.table import Dpo
from fluvial.engines.run import job as jobs
from fluvial.engines.run.config import with_values
from fluvial.engines.run.recipes import dpo
from fluvial.engines.sampling.batch import Batch
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.samplers import Ode

ODE = SamplingConfig(prompts=3, group=2, steps=tiny.STEPS, sampler=Ode())


def read_preferences(folder: Path, job: jobs.Job) -> tuple[Preference, ...]:
    """Return the preferences of a folder, as a run reads them."""
    return read(folder, encode=job.encode, shape=job.shape, check=job.model.check_prompt, heldout=texts(job.heldout))


def chosen(count: int = 4) -> list[tuple[str, Tensor, Tensor]]:
    """Return preferences of images of noise."""
    drawn = torch.rand(2 * count, *tiny.SHAPE, generator=torch.Generator().manual_seed(0))
    return [(tiny.PROMPTS[i % 4], drawn[2 * i], drawn[2 * i + 1]) for i in range(count)]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Prompts and order to the letter, images to the 8 bits of their files, as clean samples of the model, once."""
    folder = tmp_path / "new" / "folder"
    write_preferences(folder, chosen())
    found = read_preferences(folder, tiny.job())
    assert [preference.prompt.text for preference in found] == [prompt for prompt, _, _ in chosen()]
    for preference, (_, win, lose) in zip(found, chosen(), strict=True):
        torch.testing.assert_close(preference.win, win * 2 - 1, rtol=0, atol=1.01 / 255)
        torch.testing.assert_close(preference.lose, lose * 2 - 1, rtol=0, atol=1.01 / 255)
    before = (folder / PREFERENCES).read_text()
    assert all(set(json.loads(line)) == {"prompt", "win", "lose"} for line in before.splitlines())
    with pytest.raises(UsageError, match="already holds preferences: choose another folder"):
        write_preferences(folder, chosen(1))
    assert (folder / PREFERENCES).read_text() == before
    image = torch.rand(3, 4, 6, generator=torch.Generator().manual_seed(0))  # in colour, and higher than wide
    write_preferences(tmp_path / "colour", [("1", image, 1 - image)])
    (colour,) = read_preferences(tmp_path / "colour", replace(tiny.job(), shape=(3, 4, 6)))
    torch.testing.assert_close(colour.win, image * 2 - 1, rtol=0, atol=1.01 / 255)
    write_preferences(tmp_path / "mixed", [("1", image, image[:1])])
    (mixed,) = read_preferences(tmp_path / "mixed", replace(tiny.job(), shape=(3, 4, 6)))
    torch.testing.assert_close(mixed.lose, (image[:1] * 2 - 1).expand(3, -1, -1), rtol=0, atol=1.01 / 255)


def line(**changes: Any) -> str:
    """Return a line of the file."""
    return json.dumps({"prompt": "1", "win": "000000-win.png", "lose": "000000-lose.png", **changes})


def rated(**changes: Any) -> str:
    """Return a line as Pick-a-Pic has it: two images and the label of the first."""
    return json.dumps({"caption": "1", "jpg_0": "000000-win.png", "jpg_1": "000000-lose.png", "label_0": 1, **changes})


def ranked(**changes: Any) -> str:
    """Return a line as HPD has it: three images and their ranks."""
    names = ["000000-win.png", "000000-lose.png", "000001-win.png"]
    return json.dumps({"prompt": "1", "image_path": names, "rank": [2, 1, 3], **changes})


def test_two_images_with_a_label(tmp_path: Path) -> None:
    """Pick-a-Pic: the label says which is preferred; ties and pairs without a label are left out."""
    write_preferences(tmp_path, chosen(1))
    rows = [
        json.loads(rated(**{"has_label": True, **row}))
        for row in ({}, {"label_0": 0}, {"label_0": 0.5}, {"has_label": False})
    ]
    (tmp_path / PREFERENCES).write_text("\n".join(map(json.dumps, rows)))
    text = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    (tmp_path / "pairs.csv").write_text("\n".join(text))
    for path in (tmp_path, tmp_path / "pairs.csv"):  # a table of text has no numbers
        first, second = read_preference_records(path, check=tiny.Tiny().check_prompt)
        assert (first.win, first.lose) == (tmp_path / "000000-win.png", tmp_path / "000000-lose.png")
        assert (second.win, second.lose) == (first.lose, first.win)


def test_several_ranked_images(tmp_path: Path) -> None:
    """HPD: the lowest rank is the best, of human_preference the highest; equal ranks are no preference."""
    write_preferences(tmp_path, chosen(2))
    for column, ranks, expected in (
        ("rank", [2, 1, 3], [(1, 0), (0, 2), (1, 2)]),
        ("rank", [1, 1, 2], [(0, 2), (1, 2)]),
        ("human_preference", [0, 1, 0], [(1, 0), (1, 2)]),
    ):
        (tmp_path / PREFERENCES).write_text(ranked(**{"rank": None, column: ranks}).replace('"rank": null, ', ""))
        names = json.loads((tmp_path / PREFERENCES).read_text())["image_path"]
        found = read_preference_records(tmp_path, check=tiny.Tiny().check_prompt)
        places = [(names.index(record.win.name), names.index(record.lose.name)) for record in found]  # type: ignore[union-attr]
        assert places == expected


def test_published_files_of_hpd(tmp_path: Path) -> None:
    """Arrays of JSON: HPDv2's ranks and preferences, and HPDv3's pairs, of which the first image is preferred."""
    write_preferences(tmp_path, chosen(1))
    win, lose = "000000-win.png", "000000-lose.png"
    third = {"path1": win, "path2": lose, "choice_dist": [9, 1], "confidence": 0.99, "model1": "a", "model2": "b"}
    records: list[dict[str, Any]] = [
        {"image_path": [lose, win], "rank": [2, 1], "raw_annotations": [[1, 2]]},
        {"image_path": [win, lose], "human_preference": [1, 0]},
        third,
    ]
    (tmp_path / "train.json").write_text(json.dumps([{"prompt": "1", **record} for record in records]))
    found = read_preference_records(tmp_path / "train.json", check=tiny.Tiny().check_prompt)
    assert [(record.win, record.lose) for record in found] == [(tmp_path / win, tmp_path / lose)] * 3
    assert found[2].where == f"preferences {tmp_path / 'train.json'}, record 3"


def test_images_within_a_table(tmp_path: Path) -> None:
    """Pick-a-Pic's own files: Parquet with the images' bytes."""
    import pyarrow as arrow
    from pyarrow import parquet

    write_preferences(tmp_path, chosen(1))
    both = {f"jpg_{i}": (tmp_path / f"000000-{side}.png").read_bytes() for i, side in enumerate(("win", "lose"))}
    parquet.write_table(arrow.Table.from_pylist([{"caption": "0", **both, "label_0": 1.0}]), tmp_path / "pairs.parquet")
    (found,), (expected,) = (read_preferences(path, tiny.job()) for path in (tmp_path / "pairs.parquet", tmp_path))
    assert torch.equal(found.win, expected.win)
    assert torch.equal(found.lose, expected.lose)


def other(size: int, *sides: str) -> Callable[[Path], str]:
    """Return what writes an image of another size, or a file that is no image, and a line that names it on some sides."""

    def make(folder: Path) -> str:
        (folder / "other.png").write_text("no image")
        if size:
            Image.new("L", (size, size)).save(folder / "other.png")
        return line(**dict.fromkeys(sides, "other.png"))

    return make


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: "", "is empty, expected one preference per line"),
        (lambda folder: "nothing", "line 1 is not JSON"),
        (lambda folder: "[1, 2]", "line 1 holds a list, expected an object of columns"),
        (lambda folder: '{"prompt": "1", "win": "a.png"}', "line 1: expected the columns win and lose, .*, got prompt, win"),
        (lambda folder: line(prompt="x"), "line 1: prompt 'x' is no digit"),
        (lambda folder: line(prompt=3), "line 1: expected a column prompt or caption of text"),
        (lambda folder: line(prompt=" "), "line 1: expected a column prompt or caption of text"),
        (lambda folder: line() + "\n" + line(prompt="4 "), "line 2: '4' is held out for evaluation, never trained on"),
        (
            lambda folder: line() + "\n" + line(lose="gone.png"),
            r"line 2, column lose names gone\.png, which does not exist in",
        ),
        (lambda folder: line(win=3), "line 1, column win is an int, expected the path of an image"),
        (lambda folder: line(lose=None), "line 1: expected the columns win and lose, .*, got prompt, win"),
        (lambda folder: rated(label_0=3), "line 1, column label_0 is 3, expected 0, 0.5 or 1"),
        (lambda folder: ranked(rank=[1]), "line 1: expected as many numbers in column rank as images"),
        (lambda folder: ranked(rank=["a", "b", "c"]), "line 1, column rank holds .*, expected numbers"),
        (lambda folder: ranked(rank=[0, float("nan"), 1]), "line 1, column rank holds .*, expected numbers"),
        (other(0, "win"), "line 1: its images cannot be used"),
        (other(9, "win", "lose"), r"line 1: its images give samples of \[1, 9, 9\], expected \[1, 4, 4\]"),
        (other(9, "win"), "line 1: its images cannot be used"),
    ],
)
def test_what_is_damaged(tmp_path: Path, make: Callable[[Path], str], words: str) -> None:
    """One line that names file and line."""
    write_preferences(tmp_path, chosen(1))
    (tmp_path / PREFERENCES).write_text(make(tmp_path))
    with pytest.raises(UsageError, match=words.replace("{", r"\{")) as error:
        read_preferences(tmp_path, tiny.job())
    assert str(error.value).startswith(f"preferences {tmp_path / PREFERENCES}")
    assert "\n" not in str(error.value)


def test_a_file_of_preferences_trains(one: World, tmp_path: Path) -> None:
    """Without a rollout or a reward: pairs drawn from the file, another draw each time, fitted better and better."""
    write_preferences(tmp_path / "given", chosen(8))
    method, optimizer = Dpo(beta=10.0, preferences=tmp_path / "given"), OptimizerConfig(lr=0.005)
    changes = {"sampling": replace(ODE, prompts=15), "method": method, "optimizer": optimizer, "engine.micro_batch": 32}
    run = tiny.Run(tiny.config(tmp_path, updates=12, train="lora", **changes), one)
    draw, seen = run.trainer.run.read_pairs, list[Tensor]()

    def noted(key: Key) -> Batch:
        batch = draw(key)
        seen.append(batch.trajectory.final[:, 0])
        return batch

    run.trainer.run.read_pairs = noted  # type: ignore[method-assign]
    records = [run.rollout() for _ in range(12)]
    assert all(record["pairs"] == 15 * 4 for record in records)
    assert not any("reward" in record or "diversity" in record for record in records)
    drawn = [tuple(win.sum().item() for win in given) for given in seen]
    assert len(set(drawn)) == 12
    assert len({one for row in drawn for one in row}) == 8
    assert run.infos[0].loss == pytest.approx(math.log(2), abs=1e-6)
    assert sum(info.loss for info in run.infos[-3:]) / 3 < sum(info.loss for info in run.infos[1:4]) / 3
    assert run.infos[-1].mean["margin"] > run.infos[1].mean["margin"]


@pytest.mark.slow
def test_what_the_command_writes_trains(one: World, tmp_path: Path, fluvial: Any) -> None:
    """`fluvial preferences` draws codes, keeps the best and the worst of each, and names the command that trains on them."""
    folder = tmp_path / "pairs"
    args = ["--count", 6, "--group", 3, "--steps", 3, "--micro-batch", 9, "--out", folder]
    told = " ".join(fluvial("preferences", "handwriting", *args).split())
    job = jobs.handwriting()
    found = read_preferences(folder, job)
    assert 1 <= len(found) <= 6
    assert f"{len(found)} preferences of 6 prompts" in told
    assert f"fluvial train dpo --model handwriting --preferences {folder}" in told
    reward = next(iter(job.rewards.values()))
    for preference in found:
        assert preference.win.shape == job.shape
        images = torch.stack([preference.win, preference.lose]) / 2 + 0.5
        better, worse = torch.as_tensor(reward(images, [preference.prompt.text] * 2)).tolist()
        assert better > worse
    changes = {"engine.micro_batch": 8, "sampling": replace(ODE, steps=8), "method": Dpo(beta=100.0, preferences=folder)}
    run = tiny.Run(with_values(dpo(), {"out": tmp_path / "run", "updates": 1, **changes}), one, job)
    run.rollout()
    assert run.infos[0].loss == pytest.approx(math.log(2), abs=1e-5)
    assert run.infos[0].grad_norm > 0
