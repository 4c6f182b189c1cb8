"""GOT-OCR on a tiny model: what it reads is the greedy transcription, computed token by token."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_rewards
from helpers.refusals import refuses
from PIL import Image

from fluvial.models.rewards.got_ocr import END, GotOcr

SPECIAL = ["<|endoftext|>", "<|im_start|>", END, "<img>", "</img>", "<imgpad>"]
SIDE, TOKENS = 128, 6


def vocabulary() -> Any:
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    return Qwen2Tokenizer(vocab=letters, merges=[], additional_special_tokens=SPECIAL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import GotOcr2Config, GotOcr2ForConditionalGeneration

    place = tmp_path_factory.mktemp("got")
    tokenizer = vocabulary()
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    seen = {"output_channels": 8, "image_size": SIDE, "window_size": 4, "global_attn_indexes": [1], "mlp_dim": 20}
    text = {"model_type": "qwen2", "vocab_size": len(tokenizer), "intermediate_size": 20, "num_key_value_heads": 2}
    config = GotOcr2Config(
        image_token_index=tokenizer.convert_tokens_to_ids("<imgpad>"),
        vision_config={**small, **seen, "patch_size": 16},
        text_config={**small, **text, "max_position_embeddings": 512, "tie_word_embeddings": True},
    )
    tiny_rewards.randomise(GotOcr2ForConditionalGeneration(config), scale=0.5).save_pretrained(place)
    tokenizer.save_pretrained(place)
    settings = {**tiny_rewards.clip_settings(), "size": {"height": SIDE, "width": SIDE}, "do_center_crop": None}
    tiny_rewards.write_settings(place, settings)
    return place


def as_uint8(images: torch.Tensor) -> torch.Tensor:
    return (images * 255).round().byte().permute(0, 2, 3, 1)


def test_the_text_is_the_greedy_transcription(folder: Path) -> None:
    """With the published processor on PIL images, one token at a time and without a cache."""
    from transformers import GotOcr2ForConditionalGeneration
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    reward = GotOcr(folder, tokens=TOKENS, batch=2)
    images = as_uint8(tiny_rewards.images(3, 60, 90))
    model = GotOcr2ForConditionalGeneration.from_pretrained(folder).eval()
    processor = GotOcr2ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    end = vocabulary().convert_tokens_to_ids(END)
    expected = []
    for image in images:
        pixels = processor(Image.fromarray(image.numpy()), return_tensors="pt")["pixel_values"].float()
        ids = torch.tensor([vocabulary()(reward.request)["input_ids"]])
        written: list[int] = []
        while len(written) < TOKENS and (not written or written[-1] != end):
            with torch.no_grad():
                written.append(int(model(input_ids=ids, pixel_values=pixels, use_cache=False).logits[0, -1].argmax()))
            ids = torch.cat([ids, torch.tensor([[written[-1]]])], 1)
        expected.append(vocabulary().decode(written, skip_special_tokens=True))
    found = reward.read(images)
    assert found == expected
    assert len(set(found)) > 1


def test_the_request_is_the_one_of_the_published_processor(folder: Path) -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.got_ocr2.processing_got_ocr2 import GotOcr2Processor

    image_processor = GotOcr2ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    processor = GotOcr2Processor(image_processor=image_processor, tokenizer=vocabulary())
    reward = GotOcr(folder)
    image = Image.new("RGB", (40, 40))
    ids = processor(image, num_image_tokens=4, return_tensors="pt")["input_ids"][0].tolist()
    assert vocabulary()(reward.request)["input_ids"] == ids


def test_scores_compare_what_is_read_with_the_quotes(folder: Path) -> None:
    reward = GotOcr(folder, tokens=TOKENS)
    images = tiny_rewards.images(2, 60, 90)
    first, second = reward.read(as_uint8(images))
    prompts = [f'a sign "{first}"', 'a sign "zzzzzzzzzzzz"']
    if first.strip() and '"' not in first:
        assert float(reward(images, prompts)[0]) == 1.0
    assert 0 <= float(reward(images, prompts[1:] * 2)[1]) < 1
    assert second is not None
    refuses("has no text in double quotes", reward, images, ["a sign", "a sign"])
