"""Processors of text and images without torchvision, which transformers' processors need for videos."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fluvial.models.pipelines.folder import read_entries

# Processors of a tokenizer, an image processor, and a video processor that no edit of images uses.
WITHOUT_VIDEO = frozenset({"Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor"})
# A processor that FLUX.2 dev's pipeline (see its docstring) calls with text alone: its tokenizer can replace it.
OF_TEXT = frozenset({"PixtralProcessor"})


class MissingVideoProcessor:
    """Placeholder of a video processor; every use raises."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError("a video in a prompt needs torchvision, which is not installed: pip install torchvision")


def build_processor_without_video(image_processor: Any, tokenizer: Any, kind: str = "Qwen2VLProcessor") -> Any:
    """Return a processor of a transformers class that processes text and images, but no videos."""
    import transformers

    parent = getattr(transformers, kind)

    class WithoutVideo(parent):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.image_processor, self.tokenizer, self.chat_template = image_processor, tokenizer, tokenizer.chat_template
            self.video_processor = MissingVideoProcessor()
            self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
            self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids([self.image_token, self.video_token])
            self.image_ids, self.video_ids = [self.image_token_id], [self.video_token_id]

        def save_pretrained(self, folder: Any, **options: Any) -> Any:
            image_processor.save_pretrained(folder)
            return tokenizer.save_pretrained(folder)

    WithoutVideo.__name__ = WithoutVideo.__qualname__ = kind
    return WithoutVideo()


def read_processors(folder: Path) -> dict[str, Any]:
    """Return the processors of a pipeline's folder that transformers cannot read without torchvision, by part.

    Images are scaled by PIL rather than torchvision, which rounds differently. None stands for a processor called with text
    alone: diffusers rejects objects of another class when it opens a pipeline, so `add_tokenizers` sets the tokenizer later.
    """
    if find_spec("torchvision") is not None:
        return {}
    parts = read_entries(folder)
    videos = {part: _read_processor(folder / part, kind) for part, kind in parts.items() if kind in WITHOUT_VIDEO}
    return videos | {part: None for part, kind in parts.items() if kind in OF_TEXT}


def add_tokenizers(pipe: Any, folder: Path, opened: Mapping[str, Any]) -> None:
    """Set a pipeline's tokenizers in place of the processors for which `read_processors` returns None.

    Args:
        pipe: pipeline of diffusers.
        folder: folder of the pipeline.
        opened: parts that the caller replaced; None for a part that it left out.
    """
    from transformers import AutoTokenizer

    parts = read_entries(folder).items() if find_spec("torchvision") is None else ()
    for part, kind in parts:
        if kind in OF_TEXT and part not in opened:
            pipe.register_modules(**{part: AutoTokenizer.from_pretrained(folder / part, local_files_only=True)})


def _read_processor(folder: Path, kind: str) -> Any:
    from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

    options = {"local_files_only": True}
    images = Qwen2VLImageProcessorPil.from_pretrained(folder, **options)
    return build_processor_without_video(images, AutoTokenizer.from_pretrained(folder, **options), kind)
