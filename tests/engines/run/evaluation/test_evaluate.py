"""Which samples an evaluation makes, that they depend on nothing else, and the table of their scores."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import launch
from helpers import tiny_jobs as tiny
from helpers.refusals import fails, refuses
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from workers.evaluations import TAGGED, found, three_seeds

from fluvial.engines.data.records import as_prompts, texts
from fluvial.engines.engine.world import World
from fluvial.engines.run import metrics
from fluvial.engines.run.evaluation.evaluate import Scores, _gather_images, draw_plan, evaluate, plan_every_prompt
from fluvial.engines.run.evaluation.folder import EvaluationFolder, draw_contact_sheet, write_image
from fluvial.engines.run.evaluation.table import average_over_tags, format_tables, list_rows, read_scores, write_scores
from fluvial.models.images import to_image
from fluvial.models.protocol import Sounds
from fluvial.models.replay.kinds import read_sound


@given(st.integers(1, 40), st.integers(1, 5), st.one_of(st.none(), st.integers(1, 100)))
def test_every_prompt_has_as_many_samples_within_the_largest_number(prompts: int, seeds: int, most: int | None) -> None:
    """The prompts of a part are spread over the whole, and each sample has a noise and a name of its own."""
    plan = plan_every_prompt(prompts, seeds, most)
    places = plan.prompts[: len(plan.prompts) // seeds]
    assert plan.prompts == places * seeds
    assert len(set(plan.ids)) == len(set(plan.names)) == len(plan.ids)
    assert len(places) == (prompts if most is None else min(prompts, max(most // seeds, 1)))
    assert len(set(places)) == len(places)
    assert max(b - a for a, b in pairwise([*places, prompts])) <= -(-prompts // len(places))
    whole = dict(zip(plan_every_prompt(prompts, seeds + 1).names, plan_every_prompt(prompts, seeds + 1).ids, strict=True))
    assert all(whole[name] == number for name, number in zip(plan.names, plan.ids, strict=True))


def test_drawn_prompts_are_those_of_earlier_versions() -> None:
    """The streams of randomness of an evaluation are part of its results."""
    assert draw_plan(10, 6).prompts == [3, 6, 6, 5, 2, 1]
    assert draw_plan(10, 6).ids == list(range(6))


def test_more_seeds_and_further_prompts_leave_samples_as_they_are(one: World) -> None:
    """To the bit, with the same module and size of micro-batch."""
    few, many = found(one, seeds=2), found(one, [*TAGGED, "3"], seeds=3)
    scores = dict(zip(many.scores.names, many.scores.values, strict=True))
    assert len(few.scores.names) == 6
    assert len(found(one, seeds=2, show=4).images) == 4  # of the six
    for name, value in zip(few.scores.names, few.scores.values, strict=True):
        assert torch.equal(scores[name], value)


def test_scores_images_and_table_are_the_same_on_two_ranks(one: World) -> None:
    """To the bit, with an odd number of samples; every image is kept once, and a sheet shows those of the other rank too."""
    alone = json.loads(json.dumps(three_seeds(one)))
    ranks = launch.on_ranks(2, "workers.evaluations:three_seeds")
    assert alone["prompts"] == texts(TAGGED) * 3
    kept = [name for rank in ranks for name in rank.pop("kept")]
    assert sorted(kept) == sorted(alone.pop("kept"))
    assert ranks == [alone, alone]


def test_the_rows_of_a_table(one: World) -> None:
    """Per evaluator all samples, sources, tags, and for the one that passes or fails the mean over tags."""
    result = found(one)
    table = list_rows(result.scores)
    assert [(row.evaluator, row.part, row.name, row.samples) for row in table] == [
        ("bright", "all", "", 6),
        ("bright", "source", "a", 4),
        ("bright", "source", "b", 2),
        ("bright", "tag", "even", 4),
        ("bright", "tag", "odd", 2),
        ("passes", "all", "", 6),
        ("passes", "source", "a", 4),
        ("passes", "source", "b", 2),
        ("passes", "tag", "even", 4),
        ("passes", "tag", "odd", 2),
        ("passes", "tags", "mean over tags", 6),
        ("passes", "prompts", "any sample of a prompt", 6),
    ]
    by = {(row.evaluator, row.part, row.name): row for row in table}
    assert by["passes", "all", ""].mean == pytest.approx(1 / 3)
    assert by["passes", "tag", "even"].mean == 0.5
    assert by["passes", "tags", "mean over tags"].mean == 0.25
    assert by["passes", "prompts", "any sample of a prompt"].mean == pytest.approx(1 / 3)
    assert average_over_tags(result.scores) == {"passes": 0.25}
    bright = result.scores.values[:, 0]
    assert by["bright", "all", ""].mean == result.score["bright"] == pytest.approx(float(bright.mean()))
    assert by["bright", "all", ""].std == pytest.approx(float(bright.std(correction=0)))
    assert by["bright", "tag", "even"].mean == result.split["tags"]["even"]["bright"]
    assert average_over_tags(found(one, ["0", "1"]).scores) == {}


def test_a_comparison_is_paired_by_noise(one: World) -> None:
    """Against itself every sample ties; against other weights, the difference is that of the means."""
    ours, base = found(one), found(one, module=tiny.Net(1))
    for row in list_rows(ours.scores, ours.scores)[:5]:
        assert (row.win_rate, row.difference, row.low, row.high) == (0.5, 0, 0, 0)
    row, *_ = list_rows(ours.scores, base.scores)
    assert row.difference == pytest.approx(ours.score["bright"] - base.score["bright"], abs=1e-6)
    assert row.base_mean == base.score["bright"]
    assert row.difference is not None
    assert row.low is not None
    assert row.high is not None
    assert row.low <= row.difference <= row.high
    differences = ours.scores.values[:, 0] - base.scores.values[:, 0]
    assert row.win_rate == pytest.approx(float((differences > 0).float().mean()))
    refuses("of other samples or by other evaluators", list_rows, ours.scores, found(one, seeds=1).scores)
    text = [sheet.title for sheet in format_tables("a title", list_rows(ours.scores, base.scores))]
    assert text == ["a title", "against the base on the same noise"]


@pytest.mark.parametrize("wrong", [math.nan, None])
def test_samples_without_a_score_are_left_out(one: World, wrong: float | None) -> None:
    """Whether an evaluator returns NaN or raises; above `rollout.max_invalid` the evaluation ends with the first reason."""

    def picky(images: Tensor, prompts: Any) -> list[float]:
        if wrong is None and "2" in prompts:
            raise ValueError("no answer")
        return [math.nan if prompt == "2" else 0.5 for prompt in prompts]

    job = tiny.job(heldout=["0", "1", "2", "3"], evaluators={"fails": picky, "bright": tiny.brightness})
    values: dict[str, Any] = {"samples": None, "seeds": 2, "micro_batch": 2, "schedule": job.model.schedule(2, tiny.SHAPE)}
    whole = evaluate(replace(job, evaluators={"bright": tiny.brightness}), job.model.build(), world=one, **values)
    line = r"no answer.*; 2 of the 8" if wrong is None else r"evaluator 'fails' is nan for prompt '2', .*; 2 of the 8"
    with pytest.warns(UserWarning, match=f"{line} samples of the evaluation have no valid score and are left out of it"):
        found = evaluate(job, job.model.build(), world=one, max_invalid=0.25, **values)
    assert (found.samples, found.invalid) == (6, 2)
    assert texts(found.prompts) == ["0", "1", "3"] * 2
    kept = [row for row, prompt in enumerate(whole.scores.prompts) if prompt.text != "2"]
    assert torch.equal(found.images, whole.images[kept])
    assert torch.equal(found.scores.values[:, 1], whole.scores.values[kept, 0])
    assert found.score == {"fails": 0.5, "bright": pytest.approx(whole.scores.values[kept, 0].mean().item())}
    assert metrics.summarize_evaluation(found)["invalid"] == {"samples": 2}
    fails(
        f"{line} samples of the evaluation have no valid score, above rollout.max_invalid 0.24",
        evaluate,
        job,
        job.model.build(),
        world=one,
        max_invalid=0.24,
        **values,
    )


def test_an_evaluation_is_compared_with_one_that_lacks_samples(one: World) -> None:
    """On the samples of both."""
    whole = found(one).scores
    some = Scores(whole.evaluators, whole.names[1:], whole.prompts[1:], whole.values[1:] + 1)
    (row, *_), (other, *_) = list_rows(whole, some), list_rows(some, whole)
    assert row.samples == other.samples == len(whole.names) - 1
    assert row.mean == pytest.approx(whole.values[1:, 0].mean().item())
    assert [row.difference, other.difference] == pytest.approx([-1, 1])


def test_videos_travel_between_ranks_as_a_sheet_shows_them() -> None:
    """In the order of the ranks, the first, the middle and the last frame of each, in 8 bits."""
    ours, theirs = torch.rand(3, 2, 3, 9, 4, 4, generator=torch.Generator().manual_seed(0)).split(2)

    class Two:
        size, sequence = 2, 1

        def gather_items(self, own: list[Tensor]) -> list[list[Tensor]]:
            assert [batch.dtype for batch in own] == [torch.uint8, torch.uint8]
            other = (theirs[0][:, :, [0, 4, 8]] * 255).round().byte()
            return [own, [other]]

    gathered = _gather_images(list(ours), Two())  # type: ignore[arg-type]
    assert gathered.shape == (6, 3, 3, 4, 4)
    for video, whole in zip(gathered, [*ours.flatten(0, 1), *theirs[0]], strict=True):
        assert to_image(video, width=1).tobytes() == to_image(whole, width=1).tobytes()


def test_a_resumed_run_may_have_other_evaluators(one: World) -> None:
    """Its last table shows those of which there are two numbers, and its summary those that there are."""
    after = found(one)
    before = {"score": {"bright": 0.25, "gone": 0.75}, "exact": {"bright": 0.0, "gone": 0.0}}
    assert [*metrics.tabulate_before_after(before, after).columns[0].cells] == ["score, by the bright evaluator"]
    summary = metrics.flatten_before_after(before, after)
    assert summary["gone_score_before"] == 0.75
    assert summary["passes_score_after"] == after.score["passes"]


def test_a_line_tells_the_scores_or_that_there_are_none(one: World) -> None:
    """What is exactly right if anything is."""
    result = found(one)
    assert "exactly right on held-out prompts 0.000 by the bright" in metrics.format_evaluation("now", result)
    fuzzy = result._replace(exact=dict.fromkeys(result.exact, 0.0))
    assert metrics.format_evaluation("now", fuzzy).startswith("now: score on held-out prompts 0.")
    line = metrics.format_evaluation("now", result._replace(score={}, exact={}))
    assert line == "now: held-out samples, not scored: set `evaluation.rewards` to score them"


def test_scores_are_read_as_they_were_written(tmp_path: Path) -> None:
    """To the bit, whatever a prompt holds."""
    values = torch.rand(3, 2, generator=torch.Generator().manual_seed(0)) * 1e-3
    scores = Scores(("a", "mine:b"), ["0", "1", "2"], list(as_prompts(['say "hi", twice', "two\nlines", "été"])), values)
    write_scores(tmp_path / "scores.csv", scores)
    again = read_scores(tmp_path / "scores.csv")
    assert torch.equal(again.values, values)
    assert (again.evaluators, again.names, again.prompts) == (scores.evaluators, scores.names, scores.prompts)
    (tmp_path / "cut.csv").write_text("sample,prompt,source,tag,a\n0,x,,,nothing\n")
    refuses(r"cut.csv does not hold the scores of an evaluation", read_scores, tmp_path / "cut.csv")


def test_the_folder_of_an_evaluation(one: World, tmp_path: Path) -> None:
    """Every image once and in its own size, the base's beside it, both in the sheet; a second evaluation is refused."""
    from PIL import Image

    folder = EvaluationFolder(tmp_path / "out", one)
    ours, base = found(one, keep=folder.keep("images")), found(one, module=tiny.Net(1), keep=folder.keep("base"))
    folder.finish(list_rows(ours.scores, base.scores), ours, base, title="ours", settings={"seeds": 2})
    for part in ("images", "base"):
        assert sorted(path.stem for path in (tmp_path / "out" / part).iterdir()) == sorted(ours.scores.names)
    with Image.open(tmp_path / "out" / "images" / f"{ours.scores.names[0]}.png") as image:
        assert image.size == (tiny.SHAPE[2], tiny.SHAPE[1])
    lines = (tmp_path / "out" / "scores.csv").read_text().splitlines()
    assert lines[0] == "sample,prompt,source,tag,bright,passes,base bright,base passes"
    assert len(lines) == 7
    record = json.loads((tmp_path / "out" / "table.json").read_text())
    assert record["model"] == "ours"
    assert record["rows"][0]["win_rate"] == list_rows(ours.scores, base.scores)[0].win_rate
    refuses(r"out is .*out, which already holds an evaluation", EvaluationFolder, tmp_path / "out", one)
    waves = torch.tensor([[[0.0, 0.5]], [[1.0, -1.0]]])  # of the first two samples
    heard = ours._replace(sounds=Sounds(waves, 400))
    EvaluationFolder(tmp_path / "heard", one).finish(list_rows(ours.scores), heard, None, title="ours", settings={})
    assert sorted(file.stem for file in (tmp_path / "heard").rglob("*.wav")) == sorted(ours.scores.names[:2])
    for name, wave in zip(ours.scores.names, waves, strict=False):
        sound = read_sound(tmp_path / "heard" / "images" / f"{name}.wav")
        assert sound.rate == 400
        torch.testing.assert_close(sound.wave, wave, rtol=0, atol=1e-4)
    (tmp_path / "file").write_text("")
    refuses("which cannot be made: Not a directory", EvaluationFolder, tmp_path / "file" / "out", one)


def test_the_sheet_shows_the_base_above_the_model(one: World) -> None:
    """Row by row: the same prompts from the same noise lie below each other."""
    ours = found(one)
    black = ours._replace(images=torch.zeros_like(ours.images), images_score=torch.zeros(len(ours.images)))
    white = ours._replace(images=torch.ones_like(ours.images), images_score=torch.ones(len(ours.images)))
    sheet = draw_contact_sheet(white, black, title="ours").convert("L")
    column = [sheet.getpixel((40, y)) for y in range(sheet.height)]
    assert column.index(0) < max(y for y, value in enumerate(column) if value == 255)
    assert 255 not in column[: column.index(0)]


def test_a_video_is_written_frame_by_frame(tmp_path: Path) -> None:
    """As an animated WebP without loss."""
    from PIL import Image

    video = torch.rand(3, 4, 8, 6, generator=torch.Generator().manual_seed(0))
    write_image(tmp_path / "video", video)
    with Image.open(tmp_path / "video.webp") as written:
        assert written.n_frames == 4  # type: ignore[attr-defined]
        written.seek(2)
        assert written.convert("RGB").tobytes() == to_image(video[:, 2], width=1).tobytes()
