"""Prompts with images, trained from the command line: the images reach the pipeline, or the run is refused."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import launch, tiny_conditioned, tiny_pipelines
from helpers.marks import long
from PIL import Image

from fluvial.engines.cli import main as cli
from fluvial.engines.run import job as jobs
from fluvial.engines.run.jobs.settings import PipelineConfig
from fluvial.engines.sampling.generate import Guidance
from fluvial.models.replay.kinds import SOUND, VIDEO, Sound, read_video

pytestmark = [  # diffusers' own use
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`LoraLoaderMixin` is deprecated:FutureWarning"),
]

SHORT = (
    "--sampling.prompts 2 --sampling.group 2 --sampling.steps 3 --micro-batch 2 --update-micro-batch rollout "
    "--updates 2 --passes.minibatches 1 "
    "--final-samples 2 --evaluation.every 0 --checkpoint.every 2 --pipeline.height 16 --pipeline.width 16"
)


NO_LOADER = ("longcat", "lumina", "sound-to-sound", "sound-inpaint", "prx", "hunyuan-video", "motif-video")
# Those with an adapter are trained in tests/models/pipelines/test_conditioned_adapters.py.
ADAPTED = ("wan", "wan-experts", "wan-first-frame", "qwen-edit", "qwen-edit-plus")
OTHERS = [name for name in tiny_conditioned.ROWS if name not in ("kontext", *ADAPTED)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images keep their size."""
    tiny_conditioned.without_scaling(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images; pipelines are saved there by the tests that use them."""
    folder = tmp_path_factory.mktemp("media")
    for number in range(3):
        tiny_conditioned.draw_image(folder / f"{number}.png", number)
    return folder


def prompts(file: Path, **columns: object) -> Path:
    """Write a file of three prompts with images of the folder and further columns."""
    records = [
        {"prompt": text, "image": f"{number}.png", **columns} for number, text in enumerate(("a fox", "owls", "cats"))
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def train(pipeline: Path, file: Path, out: Path, *more: str) -> int:
    """Train on a file of prompts, and return the exit code."""
    learnt = launch.rewarded(*more)
    return cli.run(
        ["train", "grpo", "--model", str(pipeline), "--prompts", str(file), *SHORT.split(), *learnt, "--out", str(out)]
    )


def test_an_image_that_nothing_uses_is_refused(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A pipeline that takes text only, with a reward of the samples alone."""
    pipeline = tiny_pipelines.save(tiny_pipelines.ROWS["sd3"], tmp_path / "sd3")
    capfd.readouterr()
    assert train(pipeline, prompts(folder / "a.jsonl"), tmp_path / "run") == 2
    assert "prompt 'owls' has a column image, which nothing uses" in launch.one_line(capfd.readouterr().err)


def columns(name: str, folder: Path) -> Path:
    """Write a file of prompts with the images of a row, each in a column of its argument's name."""
    row = tiny_conditioned.ROWS[name]
    records = [{"prompt": text} for text in ("a fox", "owls", "cats")]
    for number, record in enumerate(records):
        for place, argument in enumerate(row.media):
            record[argument] = tiny_conditioned.draw(folder, f"{name}-{number}-{place}", argument, 10 * number + place, row)
    found = folder / f"{name}.jsonl"
    found.write_text("".join(json.dumps(record) + "\n" for record in records))
    return found


def called(name: str) -> list[str]:
    """Return the flags of a row's call."""
    row = tiny_conditioned.ROWS[name]
    given = [f"{argument}={json.dumps(value)}" for argument, value in row.call.items()]
    sounds = ["--rewards", "helpers.tiny_sounds:even"] if {*SOUND.arguments} & {*row.media} else []
    scale = ["--sampling.guidance.scale", str(row.scale)]
    size = ["--pipeline.height", str(row.size), "--pipeline.width", str(row.size), "--pipeline.frames", str(row.frames)]
    return [*size, *scale, *sounds, "--pipeline.call", *given]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kontext", *map(long, OTHERS)])
@pytest.mark.parametrize("compute", ["float32", long("bfloat16")])
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # diffusers' Kandinsky5AttnProcessor
def test_two_updates_with_images(
    folder: Path, tmp_path: Path, name: str, compute: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """From records with images to an adapter that the pipeline opens: on policy to the bit."""
    pipeline = tiny_conditioned.save(name, folder / name)
    low = ["--engine.compute", compute, "--pipeline.frozen", compute]
    cached = ["--pipeline.text-cache", str(tmp_path / "texts")]
    code = train(pipeline, columns(name, folder), tmp_path / "run", *called(name), *low, *cached)
    assert code == 0, capfd.readouterr().err
    shown = capfd.readouterr().out
    assert all(f"{argument} from the column {argument}" in shown for argument in tiny_conditioned.ROWS[name].media[:1])
    updates = [record for record in launch.records(tmp_path / "run") if "grad_norm" in record]
    assert {record["first_pass_max_abs_log_ratio"] for record in updates} == {0.0}  # files of equal sizes make no update
    assert updates[0]["grad_norm"] > 0
    opened = tiny_conditioned.load(pipeline)
    adapter = tmp_path / "run" / "lora"
    if name not in NO_LOADER:
        opened.load_lora_weights(adapter)
        assert opened.get_active_adapters()


@pytest.mark.long
def test_an_export_is_evaluated_with_the_images(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As the run evaluated it, not from the texts alone."""
    pipeline = tiny_conditioned.save("kontext", folder / "kontext")
    assert train(pipeline, columns("kontext", folder), tmp_path / "run", *called("kontext")) == 0
    assert cli.run(["eval", str(tmp_path / "run"), "--out", str(tmp_path / "table")]) == 0, capfd.readouterr().err
    rows = json.loads((tmp_path / "table" / "table.json").read_text())["rows"]
    expected = json.loads((tmp_path / "run" / "summary.json").read_text())["jpeg_score_after"]
    assert next(row["mean"] for row in rows if row["evaluator"] == "jpeg") == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
def test_samples_are_drawn_of_a_file_of_prompts_with_images(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a replayed pipeline, too, from a column of another name; other images make other samples."""
    pipeline, drawn = tiny_conditioned.save("control", folder / "control"), []
    for number in range(2):
        (file := folder / f"drawn-{number}.jsonl").write_text(json.dumps({"prompt": "a fox", "source": f"{number}.png"}))
        start = ["sample", str(pipeline), "--steps", "3", "--each", "2", "--prompts", str(file)]
        mapped = ["--pipeline.media", "control_image=source"]
        out = tmp_path / f"{number}.png"
        flags = [word.replace("--rollout.", "--") for word in called("control")]
        assert cli.run([*start, *mapped, *flags, "--out", str(out)]) == 0, capfd.readouterr().err
        drawn.append(np.asarray(Image.open(out)))
    assert (drawn[0] != drawn[1]).any()


@pytest.mark.long
def test_a_column_of_another_name(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It is mapped by `argument=column`; without that, the pipeline lacks its image; another argument is refused."""
    pipeline = tiny_conditioned.save("control", folder / "control")
    file = folder / "sources.jsonl"
    file.write_text('{"prompt": "a fox", "source": "0.png"}\n{"prompt": "owls", "source": "1.png"}\n')
    capfd.readouterr()
    assert train(pipeline, file, tmp_path / "run", *called("control"), "--pipeline.media", "control_image=source") == 0
    assert "control_image from the column source" in capfd.readouterr().out
    assert train(pipeline, file, tmp_path / "other", *called("control"), "--pipeline.media", "photograph=source") == 2
    assert "an argument of FluxControlPipeline, which takes control_image" in launch.one_line(capfd.readouterr().err)


def test_a_column_that_the_pipeline_takes_and_that_is_not_passed_is_refused(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A text that the pipeline has another argument for, and an image that some prompts lack."""
    pipeline = tiny_conditioned.save("kontext", folder / "kontext")
    capfd.readouterr()
    assert train(pipeline, prompts(folder / "b.jsonl", prompt_2="x"), tmp_path / "run") == 2
    assert "has a column prompt_2, which FluxKontextPipeline takes" in launch.one_line(capfd.readouterr().err)
    file = folder / "some.jsonl"
    file.write_text('{"prompt": "a fox", "image": "0.png"}\n{"prompt": "owls"}\n')
    assert train(pipeline, file, tmp_path / "run") == 2
    assert "prompt 'owls' has no column image, which" in launch.one_line(capfd.readouterr().err)


def test_a_missing_image_file_is_refused(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pipeline = tiny_conditioned.save("kontext", folder / "kontext")
    capfd.readouterr()
    file = folder / "missing.jsonl"
    file.write_text('{"prompt": "a fox", "image": "0.png"}\n{"prompt": "owls", "image": "nowhere.png"}\n')
    assert train(pipeline, file, tmp_path / "run") == 2
    assert "line 2, column image names nowhere.png, and there is no such file" in launch.one_line(capfd.readouterr().err)


def lucy(folder: Path, records: str) -> tuple[Path, Path]:
    """Return a pipeline that takes videos, and a file of prompts beside clips of 5 and 3 frames."""
    pipeline = tiny_conditioned.save("lucy", folder / "lucy")
    tiny_conditioned.draw(folder, "long", "video", 0, tiny_conditioned.ROWS["lucy"])
    frames = read_video(folder / "long.npy")
    (folder / "short.npy").write_bytes(VIDEO.write(frames[:3]))
    (folder / "words.mp4").write_text("no video")
    (folder / "clips.jsonl").write_text(records)
    return pipeline, folder / "clips.jsonl"


@pytest.mark.long
@pytest.mark.parametrize(
    ("column", "message"),
    [
        (
            "short.npy",
            "column video of prompt .* frames, and that of prompt .* has .: give all prompts videos of one length",
        ),
        ("words.mp4", "prompt 'owls', column video: .*words.mp4 cannot be read as a video"),
        ("0.png", "prompt 'owls', column video: .*0.png cannot be read as a video: it is a still image"),
        ("none.mp4", "line 2, column video names none.mp4, and there is no such file"),
        ([], "line 2, column video is an empty list"),
    ],
)
def test_videos_that_cannot_be_in_a_batch_are_refused(
    folder: Path, tmp_path: Path, column: object, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before anything is computed, in one line with the prompt and the column."""
    records = [{"prompt": "a fox", "video": "long.npy"}, {"prompt": "owls", "video": column}]
    pipeline, file = lucy(folder, "".join(json.dumps(record) + "\n" for record in records))
    capfd.readouterr()
    assert train(pipeline, file, tmp_path / "run", *called("lucy")) == 2
    assert re.search(message, launch.one_line(capfd.readouterr().err))


@pytest.mark.long
def test_a_video_or_sound_that_nothing_uses_is_refused(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A pipeline that takes text only, and one that takes images."""
    pipeline = tiny_pipelines.save(tiny_pipelines.ROWS["sd3"], tmp_path / "sd3")
    file = folder / "c.jsonl"
    for column, name in (("video", "long.npy"), ("audio", "tone.wav")):
        (folder / "tone.wav").write_bytes(SOUND.write(Sound(torch.zeros(1, 4), 400)))
        lucy(folder, "")
        file.write_text(json.dumps({"prompt": "owls", column: name}) + "\n")
        capfd.readouterr()
        assert train(pipeline, file, tmp_path / "run") == 2
        assert f"prompt 'owls' has a column {column}, which nothing uses" in launch.one_line(capfd.readouterr().err)


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--pipeline.frames", "1"), "5 frames, of which WanVideoToVideoPipeline makes as many, and .*frames is 1: set it"),
        (("--pipeline.call", "strength=1.0"), "its video has no effect on the samples; leave it out"),
    ],
)
def test_a_video_to_video_run_without_its_length_or_an_effect_is_refused(
    folder: Path, tmp_path: Path, more: tuple[str, str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The frames are those of the clips; at a strength of 1 the clip is replaced by noise."""
    pipeline = tiny_conditioned.save("wan-video", folder / "wan-video")
    capfd.readouterr()
    code = train(pipeline, columns("wan-video", folder), tmp_path / "run", *called("wan-video"), *more)
    assert code in (1, 2)
    assert re.search(message, launch.one_line(capfd.readouterr().err))


@pytest.mark.long
def test_a_sound_of_another_rate_is_refused(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing resamples it, and the pipeline would take it for a slower one."""
    pipeline, file = tiny_conditioned.save("sound-inpaint", folder / "sound-inpaint"), columns("sound-inpaint", folder)
    for number in range(3):
        sound = SOUND.read(folder / f"sound-inpaint-{number}-0.wav")
        (folder / f"sound-inpaint-{number}-0.wav").write_bytes(SOUND.write(sound._replace(rate=800)))
    capfd.readouterr()
    assert train(pipeline, file, tmp_path / "run", *called("sound-inpaint")) == 2
    assert "the audio of a prompt has 800 numbers per second, and the pipeline takes 400" in launch.one_line(
        capfd.readouterr().err
    )
    columns("sound-inpaint", folder)


@pytest.mark.long
def test_a_list_of_images_is_one_argument(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two images per prompt, by a column of another name; each prompt has as many."""
    pipeline = tiny_conditioned.save("flux2", folder / "flux2")
    for n in range(3):
        tiny_conditioned.draw_image(folder / f"large{n}.png", n, (64, 64))  # the least that FLUX.2 takes
    records = [
        {"prompt": text, "refs": [f"large{n}.png", f"large{(n + 1) % 3}.png"]}
        for n, text in enumerate(("a fox", "owls", "cats"))
    ]
    file = folder / "refs.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = [*called("flux2"), "--pipeline.media", "image=refs"]
    capfd.readouterr()
    assert train(pipeline, file, tmp_path / "run", *options) == 0, capfd.readouterr().err
    assert "image from the column refs" in capfd.readouterr().out
    updates = [record for record in launch.records(tmp_path / "run") if "grad_norm" in record]
    assert {record["first_pass_max_abs_log_ratio"] for record in updates} == {0.0}  # files of equal sizes make no update
    file.write_text(file.read_text().replace('["large1.png", "large2.png"]', '["large1.png"]'))
    assert train(pipeline, file, tmp_path / "other", *options) == 2
    assert "files in the column refs, expected" in capfd.readouterr().err


@pytest.mark.long
def test_another_size_and_a_default_scale_are_said(folder: Path, tmp_path: Path) -> None:
    """Kontext scales height and width to `max_area`, that of the size asked for unless it is given; its own scale is 3.5."""
    pipeline = tiny_conditioned.save("kontext", tmp_path / "pipeline")
    for more, size, scale in (((), (16, 16), 2.5), (("max_area=1024",), (32, 32), 1.0)):
        settings = PipelineConfig(height=16, width=16, call=("_auto_resize=false", *more))
        given = {"steps": 3, "guidance": Guidance(scale), "prompts": (str(prompts(folder / "size.jsonl")),)}
        job = jobs.to_train(str(pipeline), settings, **given)  # type: ignore[arg-type]
        assert job.check is not None
        said = job.check(jobs.build(job))
        assert ("its images have 32x32 pixels, not the 16x16 asked for" in said) == (size == (32, 32))
        assert ("guidance_scale 3.5, the pipeline's default" in said) == (scale == 1)
        assert job.model.decode(torch.zeros(1, *job.shape)).shape[-2:] == size
