"""Parts of a pipeline built from their settings alone, without values, for a device that holds none.

A dry run opens pipelines so: their memory is that of the real parts, and nothing but settings is read.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fluvial.models.pipelines.folder import read_settings
from fluvial.models.quantised import Base, quantise_linear

MOST_TOKENS = 2048  # of a text with an image


def network(
    library: Any, kind: str, folder: Path, *, dtype: torch.dtype, device: torch.device, base: Base | None = None
) -> nn.Module:
    """Return a network of the library diffusers or transformers in the dtype, frozen, on the device, without values.

    Its linear layers are quantised to the format `base`, if there is one.
    """
    made = getattr(library, kind)
    with torch.device("meta"):
        if library.__name__ == "diffusers":
            module = made.from_config(read_settings(folder / "config.json"))
        else:
            module = made._from_config(made.config_class.from_pretrained(folder))
    module = nn.Module.to(module, dtype).requires_grad_(False).eval()  # diffusers' own warns of layers kept in float32
    if base is not None:
        quantise_linear(module, base, dtype)
    return module._apply(lambda tensor: torch.empty_like(tensor, device=device))


class Tokens:
    """Stands in for a tokenizer: every prompt has as many tokens as the text encoder takes, so memory is not underestimated.

    Args:
        longest: number of tokens where the caller names none.
    """

    def __init__(self, longest: int = 77) -> None:
        self.model_max_length = longest
        self.padding_side, self.added_tokens_encoder = "right", dict[str, int]()

    def __call__(
        self, text: str | Sequence[str], *_: Any, max_length: int | None = None, return_tensors: str | None = None, **__: Any
    ) -> Any:
        """Return the ids, and a mask that leaves nothing out, as a tokenizer of transformers does."""
        from transformers import BatchEncoding

        if return_tensors is None:
            return BatchEncoding({"input_ids": [0] * 8})
        shape = (1 if isinstance(text, str) else len(text), max_length or self.model_max_length)
        ids = torch.zeros(shape, dtype=torch.int64)
        return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def tokenize(self, text: str) -> list[str]:
        """Return the words."""
        return text.split()

    def batch_decode(self, ids: Tensor, **_: Any) -> list[str]:
        """Return no words."""
        return [""] * len(ids)

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        """Return the messages as one text."""
        return str(messages)


def pipeline(
    kind: str,
    parts: dict[str, str],
    folder: Path,
    *,
    extra: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    base: Base | None = None,
) -> Any:
    """Return diffusers' pipeline with its encoders, given as classes by name, and parts that are built.

    Processors of images are read from the folder; a text with an image has the most tokens, and no pixels.
    """
    import diffusers
    import transformers

    made = getattr(diffusers, kind)
    built: dict[str, Any] = {name: None for name in made._get_signature_keys(made)[0]}
    for name, part in parts.items():
        if name.startswith("tokenizer"):
            built[name] = Tokens(77 if part.startswith("CLIP") else 512)
        elif name == "processor":  # of a text with an image; shapes within a vision transformer depend on values: no pixels
            built[name] = Tokens(MOST_TOKENS)
        elif name.endswith("processor"):  # of images
            built[name] = getattr(transformers, part).from_pretrained(folder / name)
        else:
            built[name] = network(transformers, part, folder / name, dtype=dtype, device=device, base=base)
    return made(**{**built, **extra})
