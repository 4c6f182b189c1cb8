"""Similarity of an edit to its source: DINOv2 in numpy, and the distance of LPIPS' own wheel on the same features."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import numpy_towers as nt
from helpers import tiny_rewards, wheels
from helpers.numpy_towers import Array
from helpers.refusals import refuses
from torch import Tensor

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


def reference(folder: Path, images: list[Tensor]) -> tuple[Array, list[Array]]:
    """Return DINOv2's class tokens in numpy, of length 1, and the patches' features after each block."""
    from transformers import Dinov2Model

    w = nt.arrays(Dinov2Model.from_pretrained(folder).state_dict())
    preprocess = Dino(folder).preprocess
    pixels = np.concatenate([preprocess(image[None]).double().numpy() for image in images])
    x = nt.patches(pixels, w["embeddings.patch_embeddings.projection.weight"])
    x = x + w["embeddings.patch_embeddings.projection.bias"]
    first = np.broadcast_to(w["embeddings.cls_token"], (len(x), 1, 16))
    x, found = np.concatenate([first, x], 1) + w["embeddings.position_embeddings"], []
    for i in range(4):
        b = nt.below(w, f"encoder.layer.{i}.")
        y = nt.norm(x, b, "norm1", 1e-6)
        q, k, v = (nt.linear(y, b, f"attention.{name}_proj") for name in "qkv")
        mixed = nt.linear(nt.attend(q, k, v, 2), b, "attention.o_proj")
        x = x + b["layer_scale1.lambda1"] * mixed
        y = nt.linear(nt.gelu(nt.linear(nt.norm(x, b, "norm2", 1e-6), b, "mlp.fc1")), b, "mlp.fc2")
        x = x + b["layer_scale2.lambda1"] * y
        found.append(x[:, 1:])
    return nt.unit(nt.norm(x[:, 0], w, "layernorm", 1e-6)), found


def test_dino_is_the_cosine_of_class_tokens(folder: Path) -> None:
    after = tiny_rewards.images()
    found = Dino(folder)(after, PROMPTS, before())
    wanted = (reference(folder, before())[0] * reference(folder, list(after))[0]).sum(-1)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4, atol=1e-5)
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
        return [torch.tensor(blocks[layer]).transpose(1, 2).unflatten(2, (3, 3)) for layer in layers]

    for layers, chosen in ((4, (0, 1, 2, 3)), (2, (1, 3)), (1, (3,))):
        both = [maps(before(), chosen), maps(list(after), chosen)]
        net = SimpleNamespace(forward=lambda image, both=both: both[int(image)])
        self = SimpleNamespace(version="0", net=net, L=layers, lpips=False, spatial=False)
        wanted = original.forward(self, torch.tensor(0), torch.tensor(1))[:, 0, 0, 0]
        found = Perceptual(folder, layers=layers)(after, PROMPTS, before())
        np.testing.assert_allclose(found.numpy(), -wanted.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_an_image_that_is_kept_has_the_highest_score(name: str, folder: Path) -> None:
    images = tiny_rewards.images()
    found = KINDS[name](folder)(images, PROMPTS, list(images))
    torch.testing.assert_close(found, torch.full((3,), 1.0 if name == "dino" else 0.0), rtol=0, atol=1e-5)
    assert bool((KINDS[name](folder)(images, PROMPTS, before()) < found).all())
    tiny_rewards.check_images(partial(KINDS[name], folder), PROMPTS, before())


def test_blocks_that_the_model_lacks_are_refused(folder: Path) -> None:
    refuses("perceptual: layers is 5, expected 1 to 4, the blocks of the model", Perceptual, folder, layers=5)
