"""Prompts with images and pipelines that make sounds, trained from the command line."""

import json
import re
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from helpers import launch, tiny_conditioned, tiny_pipelines, tiny_sounds
from helpers.marks import long
from helpers.pipeline_runs import TWO_UPDATES, expect_on_policy
from PIL import Image
from safetensors.torch import load_file

from fluvial.engines.run import job as jobs
from fluvial.engines.run.jobs.settings import PipelineConfig
from fluvial.engines.sampling.generate import Guidance
from fluvial.models.replay.kinds import SOUND, VIDEO, Sound, read_video
from fluvial.models.tiny import pipelines as tiny

pytestmark = [  # diffusers' own use
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`LoraLoaderMixin` is deprecated:FutureWarning"),
]

FEW = ["--sampling.prompts", "2", "--sampling.group", "2", "--sampling.steps", "3", *TWO_UPDATES]
SHORT = [*FEW, "--pipeline.height", "16", "--pipeline.width", "16"]


NO_LOADER = ("longcat", "lumina", "sound-to-sound", "sound-inpaint", "prx", "hunyuan-video", "motif-video")
# Those with an adapter are trained in tests/models/pipelines/test_conditioned_adapters.py.
ADAPTED = ("wan", "wan-experts", "wan-first-frame", "qwen-edit", "qwen-edit-plus")
OTHERS = [name for name in tiny_conditioned.ROWS if name not in ("kontext", *ADAPTED)]
# In bfloat16 each; in float32 one of each way in which media reach a network. The velocities and images of all are compared
# in float32 in tests/models/replay/test_conditioned.py.
SINGLE = ("control", "fill", "qwen-img2img", "sd3-controlnet", "vace", "reference-sound", "kandinsky-video")
TRAINED = [("kontext", "float32"), *(long(name, "bfloat16") for name in ("kontext", *OTHERS))]
TRAINED += [long(name, "float32") for name in SINGLE]


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


TEXTS = ("a fox", "owls", "cats")


def prompts(file: Path, **columns: object) -> Path:
    """Write a file of three prompts with images of the folder and further columns."""
    return written(file, *({"prompt": text, "image": f"{n}.png", **columns} for n, text in enumerate(TEXTS)))


Train = Callable[..., str]


@pytest.fixture
def train(fluvial: Any) -> Train:
    """Train a pipeline on a file of prompts, two updates of GRPO; return what is printed, or the line of an error."""

    def run(pipeline: Path, file: Path, out: Path, *more: str, code: int = 0) -> str:
        words = ["train", "grpo", "--model", pipeline, "--prompts", file, *SHORT, *launch.rewarded(*more)]
        said: str = fluvial(*words, "--out", out, code=code)
        return said

    return run


def written(file: Path, *records: dict[str, Any]) -> Path:
    """Write records, and return their file."""
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def columns(name: str, folder: Path) -> Path:
    """Write a file of prompts with the images of a row, each in a column of its argument's name."""
    row = tiny_conditioned.ROWS[name]
    records: list[dict[str, Any]] = [{"prompt": text} for text in TEXTS]
    for number, record in enumerate(records):
        for place, argument in enumerate(row.media):
            record[argument] = tiny_conditioned.draw(folder, f"{name}-{number}-{place}", argument, 10 * number + place, row)
    return written(folder / f"{name}.jsonl", *records)


def called(name: str) -> list[str]:
    """Return the flags of a row's call."""
    row = tiny_conditioned.ROWS[name]
    given = [f"{argument}={json.dumps(value)}" for argument, value in row.call.items()]
    sounds = ["--rewards", "helpers.tiny_sounds:even"] if {*SOUND.arguments} & {*row.media} else []
    size = f"--pipeline.height {row.size} --pipeline.width {row.size} --pipeline.frames {row.frames}"
    return [*size.split(), "--sampling.guidance.scale", str(row.scale), *sounds, "--pipeline.call", *given]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "compute"), TRAINED)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # diffusers' Kandinsky5AttnProcessor
def test_two_updates_with_images(folder: Path, tmp_path: Path, name: str, compute: str, train: Train) -> None:
    """From records with images to an adapter that the pipeline opens: on policy to the bit."""
    pipeline = tiny_conditioned.save(name, folder / name)
    low = ["--engine.compute", compute, "--pipeline.frozen", compute, "--pipeline.text-cache", str(tmp_path / "texts")]
    said = train(pipeline, columns(name, folder), tmp_path / "run", *called(name), *low)
    shown = " ".join(said.split())  # lines break where the path of a folder is long
    assert all(f"{argument} from the column {argument}" in shown for argument in tiny_conditioned.ROWS[name].media[:1])
    expect_on_policy(tmp_path / "run")
    if name not in NO_LOADER:
        opened = tiny_conditioned.load(pipeline)
        opened.load_lora_weights(tmp_path / "run" / "lora")
        assert opened.get_active_adapters()


@pytest.mark.long
def test_an_export_is_evaluated_with_the_images(folder: Path, tmp_path: Path, train: Train, fluvial: Any) -> None:
    """As the run evaluated it, not from the texts alone."""
    pipeline = tiny_conditioned.save("kontext", folder / "kontext")
    train(pipeline, columns("kontext", folder), tmp_path / "run", *called("kontext"))
    fluvial("eval", tmp_path / "run", "--out", tmp_path / "table")
    rows = json.loads((tmp_path / "table" / "table.json").read_text())["rows"]
    expected = json.loads((tmp_path / "run" / "summary.json").read_text())["jpeg_score_after"]
    assert next(row["mean"] for row in rows if row["evaluator"] == "jpeg") == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
def test_a_column_of_another_name(folder: Path, tmp_path: Path, train: Train, fluvial: Any) -> None:
    """It is mapped by `argument=column`, also where samples are drawn; another argument is refused.

    Other images make other samples, of a replayed pipeline, too.
    """
    pipeline, drawn = tiny_conditioned.save("control", folder / "control"), []
    for number in range(2):
        file = written(folder / f"drawn-{number}.jsonl", {"prompt": "a fox", "source": f"{number}.png"})
        media = ("--pipeline.media", "control_image=source")
        given = (word.replace("--sampling.", "--") for word in called("control"))
        out = tmp_path / f"{number}.png"
        fluvial("sample", pipeline, "--steps", 3, "--each", 2, "--prompts", file, *media, *given, "--out", out)
        drawn.append(np.asarray(Image.open(out)))
    assert (drawn[0] != drawn[1]).any()
    file = written(folder / "sources.jsonl", *({"prompt": text, "source": f"{n}.png"} for n, text in enumerate(TEXTS[:2])))
    mapped = [*called("control"), "--pipeline.media"]
    assert "control_image from the column source" in train(pipeline, file, tmp_path / "run", *mapped, "control_image=source")
    line = train(pipeline, file, tmp_path / "other", *mapped, "photograph=source", code=2)
    assert "an argument of FluxControlPipeline, which takes control_image" in line


FOX = {"prompt": "a fox", "image": "0.png"}
# Pipelines, the records of their prompts and further flags, and what the one line names: the prompt and the column.
REFUSED: dict[str, list[tuple[list[dict[str, Any]], str, str]]] = {
    "sd3": [([{"prompt": "owls", kind: name}], "", f"'owls' has a column {kind}, which nothing uses") for kind, name in
            (("image", "0.png"), ("video", "long.npy"), ("audio", "tone.wav"))],
    "kontext": [
        ([{**FOX, "prompt_2": "x"}], "", "has a column prompt_2, which FluxKontextPipeline takes"),
        ([FOX, {"prompt": "owls"}], "", "prompt 'owls' has no column image"),
        ([FOX, {"prompt": "owls", "image": "nowhere.png"}], "", "line 2, column image names nowhere.png"),
    ],
    "lucy": [
        ([{"prompt": "a fox", "video": "long.npy"}, {"prompt": "owls", "video": column}], "", message)
        for column, message in (
            ("short.npy", "column video of prompt .* frames, and that of prompt .* has ."),
            ("words.mp4", "prompt 'owls', column video: .*words.mp4 cannot be read as a video"),
            ("0.png", "prompt 'owls', column video: .*0.png cannot be read as a video: it is a still image"),
            ("none.mp4", "line 2, column video names none.mp4"),
            ([], "line 2, column video is an empty list"),
        )
    ],
    "wan-video": [
        ([{"prompt": "a fox", "video": "long.npy"}], "--pipeline.frames 1", "5 frames, .*frames is 1"),
        ([{"prompt": "a fox", "video": "long.npy"}], "--pipeline.call strength=1.0", "its video has no effect"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", ["sd3", "kontext", *map(long, ("lucy", "wan-video"))])
def test_media_that_are_refused(folder: Path, tmp_path: Path, name: str, train: Train) -> None:
    """Before anything is computed: a missing file, what nothing uses, and videos that cannot be in a batch."""
    if name == "sd3":
        pipeline, call = tiny_pipelines.save(tiny_pipelines.ROWS[name], tmp_path / name), list[str]()
    else:
        pipeline, call = tiny_conditioned.save(name, folder / name), called(name)
    tiny_conditioned.draw(folder, "long", "video", 0, tiny_conditioned.ROWS["lucy"])
    (folder / "short.npy").write_bytes(VIDEO.write(read_video(folder / "long.npy")[:3]))
    (folder / "words.mp4").write_text("no video")
    (folder / "tone.wav").write_bytes(SOUND.write(Sound(torch.zeros(1, 4), 400)))
    for records, more, message in REFUSED[name]:
        line = train(pipeline, written(folder / "wrong.jsonl", *records), tmp_path / "run", *call, *more.split(), code=2)
        assert re.search(message, line), line


@pytest.mark.long
def test_a_list_of_images_is_one_argument(folder: Path, tmp_path: Path, train: Train) -> None:
    """Two images per prompt, by a column of another name; each prompt has as many."""
    pipeline = tiny_conditioned.save("flux2", folder / "flux2")
    for n in range(3):
        tiny_conditioned.draw_image(folder / f"large{n}.png", n, (64, 64))  # the least that FLUX.2 takes
    refs = [[f"large{n}.png", f"large{(n + 1) % 3}.png"] for n in range(3)]
    file = written(folder / "refs.jsonl", *({"prompt": TEXTS[n], "refs": names} for n, names in enumerate(refs)))
    options = [*called("flux2"), "--pipeline.media", "image=refs"]
    assert "image from the column refs" in train(pipeline, file, tmp_path / "run", *options)
    expect_on_policy(tmp_path / "run")
    refs[1].pop()
    written(file, *({"prompt": TEXTS[n], "refs": names} for n, names in enumerate(refs)))
    assert "files in the column refs, expected" in train(pipeline, file, tmp_path / "other", *options, code=2)


@pytest.mark.long
def test_another_size_and_a_default_scale_are_said(folder: Path, tmp_path: Path) -> None:
    """Kontext scales height and width to `max_area`, that of the size asked for unless it is given; its own scale is 3.5."""
    pipeline = tiny_conditioned.save("kontext", tmp_path / "pipeline")
    for more, size, scale in (((), (16, 16), 2.5), (("max_area=1024",), (32, 32), 1.0)):
        settings = PipelineConfig(height=16, width=16, call=("_auto_resize=false", *more))
        given = {"steps": 3, "guidance": Guidance(scale), "prompts": (str(prompts(folder / "size.jsonl")),)}
        job = jobs.open_to_train(str(pipeline), settings, **given)  # type: ignore[arg-type]
        assert job.check is not None
        said = job.check(jobs.build(job))
        assert ("its images have 32x32 pixels, not the 16x16 asked for" in said) == (size == (32, 32))
        assert ("guidance_scale 3.5, the pipeline's default" in said) == (scale == 1)
        assert job.model.decode(torch.zeros(1, *job.shape)).shape[-2:] == size


WITH_SOUND = (
    "--sampling.guidance.scale 3 --sampling.guidance.negative bad --pipeline.height 32 --pipeline.width 32 "
    "--rewards helpers.tiny_sounds:even jpeg --pipeline.call max_sequence_length=32"
)

PLAIN = ("guidance_rescale=0.0", "audio_guidance_rescale=0.0")


SAVED = "before-00.wav", "before-01.wav", "after-00.wav"


@pytest.mark.long
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_two_updates_by_a_reward_of_sounds(tmp_path: Path, compute: str, fluvial: Any) -> None:
    """On policy to the bit; the sounds of the evaluations are beside their drawings; an adapter comes out.

    Images of sounds are drawings, which nothing should be trained on without being asked; the built-in model makes none.
    """
    model, prompts = tiny_sounds.save(tmp_path / "ace"), tiny_sounds.texts(tmp_path / "prompts.jsonl")
    low = ["--engine.compute", compute, "--pipeline.frozen", compute, "--pipeline.call", "audio_duration=0.32"]
    low += ["--sampling.guidance.scale", "1", "--out", str(tmp_path / "run")]
    words = ["train", "grpo", "--model", model, "--prompts", prompts, *FEW, *low]
    sounds, out = ["--rewards", "helpers.tiny_sounds:loud"], tmp_path / "none"
    assert "reward 'jpeg' takes images, and the model makes sounds" in fluvial(*words, "--rewards", "jpeg", code=2)
    none = fluvial("train", "grpo", *sounds, "--out", out, code=2)
    assert "reward 'helpers.tiny_sounds:loud' takes audios, and the model makes no sounds" in none
    fluvial(*words, *sounds)
    expect_on_policy(tmp_path / "run")
    for name in SAVED:
        with wave.open(str(tmp_path / "run" / "samples" / name)) as sound:
            assert (sound.getframerate(), sound.getnchannels(), sound.getnframes()) == (tiny_sounds.RATE, 2, 128)
    (adapter,) = (tmp_path / "run" / "lora").glob("*.safetensors")
    assert any(tensor.any() for key, tensor in load_file(adapter).items() if "lora_B" in key)


@pytest.mark.long
@pytest.mark.parametrize(("compute", "rescaled"), [("float32", False), ("bfloat16", True), ("bfloat16", False)])
def test_two_updates_of_a_video_with_sound(tmp_path: Path, compute: str, rescaled: bool, fluvial: Any) -> None:
    """LTX-2, by a reward of its sounds, with its own rescaled guidance and with sums: on policy to the bit."""
    model, prompts = tiny.save("LTX2Pipeline", tmp_path / "model"), tiny_sounds.texts(tmp_path / "prompts.jsonl")
    # Three frames are enough for sums; of so few, rescaled guidance is refused in bfloat16 as no known combination.
    words = [*FEW, "--pipeline.frames", "5" if rescaled else "3", *WITH_SOUND.split(), *([] if rescaled else PLAIN)]
    low = ["--engine.compute", compute, "--pipeline.frozen", compute, "--out", tmp_path / "run"]
    fluvial("train", "grpo", "--model", model, "--prompts", prompts, *words, *low)
    expect_on_policy(tmp_path / "run")
    with wave.open(str(tmp_path / "run" / "samples" / "after-00.wav")) as sound:
        assert (sound.getframerate(), sound.getnchannels()) == (16000, 2)
    assert (tmp_path / "run" / "samples" / "after.png").is_file()
    pipe = DiffusionPipeline.from_pretrained(model, local_files_only=True)
    pipe.load_lora_weights(tmp_path / "run" / "lora")
    assert pipe.get_active_adapters()


@pytest.mark.long
@pytest.mark.parametrize(("compute", "tolerance"), [("float32", 1e-5), ("bfloat16", 5e-2)])
def test_a_video_with_sound_starts_from_an_image(tmp_path: Path, compute: str, tolerance: float, fluvial: Any) -> None:
    """LTX-2 from an image that it compresses: the held frame counts in the deviation that guidance is rescaled by."""
    model, records = tiny.save("LTX2ImageToVideoPipeline", tmp_path / "model"), []
    for number, (text, colour) in enumerate({"rain": "red", "a drum": "navy", "an owl": "white"}.items()):
        noise = torch.rand(32, 32, 3, generator=torch.Generator().manual_seed(number))
        image = Image.fromarray((noise * 255).to(torch.uint8).numpy())
        Image.blend(image, Image.new("RGB", (32, 32), colour), 0.5).save(tmp_path / f"{number}.png")
        records.append({"prompt": text, "image": f"{number}.png"})
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ["--model", model, "--prompts", tmp_path / "prompts.jsonl", *FEW, "--pipeline.frames", "5", *WITH_SOUND.split()]
    low = ["--engine.compute", compute, "--pipeline.frozen", compute, "--out", tmp_path / "run"]
    within = re.search(r"velocities and images within ([\d.e+-]+)", fluvial("train", "grpo", *words, *low))
    assert within is not None
    assert float(within[1]) < tolerance
    expect_on_policy(tmp_path / "run")
