"""OCR reward with GOT-OCR 2.0, a vision-language model that transcribes images on the model's device.

Source: arXiv 2409.01704 for the model; flow_grpo, arXiv 2505.05470, for the score.
"""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fluvial.models.rewards.shared import loading
from fluvial.models.rewards.shared.loading import ModelReward
from fluvial.models.rewards.shared.text import TARGETS, TextReward
from fluvial.models.rewards.table import REWARD_MODELS

# The model was trained on this request; the processor of transformers builds the same text.
REQUEST = (
    "<|im_start|>system\nYou should follow the instructions carefully and explain your answers in detail.<|im_end|>"
    "<|im_start|>user\n<img>{tokens}</img>\n OCR: <|im_end|><|im_start|>assistant\n"
)
IMAGE, END = "<imgpad>", "<|im_end|>"


@dataclass(eq=False)
class GotOcr(TextReward, ModelReward):
    """Score of the prompt's text in an image, read by GOT-OCR.

    Args:
        weights: folder of a GotOcr2ForConditionalGeneration of transformers, or id on the Hub.
        tokens: largest number of tokens to read.
    """

    facts = REWARD_MODELS["got_ocr"]
    weights: str | Path = facts.weights
    _: KW_ONLY
    batch: int = 8
    tokens: int = 64

    def load(self, commit: str | None) -> Any:
        """Return the model; see `ModelReward.load`."""
        from transformers import GotOcr2ForConditionalGeneration

        loading.check_choice("target", self.target, TARGETS)
        model = loading.load_model(GotOcr2ForConditionalGeneration, self.weights, commit)
        source = loading.resolve_weights(self.weights)
        self.tokenizer = loading.load_tokenizer(source, commit)
        self.preprocess = loading.load_preprocess(source, commit)
        # The vision tower halves its grid of patches twice.
        vision = model.config.vision_config
        self.request = REQUEST.format(tokens=IMAGE * (-(-(vision.image_size // vision.patch_size) // 4)) ** 2)
        return model

    @torch.no_grad()
    def read(self, images: Tensor) -> list[str]:
        """Return the text in each of the images `[N, H, W, 3]` in uint8."""
        device, texts = self.place_model(images), list[str]()
        end = self.tokenizer.convert_tokens_to_ids(END)
        for part in images.split(self.batch):
            pixels = self.preprocess(part.to(device).permute(0, 3, 1, 2) / 255).to(self.precision)
            inputs = self.tokenizer([self.request] * len(part), return_tensors="pt").to(device)
            generated = self.model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                pixel_values=pixels,
                do_sample=False,
                max_new_tokens=self.tokens,
                eos_token_id=end,
                pad_token_id=end,
            )
            answers = generated[:, inputs["input_ids"].shape[1] :]
            texts += self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        return texts
