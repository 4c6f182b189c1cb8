"""Tiny tokenizers, text encoders and a VAE, built without a download."""

import json
import re
import string
from functools import cache
from typing import Any

# Renders a conversation as Qwen's template does, of text or of parts.
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LLAVA_MARKS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<image>", "<pad>"]
LLAVA_SIZE = 384  # height and width of its images, of 24 x 24 patches


@cache
def train_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return a vocabulary of bytes and of the words in Qwen-Image's template, and its merges."""
    from diffusers import QwenImagePipeline
    from tokenizers import pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    parts = ("scheduler", "vae", "text_encoder", "tokenizer", "transformer")
    template = QwenImagePipeline(**dict.fromkeys(parts)).prompt_template_encode
    tokenizer = Qwen2Tokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        min_frequency=0,
        show_progress=False,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(re.split(r"<\|im_[a-z]+\|>|\{\}", template), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def build_qwen_tokenizer(**options: Any) -> Any:
    """Build a tokenizer that splits the template like the real one: the pipeline drops a fixed number of tokens."""
    from transformers import Qwen2Tokenizer

    vocabulary, merges = train_vocabulary()
    special = ["<|im_start|>", "<|im_end|>"]
    return Qwen2Tokenizer(vocab=vocabulary, merges=merges, additional_special_tokens=special, chat_template=CHAT, **options)


def choose_language_settings(width: int) -> dict[str, Any]:
    """Return the settings of a language model of two layers."""
    return {
        "vocab_size": len(build_qwen_tokenizer()),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def build_qwen_vl_encoder(*, width: int = 16) -> Any:
    """Build a Qwen2.5-VL of two layers, with one vision layer."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    turns = {"type": "default", "rope_type": "default", "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": width}
    text = {**choose_language_settings(width), "rope_scaling": turns, "rope_parameters": {**turns, "rope_theta": 1e4}}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def build_qwen3_encoder() -> Any:
    """Build a Qwen3 of two layers."""
    from transformers import Qwen3Model

    return build_language_model(Qwen3Model)


def build_clip_tokenizer(length: int = 77) -> Any:
    """Build a CLIP tokenizer of single characters."""
    from transformers import CLIPTokenizer

    characters = [*string.ascii_lowercase, *string.digits, *".,!"]
    words = ["<|startoftext|>", "<|endoftext|>", *characters, *(f"{letter}</w>" for letter in characters)]
    vocabulary = {word: number for number, word in enumerate(words)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=length)


def build_t5_tokenizer(length: int = 512) -> Any:
    """Build a T5 tokenizer of single characters."""
    from transformers import T5Tokenizer

    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁a", -2.0)]
    vocabulary += [(letter, -3.0) for letter in [*string.ascii_lowercase, *string.digits, *".,!"]]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=length)


def build_clip_encoder(projected: bool = True, *, width: int = 8) -> Any:
    """Build a CLIP text encoder of two layers."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(build_clip_tokenizer()),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=width,
        max_position_embeddings=77,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return (CLIPTextModelWithProjection if projected else CLIPTextModel)(config)


def build_t5_encoder(kind: str = "T5", *, width: int = 16) -> Any:
    """Build an encoder of two layers of T5 or UMT5."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(build_t5_tokenizer()),
        d_model=width,
        d_kv=8,
        d_ff=2 * width,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )
    return getattr(transformers, f"{kind}EncoderModel")(config)


def build_vae(channels: int = 4, blocks: int = 2) -> Any:
    """Build an image VAE that halves height and width between its blocks: once, by default."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(4, *[8] * (blocks - 1)),
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        latent_channels=channels,
        norm_num_groups=2,
        layers_per_block=1,
        scaling_factor=1.5,
        shift_factor=0.06,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def build_gemma_tokenizer() -> Any:
    """Build a Gemma tokenizer of single characters."""
    from transformers import GemmaTokenizer

    characters = [*string.ascii_letters, *string.digits, *".,!<>-"]
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *characters]
    return GemmaTokenizer(vocab={word: number for number, word in enumerate(words)}, merges=[])


def build_gemma_encoder() -> Any:
    """Build a Gemma 2 of three layers."""
    from transformers import Gemma2Config, Gemma2Model

    config = Gemma2Config(
        vocab_size=len(build_gemma_tokenizer()),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        head_dim=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    return Gemma2Model(config)


def build_language_model(kind: type, *, layers: int = 2) -> Any:
    """Build a language model of transformers with a few layers, and one vision layer if it takes images.

    Raises:
        ValueError: the settings of the class have uncommon names.
    """
    config: Any = _build_tiny_config(kind.config_class, kind.__name__, layers)  # type: ignore[attr-defined]
    inner = getattr(config, "encoder", config)
    if kind.__name__.endswith("Encoder") and inner is not config:  # reads the encoder's settings from the joint ones
        for name, value in inner.to_dict().items():
            if name != "model_type":
                setattr(config, name, value)
    if (width := getattr(inner, "text_config", inner).hidden_size) != 16:
        raise ValueError(f"the settings of {kind.__name__} give {width} features, expected 16")
    return kind(config)


VISION_SETTINGS = {
    "depth": 1,
    "out_hidden_size": 16,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "embed_dim": 16,
}


def _build_tiny_config(config: Any, model: str, layers: int) -> Any:
    """Return the settings of a model of transformers, with those of its text and vision models."""
    text = {**choose_language_settings(16), "head_dim": 8, "num_hidden_layers": layers}
    if model.startswith("SmolLM3"):
        text["vocab_size"] = 128256  # BRIA FIBO has a fixed token id
    subs = {name: sub for name, sub in config.sub_configs.items() if name not in ("vision_config", "vq_config")}
    if not subs:
        return config(**text)
    vision = dict(VISION_SETTINGS)
    if any("gemma" in sub.__name__.lower() for sub in subs.values()):
        text |= {"vocab_size": 512, "dropout_rate": 0.0}
        vision |= {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 16}
    if "text_config" not in subs:
        both = {name: {**text, "cross_attention_hidden_size": 16} for name in subs}
        return config(**both, vocab_size=512, is_encoder_decoder=False)
    if "Auto" in subs["text_config"].__name__:
        text["model_type"] = "mistral" if "istral" in model else "qwen3"
        vision |= {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 16}
    else:
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
        if "gemma" in subs["text_config"].__name__.lower():
            text.pop("rope_parameters")
    return config(text_config=text, vision_config=vision)


@cache
def _train_llava_words() -> Any:
    """Return a tokenizer of bytes, and of the words and markers of HunyuanVideo's template with an image."""
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video_image2video import DEFAULT_PROMPT_TEMPLATE
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        min_frequency=0,
        show_progress=False,
        special_tokens=LLAVA_MARKS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    words.train_from_iterator(re.split(r"<[^>]+>|\{\}", DEFAULT_PROMPT_TEMPLATE["template"]), trainer)
    first = LLAVA_MARKS[0]
    words.post_processor = processors.TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 0)])
    return words


def build_llava_tokenizer() -> Any:
    """Build a tokenizer that splits HunyuanVideo's template like the real one: the pipeline has the image's position."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=_train_llava_words(), bos_token=LLAVA_MARKS[0], eos_token=LLAVA_MARKS[3], pad_token=LLAVA_MARKS[5]
    )


def build_llava_encoder() -> Any:
    """Build a LLaVA of two layers with 576 tokens per image of 384 x 384, the number that HunyuanVideo expects."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    sizes = {"vocab_size": len(build_llava_tokenizer()), "max_position_embeddings": 1024}
    text = {**choose_language_settings(16), "model_type": "llama", **sizes}
    vision = {**choose_vision_settings(), "model_type": "clip_vision_model", "image_size": LLAVA_SIZE}
    mark, pad = LLAVA_MARKS.index("<image>"), LLAVA_MARKS.index("<pad>")
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=mark, pad_token_id=pad)
    return LlavaForConditionalGeneration(config)


def choose_vision_settings(width: int = 16) -> dict[str, Any]:
    """Return the settings of a vision transformer of two layers for images of 32 x 32."""
    return {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 16,
        "projection_dim": width,
    }
