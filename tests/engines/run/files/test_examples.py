"""The complete example files: each starts on a tiny pipeline in the place of its model, and explains its settings."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_conditioned, tiny_pipelines, tiny_rewards
from helpers.marks import long
from PIL import Image

from fluvial.engines.cli import main as cli
from fluvial.engines.data.preferences import write_preferences
from fluvial.engines.run.files.read import read_settings
from fluvial.models.pipelines.qwen_image_edit import QwenImageEdit

FOLDER = Path(__file__).parents[4] / "engines" / "run" / "files" / "examples"
EXAMPLES = sorted(path.name for path in FOLDER.iterdir())
MINE = "def score(images, prompts):\n    return images.flatten(1).mean(1)\n\nmotion = score\n"
CAPTIONS = ('a red fox that reads "FOX"', 'two cats and a sign "CATS"', 'an owl says "WHO"')
SMALL = (
    "--updates 2 --pipeline.height 16 --pipeline.width 16 --sampling.prompts 2 --evaluation.every 0 --evaluation.samples 2 "
    "--final-samples 2 --evaluation.steps 2 --checkpoint.every 2 --micro-batch 2 --update-micro-batch rollout "
    "--engine.timeout 600 --engine.base auto"
)
GROUPS = "--sampling.group 2 --sampling.steps 6"
SIZES = {
    "dmd2-few-steps.yaml": "--updates 1 --fake-updates 2",
    "dpo-pairs.yaml": "",
    "qwen-image-edit-grpo.yaml": "--sampling.group 2",
    "sft-folder.yaml": "--sampling.steps 4",
    "wan-i2v-grpo.yaml": f"{GROUPS} --pipeline.frames 5 --sampling.window.high 5",
}
DEEP = {"flux-grpo-24gb.yaml": "--engine.fit None"}


MODELS: dict[str, Callable[[Path], Any]] = {
    "stabilityai/stable-diffusion-3.5-medium": lambda folder: tiny_pipelines.save(tiny_pipelines.ROWS["sd3"], folder),
    "black-forest-labs/FLUX.1-dev": lambda folder: tiny_pipelines.save(tiny_pipelines.ROWS["flux"], folder),
    "Qwen/Qwen-Image": lambda folder: tiny_pipelines.save(tiny_pipelines.ROWS["qwen-image"], folder),
    "Qwen/Qwen-Image-Edit": lambda folder: tiny_conditioned.save("qwen-edit", folder),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": lambda folder: tiny_conditioned.save("wan", folder),
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folder of a person with prompts, photographs, edits and pairs, and change to it."""
    (tmp_path / "mine.py").write_text(MINE)
    for name in ("prompts.txt", "signs.txt"):
        (tmp_path / name).write_text("\n".join(CAPTIONS))
    images = [Image.effect_noise((16, 16), 50 + number).convert("RGB") for number in range(6)]
    (tmp_path / "photos").mkdir()
    for number, caption in enumerate(CAPTIONS):
        images[number].save(tmp_path / "photos" / f"{number}.png")
        (tmp_path / "photos" / f"{number}.txt").write_text(caption)
    records = [json.dumps({"prompt": caption, "image": f"photos/{i}.png"}) for i, caption in enumerate(CAPTIONS)]
    for name in ("edits.jsonl", "clips.jsonl"):
        (tmp_path / name).write_text("\n".join(records))
    pixels = torch.rand(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    write_preferences(tmp_path / "pairs", [(caption, pixels[i], pixels[i + 3]) for i, caption in enumerate(CAPTIONS)])
    for name in ("yuvalkirstain/PickScore_v1",):
        (tmp_path / name).mkdir(parents=True)
        tiny_rewards.save_clip(tmp_path / name)
    scale = QwenImageEdit.scale_size  # to a megapixel, which would take minutes on a CPU
    monkeypatch.setattr(
        QwenImageEdit, "scale_size", lambda model, height, width, area=0: scale(model, height, width, 64 * 64)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", [long(name) for name in EXAMPLES])
def test_an_example_trains(name: str, home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """From the first rollout to the last checkpoint, with sizes and the number of updates typed over the file."""
    model = read_settings(FOLDER / name).get("model") or next(
        id for id in MODELS if id.rpartition("/")[2].lower().startswith(RECIPE_MODELS[name])
    )
    (home / model).parent.mkdir(parents=True, exist_ok=True)
    MODELS[model](home / model)
    words = f"{SMALL} {SIZES.get(name, GROUPS)} {DEEP.get(name, '')} --out {home / 'run'}"
    assert cli.run(["train", str(FOLDER / name), *words.split()]) == 0, capfd.readouterr().err
    assert (home / "run" / "summary.json").is_file()


RECIPE_MODELS = {
    "sd35-grpo-pickscore.yaml": "stable-diffusion-3.5",
    "eight-gpus.yaml": "stable-diffusion-3.5",
    "slurm.yaml": "stable-diffusion-3.5",
    "flux-grpo-24gb.yaml": "flux",
    "qwen-image-grpo-ocr.yaml": "qwen-image",
    "qwen-image-edit-grpo.yaml": "qwen-image-edit",
}


def test_there_are_ten_and_each_says_how_it_is_started() -> None:
    assert len(EXAMPLES) == 10
    for name in EXAMPLES:
        text = (FOLDER / name).read_text()
        assert text.startswith("# ")
        assert name in text.partition("\nrecipe:")[0]
        assert max(map(len, text.splitlines())) <= 125
        assert {"recipe", "out"} <= read_settings(FOLDER / name).keys()
