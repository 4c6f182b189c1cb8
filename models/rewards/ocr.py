"""OCR reward with RapidOCR: PP-OCR's detector and recogniser, which its package contains; runs on the CPU, offline.

Source: flow_grpo, arXiv 2505.05470, for the score.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

from fluvial.models.rewards.shared import loading
from fluvial.models.rewards.shared.loading import LoadingError
from fluvial.models.rewards.shared.text import TARGETS, TextReward
from fluvial.models.rewards.table import REWARD_MODELS

MODEL = REWARD_MODELS["ocr"]


@dataclass(eq=False, kw_only=True)
class Ocr(TextReward):
    """Score of the prompt's text in an image, read by RapidOCR; upside-down text is not recognised.

    Args:
        detect: whether to detect text in the image; False reads the whole image as one line, in a fraction of the time.
        side: shorter side, in pixels, that an image is enlarged to for detection; less is faster.
        confidence: least confidence of a line that counts, from 0 to 1.
        threads: number of CPU threads.
        width: least width, in pixels, of a line of 48 pixels' height, by padding; less is faster.

    Raises:
        ValueError: RapidOCR is not installed, or an option is wrong; in one line.
    """

    detect: bool = True
    side: int = 736
    confidence: float = 0.5
    threads: int = 1
    width: int = 320

    def __post_init__(self) -> None:
        try:
            loading.check_packages(MODEL)
        except LoadingError as error:
            raise LoadingError(f"ocr: {error}") from error
        if self.target not in TARGETS:
            raise LoadingError(f"ocr: target is {self.target!r}, expected one of {', '.join(TARGETS)}")
        if not 0 <= self.confidence <= 1:
            raise LoadingError(f"ocr: confidence is {self.confidence}, expected a number from 0 to 1")
        options = {
            "Global.log_level": "error",
            "Global.use_cls": False,
            "Global.text_score": self.confidence,
            "Det.limit_side_len": self.side,
            "Rec.rec_img_shape": [3, 48, self.width],
            "EngineConfig.onnxruntime.intra_op_num_threads": self.threads,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
        try:
            self.engine: Any = import_module("rapidocr").RapidOCR(params=options)
        except Exception as error:
            raise LoadingError(f"ocr: RapidOCR cannot be started: {loading.get_first_line(error)}") from error

    def read(self, images: Tensor) -> list[str]:
        """Return the text in each of the images `[N, H, W, 3]` in uint8, line by line from the top."""
        texts = []
        for image in images.cpu().numpy():
            result = self.engine(image[:, :, ::-1].copy(), use_det=self.detect, use_cls=False, use_rec=True)  # BGR
            texts.append("\n".join(result.txts or ()))
        return texts
