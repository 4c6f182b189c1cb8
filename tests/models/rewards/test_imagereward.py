"""ImageReward: published names of tensors, converted, against transformers' BLIP, which has others."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_rewards
from helpers.refusals import refuses
from torch.nn.functional import linear

from fluvial.core.random import key, normal
from fluvial.models.rewards.imagereward import FILE, MEAN, STD, ImageReward
from fluvial.models.rewards.shared.pixels import Preprocess

PROMPTS = ["a red cat", "two dogs", "a red cat"]
TEXT, HEADS, SIDE = 12, 2, 30
WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "a", "red", "cat", "two", "dogs"]


def vocabulary() -> Any:
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return tiny_rewards.word_tokenizer(WORDS, "[CLS]", "[SEP]", **names)


# Names of the published vision model, which is timm's, by parts of transformers' names.
NAMES = {
    "embeddings.class_embedding": "cls_token",
    "embeddings.position_embedding": "pos_embed",
    "embeddings.patch_embedding": "patch_embed.proj",
    "encoder.layers": "blocks",
    "post_layernorm": "norm",
    "layer_norm": "norm",
    "self_attn.qkv": "attn.qkv",
    "self_attn.projection": "attn.proj",
}


def models() -> tuple[Any, Any]:
    from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

    small: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 20}
    seen = BlipVisionConfig(**small, hidden_size=16, image_size=SIDE, patch_size=10, layer_norm_eps=1e-6)
    read = BlipTextConfig(
        **small, hidden_size=TEXT, encoder_hidden_size=16, vocab_size=len(WORDS), max_position_embeddings=64
    )
    text = BlipTextModel(read, add_pooling_layer=False)
    return tiny_rewards.randomise(BlipVisionModel(seen)), tiny_rewards.randomise(text, seed=1)


def state() -> dict[str, torch.Tensor]:
    vision, text = models()
    found = {f"blip.text_encoder.{name}": value for name, value in text.state_dict().items()}
    found["blip.text_encoder.embeddings.position_ids"] = torch.arange(64)[None]
    for name, value in vision.state_dict().items():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        found[f"blip.visual_encoder.{name}"] = value
    for place, (outputs, inputs) in {0: (7, TEXT), 2: (1, 7)}.items():
        found[f"mlp.layers.{place}.weight"] = normal(key(place), (outputs, inputs))
        found[f"mlp.layers.{place}.bias"] = normal(key(place + 1), (outputs,))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("imagereward")
    torch.save(state(), place / FILE)
    vocabulary().save_pretrained(place)
    return place


def test_scores_are_the_formula(folder: Path) -> None:
    images, weights, (vision, text) = tiny_rewards.images(), state(), models()
    tokens = vocabulary()(PROMPTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        seen = vision(pixel_values=Preprocess(SIDE, (SIDE, SIDE))(images)).last_hidden_state
        inputs = {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"]}
        x = text(**inputs, encoder_hidden_states=seen).last_hidden_state[:, 0]
    for place in (0, 2):
        x = linear(x, weights[f"mlp.layers.{place}.weight"], weights[f"mlp.layers.{place}.bias"])
    found = ImageReward(folder, heads=(HEADS, HEADS))(images, PROMPTS)
    torch.testing.assert_close(found, (x[:, 0] - MEAN) / STD, rtol=1e-4, atol=1e-5)
    assert found.std() > 1e-3
    tiny_rewards.check_images(partial(ImageReward, folder, heads=(HEADS, HEADS)), PROMPTS)


def test_wrong_weights_are_named(folder: Path, tmp_path: Path) -> None:
    def load(tensors: Any) -> None:
        torch.save(tensors, tmp_path / FILE)
        ImageReward(tmp_path, processor=str(folder), heads=(HEADS, HEADS))

    refuses(r"^imagereward: .* has no file ImageReward\.pt", ImageReward, tmp_path)
    refuses(r"have no tensor blip.visual_encoder\.\*", load, {"weight": torch.zeros(1)})
    whole = state()
    refuses("have no pos_embed of 3 dimensions", load, {**whole, "blip.visual_encoder.pos_embed": torch.zeros(4, 4)})
    refuses("hold more, which BLIP does not have", load, {**whole, "blip.text_encoder.more": torch.zeros(1)})
    refuses("do not fit", load, {**whole, "blip.visual_encoder.norm.bias": torch.zeros(3)})
    del whole["blip.visual_encoder.blocks.1.attn.proj.bias"]
    refuses("^imagereward: .* they lack encoder.layers.1.self_attn.projection.bias", load, whole)
