"""Similarity of an edit to its source: DINOv2 of transformers, and the distance of LPIPS' own wheel on its features."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import tiny_rewards, wheels
from helpers.refusals import refuses
from torch import Tensor
from torch.nn.functional import normalize

from fluvial.engines.scoring.signature import signature_of
from fluvial.models.rewards.identity import Dino, Perceptual

PROMPTS = ["make it red", "add a hat", "make it red"]
KINDS: dict[str, Callable[..., Any]] = {"dino": Dino, "perceptual": Perceptual}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Dinov2Config, Dinov2Model

    place = tmp_path_factory.mktemp("dino")
    config = Dinov2Config(hidden_size=16, num_hidden_layers=4, num_attention_heads=2, image_size=30, patch_size=10)
    tiny_rewards.randomise(Dinov2Model(config)).save_pretrained(place)
    settings = {**tiny_rewards.clip_settings(), "size": {"shortest_edge": 34}, "image_processor_type": "BitImageProcessor"}
    tiny_rewards.write_settings(place, settings)
    return place


def before() -> list[Tensor]:
    return [tiny_rewards.images(1, height, width, seed=7)[0] for height, width in ((41, 53), (60, 36), (30, 30))]


def reference(folder: Path, images: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the class tokens of transformers' DINOv2, of length 1, and the patches' features after each block."""
    from transformers import Dinov2Model

    pixels = torch.cat([Dino(folder).preprocess(image[None]) for image in images])
    with torch.no_grad():
        output = Dinov2Model.from_pretrained(folder)(pixels, output_hidden_states=True)
    return normalize(output.pooler_output, dim=-1), [block[:, 1:].double() for block in output.hidden_states[1:]]


def test_dino_is_the_cosine_of_class_tokens(folder: Path) -> None:
    after = tiny_rewards.images()
    found = Dino(folder)(after, PROMPTS, before())
    wanted = (reference(folder, before())[0] * reference(folder, list(after))[0]).sum(-1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert found.std() > 1e-3
    assert signature_of(Dino(folder)).takes("condition_images")


def test_the_distance_is_that_of_lpips(folder: Path) -> None:
    """The forward function of its wheel without weights of its own, on DINOv2's blocks as maps of features."""
    place = wheels.install("lpips", "0.1.4") / "lpips"
    tools = wheels.definitions(place / "__init__.py", "normalize_tensor", torch=torch)
    names = {"torch": torch, "nn": torch.nn, "lpips": SimpleNamespace(**tools)}
    original = wheels.definitions(place / "lpips.py", "spatial_average", "LPIPS", **names)["LPIPS"]
    after = tiny_rewards.images()

    def maps(images: list[Tensor], layers: tuple[int, ...]) -> list[Tensor]:
        blocks = reference(folder, images)[1]
        return [blocks[layer].transpose(1, 2).unflatten(2, (3, 3)) for layer in layers]

    for layers, chosen in ((4, (0, 1, 2, 3)), (2, (1, 3)), (1, (3,))):
        both = [maps(before(), chosen), maps(list(after), chosen)]
        net = SimpleNamespace(forward=lambda image, both=both: both[int(image)])
        self = SimpleNamespace(version="0", net=net, L=layers, lpips=False, spatial=False)
        wanted = original.forward(self, torch.tensor(0), torch.tensor(1))[:, 0, 0, 0]
        found = Perceptual(folder, layers=layers)(after, PROMPTS, before())
        torch.testing.assert_close(found, -wanted.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_an_image_that_is_kept_has_the_highest_score(name: str, folder: Path) -> None:
    images = tiny_rewards.images()
    found = KINDS[name](folder)(images, PROMPTS, list(images))
    torch.testing.assert_close(found, torch.full((3,), 1.0 if name == "dino" else 0.0), rtol=0, atol=1e-5)
    assert bool((KINDS[name](folder)(images, PROMPTS, before()) < found).all())
    tiny_rewards.check_images(partial(KINDS[name], folder), PROMPTS, before())


def test_blocks_that_the_model_lacks_are_refused(folder: Path) -> None:
    refuses("perceptual: layers is 5, expected 1 to 4, the blocks of the model", Perceptual, folder, layers=5)
