"""HPSv2.1: weights of open_clip, converted, against the model that they are published from."""

import html
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import ftfy
import pytest
import torch
from helpers import tiny_rewards, wheels
from helpers.marks import Patch
from helpers.refusals import refuses

from fluvial.models.rewards import table
from fluvial.models.rewards.hpsv2 import FILE, Hpsv2, clean_prompt
from fluvial.models.rewards.shared.pixels import CLIP_MEAN, CLIP_STD, pad_to_square, resize
from fluvial.models.tiny.encoders import build_clip_tokenizer

PROMPTS = ["a red cat", "two dogs", "a red cat"]
TEXT, HEADS, SIDE, LENGTH = 20, 2, 30, 24


def vocabulary() -> Any:
    from transformers import CLIPTokenizer

    words = [word for word in sorted(build_clip_tokenizer().get_vocab()) if not word.startswith("<|")]
    vocab = {word: i for i, word in enumerate([*words, "<|startoftext|>", "<|endoftext|>"])}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=LENGTH)


# Names of open_clip, by beginnings and parts of transformers' names.
NAMES = {
    "vision_model.embeddings.class_embedding": "visual.class_embedding",
    "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
    "vision_model.embeddings.patch_embedding": "visual.conv1",
    "vision_model.pre_layrnorm": "visual.ln_pre",
    "vision_model.post_layernorm": "visual.ln_post",
    "vision_model.encoder.layers": "visual.transformer.resblocks",
    "text_model.embeddings.token_embedding": "token_embedding",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.final_layer_norm": "ln_final",
    "text_model.encoder.layers": "transformer.resblocks",
    "visual_projection.weight": "visual.proj",
    "text_projection.weight": "text_projection",
    "layer_norm": "ln_",
    "self_attn.q_proj.": "attn.in_proj_",
    "self_attn": "attn",
    "fc1": "c_fc",
    "fc2": "c_proj",
}


def model() -> Any:
    made = tiny_rewards.clip(act="gelu")
    made.text_model.eos_token_id = len(vocabulary()) - 1  # open_clip takes the output at the largest token
    return made


def state() -> dict[str, torch.Tensor]:
    held, found = model().state_dict(), {}
    for name, value in held.items():
        if ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:
            value = torch.cat([held[name.replace("q_proj", f"{letter}_proj")] for letter in "qkv"])
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        found[name] = value.T if name in ("visual.proj", "text_projection") else value
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("hpsv2")
    mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
    torch.save({"state_dict": {**state(), "attn_mask": mask}}, place / FILE)
    vocabulary().save_pretrained(place)
    return place


def test_scores_are_those_of_open_clip(folder: Path) -> None:
    """Texts padded with 0, as open_clip does; the conversion drops, transposes and splits tensors."""
    images, tokenizer = tiny_rewards.images(), vocabulary()
    texts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    ids = torch.tensor([text + [0] * (LENGTH - len(text)) for text in texts])
    shift, scale = (torch.tensor(values)[:, None, None] for values in (CLIP_MEAN, CLIP_STD))
    with torch.no_grad():
        output = model()(input_ids=ids, pixel_values=(pad_to_square(images, SIDE) - shift) / scale)
    found = Hpsv2(folder, heads=(HEADS, HEADS))(images, PROMPTS)
    torch.testing.assert_close(found, (output.image_embeds * output.text_embeds).sum(-1), rtol=1e-4, atol=1e-5)
    assert found.std() > 1e-3
    tiny_rewards.check_images(partial(Hpsv2, folder, heads=(HEADS, HEADS)), PROMPTS)


def test_the_resize_is_the_antialiased_cubic() -> None:
    """That of PIL, whose bits `resize` has, but for the rounding and clipping."""
    image = 0.25 + 0.5 * tiny_rewards.images(1, 41, 53).double()
    wanted = resize(255 * image, (23, 30)) / 255  # round(41 * 30 / 53) = 23
    found = pad_to_square(image, 30)
    torch.testing.assert_close(found[:, :, 3:26], wanted, rtol=0, atol=1.1 / 255)
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
    def load(tensors: Any) -> None:
        torch.save(tensors, tmp_path / FILE)
        Hpsv2(tmp_path, processor=str(folder), heads=(HEADS, HEADS))

    refuses(f"^hpsv2: the folder {tmp_path} has no file HPS_v2", Hpsv2, tmp_path)
    refuses("expected a state dict of open_clip", load, {"weight": torch.zeros(1)})
    refuses("expected tensors by name", load, [1, 2])
    whole = state()
    refuses("visual.more, which a CLIP model does not have", load, {**whole, "visual.more": torch.zeros(1)})
    del whole["visual.ln_post.bias"]
    refuses("^hpsv2: .* they lack vision_model.post_layernorm.bias", load, whole)
    refuses("do not fit together", load, {**whole, "visual.ln_post.bias": torch.zeros(3)})
    refuses("tokens and the weights 7", load, {**state(), "token_embedding.weight": torch.zeros(7, TEXT)})


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
