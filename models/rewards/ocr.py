"""OCR reward with RapidOCR: PP-OCR's detector and recogniser, which come in its package and run on the CPU, offline.

Source: flow_grpo, arXiv 2505.05470, for the score.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from torch import Tensor

from fluvial.models.rewards.shared import loading
from fluvial.models.rewards.shared.loading import LoadingError
from fluvial.models.rewards.shared.text import score_texts, target_of
from fluvial.models.rewards.table import REWARD_MODELS

MODEL = REWARD_MODELS["ocr"]


class Ocr:
    """1 - min(levenshtein(t, w), |w|) / |w|, with t the text that RapidOCR reads and w the text that the prompt asks for.

    Blanks and case are ignored, and the score is 1 if w is a part of t. Of videos the mean over frames. Text that stands on
    its head is not turned round before it is read.

    Args:
        target: "quoted", the text in the prompt's first double quotes, or "prompt", the whole prompt.
        detect: whether to look for text in the image; False reads the whole image as one line, in a fraction of the time.
        side: shorter side, in pixels, that an image is enlarged to before text is looked for; less is faster.
        confidence: least confidence of a line that counts, from 0 to 1.
        frames: largest number of evenly spaced frames that a video is scored by.
        threads: number of CPU threads.
        width: least width, in pixels, that a line of 48 pixels' height is padded to before it is read; less is faster.

    Raises:
        ValueError: RapidOCR is not installed, or an option is wrong; in one line.
    """

    def __init__(
        self,
        *,
        target: str = "quoted",
        detect: bool = True,
        side: int = 736,
        confidence: float = 0.5,
        frames: int = 4,
        threads: int = 1,
        width: int = 320,
    ) -> None:
        self.target, self.frames, self.detect = target_of("ocr", target), frames, detect
        if missing := MODEL.missing():
            raise LoadingError(f"ocr: {', '.join(missing)} is not installed: pip install '{MODEL.install}'")
        if not 0 <= confidence <= 1:
            raise LoadingError(f"ocr: confidence is {confidence}, expected a number from 0 to 1")
        options = {
            "Global.log_level": "error",
            "Global.use_cls": False,
            "Global.text_score": confidence,
            "Det.limit_side_len": side,
            "Rec.rec_img_shape": [3, 48, width],
            "EngineConfig.onnxruntime.intra_op_num_threads": threads,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
        try:
            self.engine: Any = import_module("rapidocr").RapidOCR(params=options)
        except Exception as error:
            raise LoadingError(f"ocr: RapidOCR cannot be started: {loading.first_line(error)}") from error

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the score of each image, `[B]` in float32, without gradient.

        Args:
            images: images `[B, C, H, W]` or videos `[B, C, F, H, W]` in [0, 1].
            prompts: prompt of each image.

        Raises:
            ValueError: a prompt asks for no text.
        """
        return score_texts(self.read, self.target, images, prompts, self.frames)

    def read(self, images: Tensor) -> list[str]:
        """Return the text in each of the images `[N, H, W, 3]` in uint8, line by line from the top."""
        texts = []
        for image in images.cpu().numpy():
            found = self.engine(image[:, :, ::-1].copy(), use_det=self.detect, use_cls=False, use_rec=True)  # BGR
            texts.append("\n".join(found.txts or ()))
        return texts
