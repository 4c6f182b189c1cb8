"""SigLIP similarity on a tiny model, against its formula in numpy."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import numpy_towers as nt
from helpers import tiny_rewards
from helpers.numpy_towers import Array
from helpers.refusals import refuses
from scipy.special import expit

from fluvial.models.rewards.clip import Siglip
from fluvial.models.rewards.shared.pixels import Preprocess
from fluvial.models.tiny.encoders import t5_tokenizer

PROMPTS = ["a red cat", "two dogs", "a red cat"]
HALF = (0.5, 0.5, 0.5)
LENGTH = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import SiglipConfig, SiglipModel

    place = tmp_path_factory.mktemp("siglip")
    common = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "hidden_size": 16}
    text = {**common, "vocab_size": len(t5_tokenizer()), "max_position_embeddings": LENGTH}
    config = SiglipConfig(vision_config={**common, "image_size": 30, "patch_size": 10}, text_config=text)
    tiny_rewards.randomise(SiglipModel(config)).save_pretrained(place)
    t5_tokenizer(LENGTH).save_pretrained(place)
    settings = {**tiny_rewards.clip_settings(), "size": {"height": 30, "width": 30}, "do_center_crop": None}
    tiny_rewards.write_settings(place, {**settings, "image_mean": HALF, "image_std": HALF})
    return place


def cosines(folder: Path) -> tuple[Array, nt.Weights]:
    from transformers import AutoTokenizer, SiglipModel

    state = nt.arrays(SiglipModel.from_pretrained(folder).state_dict())
    options: dict[str, Any] = {"heads": 2, "act": nt.tanh_gelu, "eps": 1e-6}
    w = nt.below(state, "vision_model.")
    x = nt.patches(
        Preprocess((30, 30), None, HALF, HALF)(tiny_rewards.images()).double().numpy(),
        w["embeddings.patch_embedding.weight"],
    )
    x = x + w["embeddings.patch_embedding.bias"] + w["embeddings.position_embedding.weight"]
    for i in range(2):
        x = nt.block(x, nt.below(w, f"encoder.layers.{i}."), **options)
    x = nt.norm(x, w, "post_layernorm", 1e-6)
    h = nt.below(w, "head.")
    matrices, biases = np.split(h["attention.in_proj_weight"], 3), np.split(h["attention.in_proj_bias"], 3)
    inputs = (np.broadcast_to(h["probe"], (len(x), 1, 16)), x, x)
    q, k, v = (y @ matrix.T + bias for y, matrix, bias in zip(inputs, matrices, biases, strict=True))
    pooled = nt.linear(nt.attend(q, k, v, 2), h, "attention.out_proj")
    pooled = pooled + nt.linear(nt.tanh_gelu(nt.linear(nt.norm(pooled, h, "layernorm", 1e-6), h, "mlp.fc1")), h, "mlp.fc2")

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = np.array([tokenizer(prompt, padding="max_length", max_length=LENGTH)["input_ids"] for prompt in PROMPTS])
    t = nt.below(state, "text_model.")
    y = t["embeddings.token_embedding.weight"][ids] + t["embeddings.position_embedding.weight"]
    for i in range(2):
        y = nt.block(y, nt.below(t, f"encoder.layers.{i}."), **options)
    text = nt.linear(nt.norm(y, t, "final_layer_norm", 1e-6)[:, -1], t, "head")
    return (nt.unit(pooled[:, 0]) * nt.unit(text)).sum(-1), state


def test_scores_are_the_formula(folder: Path) -> None:
    """The cosine, the logit and its sigmoid; the text is padded to the length of training, the image is squeezed."""
    found, state = cosines(folder)
    logit = np.exp(state["logit_scale"]) * found + state["logit_bias"]
    for form, wanted in (("cosine", found), ("logit", logit), ("probability", expit(logit))):
        scores = Siglip(folder, form=form)(tiny_rewards.images(), PROMPTS)
        np.testing.assert_allclose(scores.numpy(), wanted, rtol=1e-4, atol=1e-5)
    assert found.std() > 1e-3
    tiny_rewards.check_images(partial(Siglip, folder, form="probability"), PROMPTS)
    refuses("form is 'odd', expected one of cosine, logit, probability", Siglip, folder, form="odd")
