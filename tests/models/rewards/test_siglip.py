"""SigLIP similarity on a tiny model, against the logits of transformers."""

from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import tiny_rewards
from helpers.refusals import refuses

from fluvial.models.rewards.clip import Siglip
from fluvial.models.rewards.shared.pixels import Preprocess
from fluvial.models.tiny.encoders import build_t5_tokenizer

PROMPTS = ["a red cat", "two dogs", "a red cat"]
HALF = (0.5, 0.5, 0.5)
LENGTH = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import SiglipConfig, SiglipModel

    place = tmp_path_factory.mktemp("siglip")
    common = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "hidden_size": 16}
    text = {**common, "vocab_size": len(build_t5_tokenizer()), "max_position_embeddings": LENGTH}
    config = SiglipConfig(vision_config={**common, "image_size": 30, "patch_size": 10}, text_config=text)
    tiny_rewards.randomise(SiglipModel(config)).save_pretrained(place)
    build_t5_tokenizer(LENGTH).save_pretrained(place)
    settings = {**tiny_rewards.clip_settings(), "size": {"height": 30, "width": 30}, "do_center_crop": None}
    tiny_rewards.write_settings(place, {**settings, "image_mean": HALF, "image_std": HALF})
    return place


def test_scores_are_the_formula(folder: Path) -> None:
    """The cosine, the logit and its sigmoid; the text is lowered and padded as in training, the image is squeezed."""
    from transformers import AutoTokenizer, SiglipModel

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPTS, padding="max_length", max_length=LENGTH, return_tensors="pt")["input_ids"]
    pixels = Preprocess((30, 30), None, HALF, HALF)(tiny_rewards.images())
    with torch.no_grad():
        output = SiglipModel.from_pretrained(folder)(input_ids=ids, pixel_values=pixels)
    cosine, logit = (output.image_embeds * output.text_embeds).sum(-1), output.logits_per_image.diag()
    for form, wanted in (("cosine", cosine), ("logit", logit), ("probability", logit.sigmoid())):
        scores = Siglip(folder, form=form)(tiny_rewards.images(), [prompt.title() for prompt in PROMPTS])
        torch.testing.assert_close(scores, wanted, rtol=1e-4, atol=1e-5)
    assert cosine.std() > 1e-3
    tiny_rewards.check_images(partial(Siglip, folder, form="probability"), PROMPTS)
    refuses("form is 'odd', expected one of cosine, logit, probability", Siglip, folder, form="odd")
