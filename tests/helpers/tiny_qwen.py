"""Tokenizers and text encoders of the Qwen family, tiny, built in place."""

import json
import re
from functools import cache
from typing import Any

# Renders a conversation as Qwen's own does.
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def pairs() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary of bytes and of the words that Qwen-Image puts around a prompt, and the pairs it is merged from."""
    from diffusers import QwenImagePipeline
    from tokenizers import pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    parts = ("scheduler", "vae", "text_encoder", "tokenizer", "transformer")
    template = QwenImagePipeline(**dict.fromkeys(parts)).prompt_template_encode
    tokenizer = Qwen2Tokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=1000, min_frequency=0, show_progress=False, special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(re.split(r"<\|im_[a-z]+\|>|\{\}", template), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def qwen_tokenizer() -> Any:
    """A tokenizer that reads what is around a prompt as the true one does, which the pipeline counts on."""
    from transformers import Qwen2Tokenizer

    vocabulary, merges = pairs()
    special = ["<|im_start|>", "<|im_end|>"]
    return Qwen2Tokenizer(vocab=vocabulary, merges=merges, additional_special_tokens=special, chat_template=CHAT)


def settings(width: int) -> dict[str, Any]:
    """The settings of a language model of two layers."""
    return {
        "vocab_size": len(qwen_tokenizer()), "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "bos_token_id": 0,
        "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip


def qwen_vl_encoder(*, width: int = 16) -> Any:
    """Qwen2.5-VL of two layers, with one that would look at images."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    turns = {"type": "default", "rope_type": "default", "mrope_section": [1, 1, 2]}
    sees = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": width}
    text = {**settings(width), "rope_scaling": turns, "rope_parameters": {**turns, "rope_theta": 1e4}}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=sees))


def qwen3_encoder(*, width: int = 16) -> Any:
    """Qwen3 of two layers."""
    from transformers import Qwen3Config, Qwen3Model

    return Qwen3Model(Qwen3Config(**settings(width), head_dim=8))
