"""Parts of a pipeline built from their settings alone, for a device without values.

A dry run opens pipelines this way: they take the memory of the real parts, and only settings are read.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fluvial.models.pipelines.folder import read_settings
from fluvial.models.quantised import Base, quantise_linear

MOST_TOKENS = 2048  # tokens of a text with an image


def build_network(
    library: Any, kind: str, folder: Path, *, dtype: torch.dtype, device: torch.device, base: Base | None = None
) -> nn.Module:
    """Return a frozen network of diffusers or transformers in the dtype on the device, without values.

    Its linear layers are quantised to the format `base`, if given.
    """
    network = getattr(library, kind)
    with torch.device("meta"):
        if library.__name__ == "diffusers":
            module = network.from_config(read_settings(folder / "config.json"))
        else:
            module = network._from_config(network.config_class.from_pretrained(folder))
    module = nn.Module.to(module, dtype).requires_grad_(False).eval()  # diffusers' `to` warns of layers kept in float32
    if base is not None:
        quantise_linear(module, base, dtype)
    return module._apply(lambda tensor: torch.empty_like(tensor, device=device))


class PlaceholderTokenizer:
    """Tokenizer that gives every prompt as many tokens as the text encoder takes, so that memory is not underestimated.

    Args:
        tokens: number of tokens if the caller does not set one.
    """

    def __init__(self, tokens: int = 77) -> None:
        self.model_max_length = tokens
        self.padding_side, self.added_tokens_encoder = "right", dict[str, int]()

    def __call__(
        self, text: str | Sequence[str], *_: Any, max_length: int | None = None, return_tensors: str | None = None, **__: Any
    ) -> Any:
        """Return ids and a mask of ones, as a tokenizer of transformers does."""
        from transformers import BatchEncoding

        if return_tensors is None:
            return BatchEncoding({"input_ids": [0] * 8})
        shape = (1 if isinstance(text, str) else len(text), max_length or self.model_max_length)
        ids = torch.zeros(shape, dtype=torch.int64)
        return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def tokenize(self, text: str) -> list[str]:
        """Return the words of a text."""
        return text.split()

    def batch_decode(self, ids: Tensor, **_: Any) -> list[str]:
        """Return empty texts."""
        return [""] * len(ids)

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        """Return the messages as one text."""
        return str(messages)


def build_pipeline(
    kind: str,
    parts: dict[str, str],
    folder: Path,
    *,
    extra: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    base: Base | None = None,
) -> Any:
    """Return diffusers' pipeline with its encoders, given as classes by name, and further built parts in `extra`.

    Image processors are read from the folder; a text with an image has the most tokens, and no pixels.
    """
    import diffusers
    import transformers

    pipeline = getattr(diffusers, kind)
    built: dict[str, Any] = {name: None for name in pipeline._get_signature_keys(pipeline)[0]}
    for name, part in parts.items():
        if name.startswith("tokenizer"):
            built[name] = PlaceholderTokenizer(77 if part.startswith("CLIP") else 512)
        elif name == "processor":  # of text with an image; without pixels, as a vision transformer's shapes depend on values
            built[name] = PlaceholderTokenizer(MOST_TOKENS)
        elif name.endswith("processor"):  # of images
            built[name] = getattr(transformers, part).from_pretrained(folder / name)
        else:
            built[name] = build_network(transformers, part, folder / name, dtype=dtype, device=device, base=base)
    return pipeline(**{**built, **extra})
