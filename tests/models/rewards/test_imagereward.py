"""ImageReward: published names of tensors, converted, against BLIP's mathematics in numpy."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import numpy_towers as nt
from helpers import tiny_rewards
from helpers.numpy_towers import Array
from helpers.refusals import refuses

from fluvial.core.random import key, normal
from fluvial.models.rewards.imagereward import FILE, MEAN, STD, TOKENS, ImageReward
from fluvial.models.rewards.shared.pixels import Preprocess

PROMPTS = ["a red cat", "two dogs", "a red cat"]
WIDTH, TEXT, INNER, LAYERS, HEADS, PATCH, SIDE = 16, 12, 20, 2, 2, 10, 30
WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "a", "red", "cat", "two", "dogs"]


def vocabulary() -> Any:
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return tiny_rewards.word_tokenizer(WORDS, "[CLS]", "[SEP]", **names)


def state() -> dict[str, torch.Tensor]:
    def linear(name: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}

    def norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (width,), f"{name}.bias": (width,)}

    v, t = "blip.visual_encoder.", "blip.text_encoder."
    shapes: dict[str, tuple[int, ...]] = {
        f"{v}cls_token": (1, 1, WIDTH),
        f"{v}pos_embed": (1, 1 + (SIDE // PATCH) ** 2, WIDTH),
        f"{v}patch_embed.proj.weight": (WIDTH, 3, PATCH, PATCH),
        f"{v}patch_embed.proj.bias": (WIDTH,),
        **norm(f"{v}norm", WIDTH),
        f"{t}embeddings.word_embeddings.weight": (len(WORDS), TEXT),
        f"{t}embeddings.position_embeddings.weight": (64, TEXT),
        **norm(f"{t}embeddings.LayerNorm", TEXT),
        **linear("mlp.layers.0", 7, TEXT),
        **linear("mlp.layers.2", 1, 7),
    }
    for i in range(LAYERS):
        at = f"{v}blocks.{i}."
        shapes |= norm(f"{at}norm1", WIDTH) | norm(f"{at}norm2", WIDTH) | linear(f"{at}attn.qkv", 3 * WIDTH, WIDTH)
        shapes |= (
            linear(f"{at}attn.proj", WIDTH, WIDTH)
            | linear(f"{at}mlp.fc1", INNER, WIDTH)
            | linear(f"{at}mlp.fc2", WIDTH, INNER)
        )
        at = f"{t}encoder.layer.{i}."
        for kind, width in (("attention", TEXT), ("crossattention", WIDTH)):
            shapes |= linear(f"{at}{kind}.self.query", TEXT, TEXT) | linear(f"{at}{kind}.self.key", TEXT, width)
            shapes |= linear(f"{at}{kind}.self.value", TEXT, width) | linear(f"{at}{kind}.output.dense", TEXT, TEXT)
            shapes |= norm(f"{at}{kind}.output.LayerNorm", TEXT)
        shapes |= linear(f"{at}intermediate.dense", INNER, TEXT) | linear(f"{at}output.dense", TEXT, INNER)
        shapes |= norm(f"{at}output.LayerNorm", TEXT)
    drawn = {name: 0.4 * normal(key(number), shape) for number, (name, shape) in enumerate(shapes.items())}
    drawn |= {name: value + 1 for name, value in drawn.items() if "norm" in name.lower() and name.endswith("weight")}
    return {**drawn, f"{t}embeddings.position_ids": torch.arange(64)[None]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("imagereward")
    torch.save(state(), place / FILE)
    vocabulary().save_pretrained(place)
    return place


def attention(x: Array, context: Array, w: nt.Weights, allowed: Array | None) -> Array:
    q = nt.linear(x, w, "self.query")
    k, v = nt.linear(context, w, "self.key"), nt.linear(context, w, "self.value")
    return nt.norm(nt.linear(nt.attend(q, k, v, HEADS, allowed), w, "output.dense") + x, w, "output.LayerNorm", 1e-12)


def expected(pixels: Array, ids: Array) -> Array:
    w = nt.arrays(state())
    v, t = nt.below(w, "blip.visual_encoder."), nt.below(w, "blip.text_encoder.")
    x = nt.patches(pixels, v["patch_embed.proj.weight"]) + v["patch_embed.proj.bias"]
    x = np.concatenate([np.broadcast_to(v["cls_token"], (len(x), 1, WIDTH)), x], 1) + v["pos_embed"]
    for i in range(LAYERS):
        b = nt.below(v, f"blocks.{i}.")
        q, k, val = np.split(nt.linear(nt.norm(x, b, "norm1", 1e-6), b, "attn.qkv"), 3, axis=-1)
        x = x + nt.linear(nt.attend(q, k, val, HEADS), b, "attn.proj")
        x = x + nt.linear(nt.gelu(nt.linear(nt.norm(x, b, "norm2", 1e-6), b, "mlp.fc1")), b, "mlp.fc2")
    x = nt.norm(x, v, "norm", 1e-6)
    y = t["embeddings.word_embeddings.weight"][ids] + t["embeddings.position_embeddings.weight"][: ids.shape[1]]
    y = nt.norm(y, t, "embeddings.LayerNorm", 1e-12)
    for i in range(LAYERS):
        b = nt.below(t, f"encoder.layer.{i}.")
        y = attention(y, y, nt.below(b, "attention."), (ids != 0)[:, None, None])
        y = attention(y, x, nt.below(b, "crossattention."), None)
        y = nt.norm(
            nt.linear(nt.gelu(nt.linear(y, b, "intermediate.dense")), b, "output.dense") + y, b, "output.LayerNorm", 1e-12
        )
    head = nt.below(w, "mlp.")
    scores = nt.linear(nt.linear(y[:, 0], head, "layers.0"), head, "layers.2")[:, 0]
    return (scores - MEAN) / STD


def test_scores_are_the_formula(folder: Path) -> None:
    images = tiny_rewards.images()
    ids = np.array([vocabulary()(prompt, padding="max_length", max_length=TOKENS)["input_ids"] for prompt in PROMPTS])
    wanted = expected(Preprocess(SIDE, (SIDE, SIDE))(images).double().numpy(), ids)
    found = ImageReward(folder, heads=(HEADS, HEADS))(images, PROMPTS)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4, atol=1e-5)
    assert found.std() > 1e-3
    tiny_rewards.check_images(partial(ImageReward, folder, heads=(HEADS, HEADS)), PROMPTS)


def test_wrong_weights_are_named(folder: Path, tmp_path: Path) -> None:
    def message(tensors: Any) -> str:
        torch.save(tensors, tmp_path / FILE)
        with pytest.raises(ValueError, match="imagereward: ") as caught:
            ImageReward(tmp_path, processor=str(folder), heads=(HEADS, HEADS))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    refuses(r"has no file ImageReward\.pt", ImageReward, tmp_path)
    assert "have no tensor blip.visual_encoder.*" in message({"weight": torch.zeros(1)})
    whole = state()
    assert "have no pos_embed of 3 dimensions" in message({**whole, "blip.visual_encoder.pos_embed": torch.zeros(4, 4)})
    assert "hold more, which BLIP does not have" in message({**whole, "blip.text_encoder.more": torch.zeros(1)})
    assert "do not fit" in message({**whole, "blip.visual_encoder.norm.bias": torch.zeros(3)})
    del whole["blip.visual_encoder.blocks.1.attn.proj.bias"]
    assert "they lack encoder.layers.1.self_attn.projection.bias" in message(whole)
