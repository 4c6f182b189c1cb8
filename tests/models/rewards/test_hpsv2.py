"""HPSv2.1: weights of open_clip, converted, against open_clip's own mathematics in numpy."""

import html
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import ftfy
import numpy as np
import pytest
import torch
from helpers import numpy_towers as nt
from helpers import tiny_rewards, wheels
from helpers.marks import Patch
from helpers.numpy_towers import Array
from helpers.refusals import refuses

from fluvial.core.random import key, normal
from fluvial.models.rewards import table
from fluvial.models.rewards.hpsv2 import FILE, Hpsv2, clean_prompt
from fluvial.models.rewards.shared.pixels import CLIP_MEAN, CLIP_STD, pad_to_square
from fluvial.models.tiny.encoders import clip_tokenizer

PROMPTS = ["a red cat", "two dogs", "a red cat"]
WIDTH, TEXT, OUT, LAYERS, HEADS, PATCH, SIDE, LENGTH = 16, 20, 12, 2, 2, 10, 30, 24


def vocabulary() -> Any:
    from transformers import CLIPTokenizer

    words = [word for word in sorted(clip_tokenizer().get_vocab()) if not word.startswith("<|")]
    vocab = {word: i for i, word in enumerate([*words, "<|startoftext|>", "<|endoftext|>"])}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=LENGTH)


def state() -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "logit_scale": (),
        "positional_embedding": (LENGTH, TEXT),
        "text_projection": (TEXT, OUT),
        "token_embedding.weight": (len(vocabulary()), TEXT),
        "visual.class_embedding": (WIDTH,),
        "visual.positional_embedding": (1 + (SIDE // PATCH) ** 2, WIDTH),
        "visual.proj": (WIDTH, OUT),
        "visual.conv1.weight": (WIDTH, 3, PATCH, PATCH),
    }
    widths = {"visual.ln_pre": WIDTH, "visual.ln_post": WIDTH, "ln_final": TEXT}
    for tower, width in (("visual.", WIDTH), ("", TEXT)):
        for i in range(LAYERS):
            at = f"{tower}transformer.resblocks.{i}."
            shapes |= {f"{at}attn.in_proj_weight": (3 * width, width), f"{at}attn.in_proj_bias": (3 * width,)}
            for name, rows, columns in (("attn.out_proj", width, width), ("mlp.c_fc", 24, width), ("mlp.c_proj", width, 24)):
                shapes |= {f"{at}{name}.weight": (rows, columns), f"{at}{name}.bias": (rows,)}
            widths |= {f"{at}ln_1": width, f"{at}ln_2": width}
    for name, width in widths.items():
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    drawn = {name: 0.3 * normal(key(number), shape) for number, (name, shape) in enumerate(shapes.items())}
    return {
        name: value + 1 if f"{name}".endswith(("ln_1.weight", "ln_2.weight", "ln_final.weight")) else value
        for name, value in drawn.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("hpsv2")
    mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
    torch.save({"state_dict": {**state(), "attn_mask": mask}}, place / FILE)
    vocabulary().save_pretrained(place)
    return place


def resblock(x: Array, w: nt.Weights, allowed: Array | None = None) -> Array:
    y = nt.norm(x, w, "ln_1")
    q, k, v = np.split(y @ w["attn.in_proj_weight"].T + w["attn.in_proj_bias"], 3, axis=-1)
    x = x + nt.linear(nt.attend(q, k, v, HEADS, allowed), w, "attn.out_proj")
    return x + nt.linear(nt.gelu(nt.linear(nt.norm(x, w, "ln_2"), w, "mlp.c_fc")), w, "mlp.c_proj")


def expected(pixels: Array, ids: Array) -> Array:
    w = nt.arrays(state())
    x = nt.patches(pixels, w["visual.conv1.weight"])
    first = np.broadcast_to(w["visual.class_embedding"], (len(x), 1, WIDTH))
    x = nt.norm(np.concatenate([first, x], 1) + w["visual.positional_embedding"], w, "visual.ln_pre")
    y = w["token_embedding.weight"][ids] + w["positional_embedding"]
    for i in range(LAYERS):
        x = resblock(x, nt.below(w, f"visual.transformer.resblocks.{i}."))
        y = resblock(y, nt.below(w, f"transformer.resblocks.{i}."), np.tril(np.ones((LENGTH, LENGTH), dtype=bool)))
    image = nt.norm(x[:, 0], w, "visual.ln_post") @ w["visual.proj"]
    text = nt.norm(y, w, "ln_final")[np.arange(len(ids)), ids.argmax(1)] @ w["text_projection"]
    return (nt.unit(image) * nt.unit(text)).sum(-1)


def test_scores_are_those_of_open_clip(folder: Path) -> None:
    """Texts padded with 0, as open_clip does; the conversion drops, transposes and splits tensors."""
    images, tokenizer = tiny_rewards.images(), vocabulary()
    texts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    ids = np.array([text + [0] * (LENGTH - len(text)) for text in texts])
    padded = pad_to_square(images.double(), SIDE).numpy()
    pixels = (padded - np.array(CLIP_MEAN)[:, None, None]) / np.array(CLIP_STD)[:, None, None]
    found = Hpsv2(folder, heads=(HEADS, HEADS))(images, PROMPTS)
    np.testing.assert_allclose(found.numpy(), expected(pixels, ids), rtol=1e-4, atol=1e-5)
    assert found.std() > 1e-3
    tiny_rewards.check_images(partial(Hpsv2, folder, heads=(HEADS, HEADS)), PROMPTS)


def test_the_resize_is_the_antialiased_cubic(folder: Path) -> None:
    """As torchvision resizes tensors: Keys' cubic with a = -1/2, stretched where the image shrinks, without clipping."""

    def matrix(have: int, wanted: int) -> Array:
        scale = have / wanted
        stretch = max(scale, 1.0)
        rows = np.zeros((wanted, have))
        for i in range(wanted):
            centre = (i + 0.5) * scale
            for j in range(max(int(centre - 2 * stretch + 0.5), 0), min(int(centre + 2 * stretch + 0.5), have)):
                x = abs(j - centre + 0.5) / stretch
                rows[i, j] = (1.5 * x - 2.5) * x * x + 1 if x < 1 else ((-0.5 * x + 2.5) * x - 4) * x + 2 if x < 2 else 0
        return rows / rows.sum(1, keepdims=True)

    image = tiny_rewards.images(1, 41, 53).double()
    wanted = matrix(41, 23) @ image.numpy() @ matrix(53, 30).T  # round(41 * 30 / 53) = 23
    found = pad_to_square(image, 30).numpy()
    np.testing.assert_allclose(found[:, :, 3:26], wanted, atol=1e-6)
    assert abs(found[:, :, :3]).max() == abs(found[:, :, 26:]).max() == 0


@pytest.mark.parametrize(
    "prompt",
    [
        "The mayor’s “grand” plan — and a … pause",
        "black &amp; white, 3 &lt; 4, &amp;quot;twice&amp;quot;",
        "3 < 4, &amp;quot;twice&amp;quot;",  # ftfy leaves names of HTML alone beside a <
        "  two\t\nlines\u00a0 and\u3000blanks ",
        "cafÃ© crÃ¨me",
        "ﬁnal ＦＵＬＬ width, naïve",
        "a red cat",
        "",
    ],
)
def test_prompts_are_cleaned_as_the_original_does(prompt: str, folder: Path) -> None:
    file = wheels.install("hpsv2", "1.2.0") / "hpsv2" / "src" / "open_clip" / "tokenizer.py"
    package = wheels.definitions(file, "basic_clean", "whitespace_clean", ftfy=ftfy, html=html, re=import_module("regex"))
    wanted = package["whitespace_clean"](package["basic_clean"](prompt))
    assert clean_prompt(prompt) == wanted
    reward = Hpsv2(folder, heads=(HEADS, HEADS))
    ids = reward.tokenize([prompt])["input_ids"]
    assert torch.equal(ids, super(Hpsv2, reward).tokenize([wanted])["input_ids"])


def test_a_missing_package_is_one_line(folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    refuses(r"^hpsv2: ftfy is not installed: pip install 'fluvial\[rewards\]'$", Hpsv2, folder)


def test_wrong_weights_are_named(folder: Path, tmp_path: Path) -> None:
    def message(tensors: Any) -> str:
        torch.save(tensors, tmp_path / FILE)
        with pytest.raises(ValueError, match="hpsv2: ") as caught:
            Hpsv2(tmp_path, processor=str(folder), heads=(HEADS, HEADS))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    refuses(f"the folder {tmp_path} has no file HPS_v2", Hpsv2, tmp_path)
    assert "expected a state dict of open_clip" in message({"weight": torch.zeros(1)})
    assert "expected tensors by name" in message([1, 2])
    whole = state()
    assert "visual.more, which a CLIP model does not have" in message({**whole, "visual.more": torch.zeros(1)})
    del whole["visual.ln_post.bias"]
    assert "they lack vision_model.post_layernorm.bias" in message(whole)
    assert "do not fit together" in message({**whole, "visual.ln_post.bias": torch.zeros(3)})
    assert "tokens and the weights 7" in message({**state(), "token_embedding.weight": torch.zeros(7, TEXT)})


def test_heads_of_the_published_model_are_known() -> None:
    from fluvial.models.rewards.hpsv2 import infer_config

    shapes: dict[str, tuple[int, ...]] = {
        "logit_scale": (),
        "visual.conv1.weight": (1280, 3, 14, 14),
        "token_embedding.weight": (49408, 1024),
        "visual.proj": (1280, 1024),
        "visual.positional_embedding": (257, 1280),
        "positional_embedding": (77, 1024),
        **{f"visual.transformer.resblocks.{layer}.mlp.c_fc.weight": (5120, 1280) for layer in (0, 31)},
        **{f"transformer.resblocks.{layer}.mlp.c_fc.weight": (4096, 1024) for layer in (0, 23)},
    }
    config = infer_config({name: torch.empty(shape, device="meta") for name, shape in shapes.items()}, None)
    vision, text = config.vision_config, config.text_config
    found = vision.num_attention_heads, vision.num_hidden_layers, vision.image_size, vision.hidden_act
    assert found == (16, 32, 224, "gelu")
    found = text.num_attention_heads, text.num_hidden_layers, text.intermediate_size, text.eos_token_id
    assert found == (16, 24, 4096, 49407)
