"""Processors of text and images without torchvision, which transformers' own processors need for videos."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fluvial.models.pipelines.folder import entries

# Processors that are the tokenizer, an image processor, and a processor of videos that no edit of images uses.
WITHOUT_VIDEO = frozenset({"Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor"})
# A processor that FLUX.2 dev's pipeline (see its docstring) calls with text alone, as the tokenizer can be.
OF_TEXT = frozenset({"PixtralProcessor"})


class NoVideos:
    """In place of a processor of videos."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError("a video in a prompt needs torchvision, which is not installed: pip install torchvision")


def processor_without_video(image_processor: Any, tokenizer: Any, kind: str = "Qwen2VLProcessor") -> Any:
    """Return a processor of transformers of the given class that processes text and images, and no videos."""
    import transformers

    parent = getattr(transformers, kind)

    class WithoutVideo(parent):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.image_processor, self.tokenizer, self.chat_template = image_processor, tokenizer, tokenizer.chat_template
            self.video_processor = NoVideos()
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

    The images are scaled by PIL rather than torchvision, which rounds differently. None stands for one of text alone:
    diffusers takes no object of another class when it opens the pipeline, so that `add_tokenizers` gives it the tokenizer.
    """
    if find_spec("torchvision") is not None:
        return {}
    parts = entries(folder)
    videos = {part: _read(folder / part, kind) for part, kind in parts.items() if kind in WITHOUT_VIDEO}
    return videos | {part: None for part, kind in parts.items() if kind in OF_TEXT}


def add_tokenizers(pipe: Any, folder: Path, opened: Mapping[str, Any]) -> None:
    """Give a pipeline the tokenizers in place of the processors that `read_processors` has left out.

    Args:
        pipe: pipeline of diffusers.
        folder: folder that it was opened from.
        opened: parts that it was opened with; those that the caller has left out, too, are None.
    """
    from transformers import AutoTokenizer

    left_out = entries(folder).items() if find_spec("torchvision") is None else ()
    for part, kind in left_out:
        if kind in OF_TEXT and part not in opened:
            pipe.register_modules(**{part: AutoTokenizer.from_pretrained(folder / part, local_files_only=True)})


def _read(folder: Path, kind: str) -> Any:
    from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

    options = {"local_files_only": True}
    images = Qwen2VLImageProcessorPil.from_pretrained(folder, **options)
    return processor_without_video(images, AutoTokenizer.from_pretrained(folder, **options), kind)
