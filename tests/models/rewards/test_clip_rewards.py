"""PickScore, CLIPScore and the aesthetic score on a tiny CLIP model, against their formulas on transformers' output."""

import shutil
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny_rewards
from helpers.refusals import refuses
from torch import Tensor

from fluvial.core.random import key, normal
from fluvial.models.rewards.clip import Aesthetic, ClipScore, PickScore
from fluvial.models.rewards.shared.pixels import Preprocess

PROMPTS = ["a red cat", "two dogs, one hat!", "a red cat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("clip")
    tiny_rewards.save_clip(place)
    sizes = [12, 9, 5, 1]
    tensors = {}
    for number, (inputs, outputs) in enumerate(pairwise(sizes)):
        tensors[f"layers.{2 * number}.weight"] = normal(key(50 + number), (outputs, inputs))
        tensors[f"layers.{2 * number}.bias"] = normal(key(60 + number), (outputs,))
    torch.save(tensors, place / "aesthetic-model.pth")
    return place


def build(name: str, folder: Path, **options: Any) -> Any:
    if name == "aesthetic":
        return Aesthetic(folder, head=folder, **options)
    return (PickScore if name == "pickscore" else ClipScore)(folder, **options)


def reference(folder: Path) -> Any:
    """Return the output of transformers' own model."""
    from transformers import AutoTokenizer, CLIPModel

    tokens = AutoTokenizer.from_pretrained(folder)(PROMPTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        return CLIPModel.from_pretrained(folder)(**tokens, pixel_values=Preprocess(30, (30, 30))(tiny_rewards.images()))


def expected(name: str, folder: Path) -> Tensor:
    output = reference(folder)
    if name == "pickscore":
        return output.logits_per_image.diag() / 26
    images = output.image_embeds
    if name == "clipscore":
        return (images * output.text_embeds).sum(-1)
    head = torch.load(folder / "aesthetic-model.pth", weights_only=True)
    for i in (0, 2, 4):
        images = images @ head[f"layers.{i}.weight"].T + head[f"layers.{i}.bias"]
    return images[:, 0]


NAMES = ["pickscore", "clipscore", "aesthetic"]


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_the_formula_with_gradients_and_of_videos(name: str, folder: Path) -> None:
    """They differ between images and prompts."""
    found = build(name, folder)(tiny_rewards.images(), PROMPTS)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected(name, folder), rtol=1e-4, atol=1e-5)
    assert found.std() > 1e-3
    tiny_rewards.check_images(partial(build, name, folder), PROMPTS)


@pytest.mark.parametrize(
    ("form", "formula"),
    [("cosine", lambda c, s: c), ("logits", lambda c, s: s * c / 30), ("paper", lambda c, s: 2.5 * c.relu())],
)
def test_forms_of_clipscore(form: str, formula: Callable[[Tensor, Tensor], Tensor], folder: Path) -> None:
    reward = ClipScore(folder, form=form)
    wanted = formula(expected("clipscore", folder), reward.model.logit_scale.exp())
    torch.testing.assert_close(reward(tiny_rewards.images(), PROMPTS), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("height", "width"), [(41, 53), (80, 30), (33, 30), (30, 30)])
def test_clipscore_resizes_bilinearly_as_diffusion_nft(height: int, width: int, folder: Path) -> None:
    """torchvision's `Resize(30)` and `CenterCrop(30)` of tensors, in numpy: a triangle as wide as a step, no rounding.

    Source: DiffusionNFT, `flow_grpo/clip_scorer.py`.
    """
    images = tiny_rewards.images(3, height, width)
    short, long = sorted((height, width))
    sizes = [30 if edge == short else int(30 * long / short) for edge in (height, width)]

    def matrix(have: int, wanted: int) -> np.ndarray:
        scale = have / wanted
        centre = (np.arange(wanted)[:, None] + 0.5) * scale
        rows = np.maximum(0, 1 - np.abs(np.arange(have) + 0.5 - centre) / max(scale, 1))
        return rows / rows.sum(1, keepdims=True)

    small = matrix(height, sizes[0]) @ images.double().numpy() @ matrix(width, sizes[1]).T
    top, left = (round((have - 30) / 2) for have in sizes)
    wanted = small[..., top : top + 30, left : left + 30]
    reward = ClipScore(folder, resize="bilinear")
    shift, scale = (np.array(values)[:, None, None] for values in (reward.preprocess.mean, reward.preprocess.std))
    np.testing.assert_allclose(reward.preprocess(images).numpy(), (wanted - shift) / scale, atol=2e-5)
    assert not torch.equal(reward(images, PROMPTS), ClipScore(folder)(images, PROMPTS)) or short == long == 30


def test_a_lower_precision_is_near(folder: Path) -> None:
    reward = build("pickscore", folder, dtype="bfloat16", device="cpu")
    assert {parameter.dtype for parameter in reward.model.parameters()} == {torch.bfloat16}
    found = reward(tiny_rewards.images(), PROMPTS)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected("pickscore", folder), rtol=0, atol=0.02)


def test_what_is_wrong_with_the_weights_is_one_line(folder: Path, tmp_path: Path) -> None:
    """Nothing there, another architecture, a file cut short, tensors missing, a head of another model."""
    from safetensors.torch import load_file, save_file
    from transformers import BertConfig

    refuses("^pickscore: there is no file or folder /no/such/folder", PickScore, "/no/such/folder")
    BertConfig().save_pretrained(tmp_path / "bert")
    refuses("are of the architecture 'bert', expected 'clip'", ClipScore, tmp_path / "bert")
    (tmp_path / "empty").mkdir()
    refuses("^pickscore: the weights", PickScore, tmp_path / "empty")

    shutil.copytree(folder, tmp_path / "cut")
    whole = (folder / "model.safetensors").read_bytes()
    (tmp_path / "cut" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refuses("cannot be loaded", PickScore, tmp_path / "cut")

    tensors = load_file(folder / "model.safetensors")
    del tensors["visual_projection.weight"]
    save_file(tensors, tmp_path / "cut" / "model.safetensors", metadata={"format": "pt"})
    refuses("they lack visual_projection.weight", PickScore, tmp_path / "cut")

    torch.save({"layers.0.weight": torch.zeros(1, 7), "layers.0.bias": torch.zeros(1)}, tmp_path / "head.pth")
    refuses("expected 12 -> ... -> 1", Aesthetic, folder, head=tmp_path / "head.pth")
    torch.save({"other": torch.zeros(1)}, tmp_path / "other.pth")
    refuses("expected layers.0.weight", Aesthetic, folder, head=tmp_path / "other.pth")
    torch.save({"layers.0.weight": Path("x")}, tmp_path / "evil.pth")  # any object, which would run code
    refuses("cannot be loaded", Aesthetic, folder, head=tmp_path / "evil.pth")
    (tmp_path / "text.pth").write_text("not weights")
    refuses("cannot be loaded", Aesthetic, folder, head=tmp_path / "text.pth")


def test_what_is_wrong_with_an_option_is_one_line(folder: Path) -> None:
    refuses("dtype is 'int8', expected one of float32, bfloat16, float16", PickScore, folder, dtype="int8")
    refuses("device is 'cuda:77', which is not there", PickScore, folder, device="cuda:77")
    refuses("form is 'sine', expected one of cosine, logits, paper", ClipScore, folder, form="sine")
    refuses("resize is 'cubic', expected one of processor, bilinear", ClipScore, folder, resize="cubic")
    refuses("3 images and 1 prompts", PickScore(folder), tiny_rewards.images(), ["a"])
