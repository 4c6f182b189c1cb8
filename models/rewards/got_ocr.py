"""OCR reward with GOT-OCR 2.0, a vision-language model that transcribes images on the model's device.

Source: arXiv 2409.01704 for the model; flow_grpo, arXiv 2505.05470, for the score.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fluvial.models.rewards.shared import loading
from fluvial.models.rewards.shared.text import score_texts, target_of
from fluvial.models.rewards.table import REWARD_MODELS

MODEL = REWARD_MODELS["got_ocr"]
# The model knows one request; the processor of transformers writes it in the same words.
REQUEST = (
    "<|im_start|>system\nYou should follow the instructions carefully and explain your answers in detail.<|im_end|>"
    "<|im_start|>user\n<img>{tokens}</img>\n OCR: <|im_end|><|im_start|>assistant\n"
)
IMAGE, END = "<imgpad>", "<|im_end|>"


class GotOcr:
    """1 - min(levenshtein(t, w), |w|) / |w|, with t the text that GOT-OCR reads and w the text that the prompt asks for.

    Blanks and case are ignored, and the score is 1 if w is a part of t. Of videos the mean over frames.

    Args:
        weights: folder of a GotOcr2ForConditionalGeneration of transformers, or id on the Hub.
        target: "quoted", the text in the prompt's first double quotes, or "prompt", the whole prompt.
        revision: commit on the Hub; by default that of the default weights.
        device: device of the model, e.g. "cuda:1"; by default that of the first images.
        dtype: "float32", "bfloat16" or "float16".
        batch: largest number of images per forward pass.
        frames: largest number of evenly spaced frames that a video is scored by.
        tokens: largest number of tokens that are read.

    Raises:
        ValueError: the weights are not there or are of another architecture, in one line.
    """

    def __init__(
        self,
        weights: str | Path = MODEL.weights,
        *,
        target: str = "quoted",
        revision: str | None = None,
        device: str | None = None,
        dtype: str = "float32",
        batch: int = 8,
        frames: int = 4,
        tokens: int = 64,
    ) -> None:
        from transformers import GotOcr2ForConditionalGeneration

        self.target, self.frames, self.batch, self.tokens = target_of("got_ocr", target), frames, batch, tokens
        self.device, self.dtype = loading.device_of("got_ocr", device), loading.dtype_of("got_ocr", dtype)
        commit = MODEL.commit(weights, revision)
        self.model: Any = loading.load_model("got_ocr", GotOcr2ForConditionalGeneration, weights, commit)
        self.model.to(device=self.device, dtype=self.dtype)
        place = loading.place_of("got_ocr", weights)
        self.tokenizer = loading.load_tokenizer("got_ocr", place, commit)
        self.preprocess = loading.load_preprocess("got_ocr", place, commit)
        # The vision tower halves its grid of patches twice.
        vision = self.model.config.vision_config
        self.request = REQUEST.format(tokens=IMAGE * (-(-(vision.image_size // vision.patch_size) // 4)) ** 2)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the score of each image, `[B]` in float32, without gradient.

        Args:
            images: images `[B, C, H, W]` or videos `[B, C, F, H, W]` in [0, 1].
            prompts: prompt of each image.

        Raises:
            ValueError: a prompt asks for no text.
        """
        return score_texts(self.read, self.target, images, prompts, self.frames)

    @torch.no_grad()
    def read(self, images: Tensor) -> list[str]:
        """Return the text in each of the images `[N, H, W, 3]` in uint8."""
        if self.device is None:
            self.device = images.device
            self.model.to(self.device)
        texts: list[str] = []
        end = self.tokenizer.convert_tokens_to_ids(END)
        for part in images.split(self.batch):
            pixels = self.preprocess(part.to(self.device).permute(0, 3, 1, 2) / 255).to(self.dtype)
            inputs = self.tokenizer([self.request] * len(part), return_tensors="pt").to(self.device)
            written = self.model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                pixel_values=pixels,
                do_sample=False,
                max_new_tokens=self.tokens,
                eos_token_id=end,
                pad_token_id=end,
            )
            answers = written[:, inputs["input_ids"].shape[1] :]
            texts += self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        return texts
