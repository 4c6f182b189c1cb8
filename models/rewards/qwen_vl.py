"""Rewards from Qwen-VL models with a head on the hidden states of reward tokens: HPSv3, EditReward, VideoReward.

Sources: HPSv3, arXiv 2508.03789 and its package hpsv3; EditReward, arXiv 2509.26346, TIGER-AI-Lab/EditReward; VideoReward,
arXiv 2501.13918, KwaiVGI/VideoAlign. In all three the positions of the language model count tokens, without Qwen-VL's
positions in the image, and all but the head is computed in bfloat16.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional

from fluvial.models.pipelines.folder import silence
from fluvial.models.rewards.shared import loading
from fluvial.models.rewards.shared.convert import fill_model, rename_prefix
from fluvial.models.rewards.shared.loading import LoadingError, ModelReward
from fluvial.models.rewards.shared.pixels import (
    CLIP_MEAN,
    CLIP_STD,
    check_pairs,
    extract_frames,
    map_batches,
    normalise,
    resize,
    resize_as_tensor,
    to_bytes,
)
from fluvial.models.rewards.table import REWARD_MODELS

PROMPTS = Path(__file__).parent / "prompts"
PROMPT_MARK = "{prompt}"  # placeholder of the prompt in a request
PATCH, MERGE, FRAMES = 14, 2, 2  # edge of a patch, patches along the edge of a token, frames of a patch
EDGE = PATCH * MERGE  # pixels along the edge of a token
AREA = 256 * EDGE**2  # pixels of an image
LEAST_VIDEO_AREA = 128 * EDGE**2  # pixels of a frame
LEAST_FRAMES = 4
# Commits of the base models, for settings and tokenizer.
BASES = {
    "Qwen/Qwen2-VL-7B-Instruct": "eed13092ef92e448dd6875b2a00151bd3f7db0ac",
    "Qwen/Qwen2-VL-2B-Instruct": "895c3a49bc3fa70a340399125c650a463535e71c",
    "Qwen/Qwen2.5-VL-7B-Instruct": "cc594898137f460bfe9f0759e9844b3ce807cfb5",
}
# Prefixes of names, of transformers up to 4.51 and later, and their replacements in the model without its language head.
NAMES = {
    "model.visual.": "visual.",
    "model.language_model.": "language_model.",
    "visual.": "visual.",
    "model.": "language_model.",
}
Layers = list[tuple[Tensor, Tensor | None]]  # weight and bias of each linear layer
Media = list[Tensor]  # images of a sample, or its video: each `[T, 3, H, W]` in [0, 1]


@dataclass(eq=False, kw_only=True)
class QwenVl(ModelReward):
    """Reward from a Qwen-VL model with a head.

    Args:
        base: folder or id of the model that the weights were finetuned from, for settings and tokenizer.
    """

    base: str
    dtype: str = "bfloat16"
    batch: int = 4
    ids: Tensor = field(init=False)  # ids of the reward tokens

    file: ClassVar[str]  # file of the weights
    kind: ClassVar[str]  # class of transformers
    tokens: ClassVar[tuple[str, ...]] = ("<|Reward|>",)
    medium: ClassVar[str] = "image"

    def load(self, commit: str | None) -> Any:
        """Return the model without its language head; see `ModelReward.load`."""
        import transformers
        from accelerate import init_empty_weights

        file = loading.find_weight_file(self.weights, self.file, commit)
        tensors = self.read_weights(file, commit)
        kind, base = getattr(transformers, self.kind), loading.resolve_weights(self.base)
        revision = BASES.get(self.base)
        with silence():
            config = loading.fetch(
                f"the settings of {base}", transformers.AutoConfig.from_pretrained, base, revision=revision
            )
        expected = kind.config_class.model_type
        if config.model_type != expected:
            raise LoadingError(f"base {base} is of the architecture {config.model_type!r}, expected {expected!r}")
        self.tokenizer = loading.load_tokenizer(base, revision)
        if not self.tokenizer.chat_template:
            raise LoadingError(f"the tokenizer of {base} has no chat template: give an instruction-tuned model")
        self.tokenizer.add_tokens(list(self.tokens), special_tokens=True)
        self.ids = torch.tensor(self.tokenizer.convert_tokens_to_ids(list(self.tokens)))
        named = {rename_prefix(name, NAMES): value for name, value in tensors.items() if name != "lm_head.weight"}
        heads = {name: named.pop(name) for name in list(named) if name.startswith("rm_head")}
        rows = len(named.get("language_model.embed_tokens.weight", ()))
        if len(self.tokenizer) > rows:
            raise LoadingError(
                f"the tokenizer of {base} has {len(self.tokenizer)} tokens and the weights {file} {rows}: give the base "
                "that these were finetuned from"
            )
        self.heads = self.read_heads(heads, file, config.text_config.hidden_size)
        config.text_config.vocab_size = rows
        with init_empty_weights():
            model = kind(config)
        return fill_model(model, named, file, kind=f"a {self.kind}", dtype=self.precision)

    def read_weights(self, file: Path, commit: str | None) -> dict[str, Tensor]:
        """Return the tensors of the weights by their names in transformers' class for generation."""
        return loading.read_tensors(file)

    def read_heads(self, tensors: Mapping[str, Tensor], file: Path, width: int) -> list[Layers]:
        """Return the heads of the weights."""
        return [list_layers(tensors, "rm_head.", file, width)]

    def compute_hidden_states(self, media: Sequence[Media], texts: Sequence[str]) -> Tensor:
        """Return the hidden states at the reward tokens, `[B, k, D]` in float32.

        Args:
            media: images, or the video, of each sample, in a size for `to_patches`.
            texts: request of each sample.
        """
        parts = [[to_patches(each) for each in sample] for sample in media]
        grids = [
            [(len(each) // FRAMES, *(edge // PATCH for edge in each.shape[-2:])) for each in sample] for sample in media
        ]
        rows = [self.tokenize(text, grid) for text, grid in zip(texts, grids, strict=True)]
        longest = max(map(len, rows))
        # Attention is causal, so that padding on the right changes nothing and needs no mask.
        ids = torch.tensor([[*row, *[row[-1]] * (longest - len(row))] for row in rows])
        is_reward_token = torch.isin(ids, self.ids)
        device = self.model_device
        pixels = torch.cat([each for sample in parts for each in sample]).to(device, self.precision)
        grid = torch.tensor([each for sample in grids for each in sample], device=device)
        name = ("pixel_values", "image_grid_thw") if self.medium == "image" else ("pixel_values_videos", "video_grid_thw")
        output = self.model(
            input_ids=ids.to(device),
            position_ids=torch.arange(longest, device=device).expand(3, len(rows), longest),
            use_cache=False,
            **dict(zip(name, (pixels, grid), strict=True)),
        )
        return output.last_hidden_state[is_reward_token.to(device)].float().view(len(rows), len(self.tokens), -1)

    def tokenize(self, text: str, grids: Sequence[tuple[int, ...]]) -> list[int]:
        """Return the tokens of a request with media before its text, one token per four patches of a medium."""
        content = [*({"type": self.medium} for _ in grids), {"type": "text", "text": text}]
        chat = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        pad = f"<|{self.medium}_pad|>"
        first, *others = chat.split(pad)
        counts = [frames * rows * columns // MERGE**2 for frames, rows, columns in grids]
        # A pad token in the text of a prompt does not belong to a medium.
        whole = first + "".join(pad * count + other for count, other in zip(counts, others, strict=False))
        return list(self.tokenizer(whole + "".join(others[len(counts) :]), add_special_tokens=False)["input_ids"])

    def run_heads(self, images: Tensor, media: Sequence[Media], texts: Sequence[str], head: Layers) -> Tensor:
        """Return the outputs of a head, `[B, k, n]` in float32, with gradients if the images require them."""

        def part(rows: Tensor) -> Tensor:
            numbers = rows.tolist()
            return apply_layers(head, self.compute_hidden_states([media[i] for i in numbers], [texts[i] for i in numbers]))

        with torch.set_grad_enabled(torch.is_grad_enabled() and images.requires_grad):
            return map_batches(part, torch.arange(len(media)), self.batch)


@dataclass(eq=False)
class Hpsv3(QwenVl):
    """Mean mu of the preference that HPSv3 predicts for an image and its prompt; for videos the mean over frames.

    Images are resized to about 256 x 28 x 28 pixels.

    Args:
        weights: file of the state dict, folder with `HPSv3.safetensors`, or id on the Hub.
        frames: largest number of evenly spaced frames per video.
    """

    facts = REWARD_MODELS["hpsv3"]
    weights: str | Path = facts.weights
    _: KW_ONLY
    base: str = "Qwen/Qwen2-VL-7B-Instruct"
    frames: int = 4

    file, kind = "HPSv3.safetensors", "Qwen2VLModel"

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the score of each image, `[B]` in float32, differentiable in the images; see `ImageTowers`."""
        check_pairs(images, prompts)
        device, frames = self.place_model(images), extract_frames(images, self.frames)
        media = [[resize_image(image.to(device))] for image in frames.flatten(0, 1)]
        texts = [format_request("hpsv3", prompt) for prompt in prompts for _ in range(frames.shape[1])]
        return self.run_heads(images, media, texts, self.heads[0])[:, 0, 0].view(len(prompts), -1).mean(1)


@dataclass(eq=False)
class EditReward(QwenVl):
    """Mean of two scores of an edit: how well it follows the instruction, and the quality of the image.

    The input is the image of the prompt's record, the sample, and the prompt as the instruction.

    Args:
        weights: file of the state dict, folder with `model.safetensors`, or id on the Hub.
    """

    facts = REWARD_MODELS["editreward"]
    weights: str | Path = facts.weights
    _: KW_ONLY
    base: str = "Qwen/Qwen2.5-VL-7B-Instruct"

    file, kind = "model.safetensors", "Qwen2_5_VLModel"
    requests: ClassVar[dict[str, str]] = {"following": "editreward_following", "quality": "editreward_quality"}

    def read_heads(self, tensors: Mapping[str, Tensor], file: Path, width: int) -> list[Layers]:
        """Return the two heads of the weights."""
        return [list_layers(tensors, f"rm_heads.head_{i}.", file, width) for i in range(2)]

    def __call__(self, images: Tensor, prompts: Sequence[str], condition_images: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return `score`, and the two scores `following` and `quality`, `[B]` each in float32.

        Args:
            images: images `[B, C, H, W]` in [0, 1]; the scores are differentiable in them.
            prompts: instruction of each edit.
            condition_images: image before the edit, `[C, H, W]` in [0, 1] each, of any size.
        """
        check_pairs(images, prompts)
        if images.ndim != 4:
            raise ValueError(f"editreward scores images, got samples of shape {list(images.shape[1:])}")
        device = self.place_model(images)
        before = [resize_image(extract_frames(image[None].to(device), 1)[0, 0]) for image in condition_images]
        after = [resize_image(image.to(device)) for image in extract_frames(images, 1)[:, 0]]
        media = [list(pair) for pair in zip(before, after, strict=True)]
        scores = {
            name: self.run_heads(images, media, [format_request(file, prompt) for prompt in prompts], head)[:, 0, 0]
            for (name, file), head in zip(self.requests.items(), self.heads, strict=True)
        }
        return {"score": torch.stack(list(scores.values())).mean(0), **scores}


@dataclass(eq=False)
class VideoReward(QwenVl):
    """Sum of three scores of a video: visual quality, motion quality and text alignment, each (y - mean) / std.

    Args:
        weights: folder with `checkpoint-11352/model.pth` and `model_config.json`, or id on the Hub.
        fps: frames per second of the videos; two frames per second are scored, and at least four.
        score: "Overall", the sum, or "VQ", "MQ" or "TA", one of the three.
    """

    facts = REWARD_MODELS["videoreward"]
    weights: str | Path = facts.weights
    _: KW_ONLY
    base: str = "Qwen/Qwen2-VL-2B-Instruct"
    fps: float = 16.0
    score: str = "Overall"

    file, kind, medium = "checkpoint-11352/model.pth", "Qwen2VLModel", "video"
    tokens = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")
    parts: ClassVar[tuple[str, ...]] = ("VQ", "MQ", "TA")

    def read_weights(self, file: Path, commit: str | None) -> dict[str, Tensor]:
        """Return the weights with the adapter merged into them, and keep the settings in their folder."""
        loading.check_choice("score", self.score, ("Overall", *self.parts))
        if not self.fps > 0:
            raise LoadingError(f"fps is {self.fps:g}, expected a number above 0")
        if Path(self.weights).is_file():
            raise LoadingError(f"weights is the file {self.weights}, expected the folder that has model_config.json, too")
        path = loading.find_weight_file(self.weights, "model_config.json", commit)
        settings = loading.attempt(f"the settings {path}", lambda: json.loads(path.read_text(encoding="utf-8")))
        try:
            data, lora, norm = (settings[name] for name in ("data_config", "peft_lora_config", "inference_config"))
            self.rate, self.most_pixels = float(data["fps"]), int(data["max_frame_pixels"])
            self.norm = [(float(norm[f"{part}_mean"]), float(norm[f"{part}_std"])) for part in self.parts]
            scale = lora["lora_alpha"] / (lora["lora_r"] ** (0.5 if lora["use_rslora"] else 1))
        except (KeyError, TypeError, ValueError) as error:
            raise LoadingError(f"the settings {path} are not VideoReward's: {loading.get_first_line(error)}") from error
        return merge_lora(loading.read_tensors(file), scale)

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Return `score`, and the parts `VQ`, `MQ` and `TA`, `[B]` each in float32, differentiable in the videos.

        Args:
            videos: videos `[B, C, F, H, W]` in [0, 1], of at least two frames.
            prompts: prompt of each video.
        """
        check_pairs(videos, prompts)
        if videos.ndim != 5 or videos.shape[2] < FRAMES:
            raise ValueError(f"videoreward scores videos of {FRAMES} frames or more, got samples {list(videos.shape[1:])}")
        device, total = self.place_model(videos), videos.shape[2]
        chosen = extract_frames(videos.to(device), choose_frame_count(total, total / self.fps * self.rate))
        size = fit_size(*videos.shape[-2:], least=LEAST_VIDEO_AREA, most=self.most_pixels)
        media = [[resize_as_tensor(to_bytes(video), size)] for video in chosen]
        texts = [format_request("videoreward", prompt) for prompt in prompts]
        outputs = self.run_heads(videos, media, texts, self.heads[0])[..., 0]
        scores = {
            part: (outputs[:, i] - mean) / std
            for i, (part, (mean, std)) in enumerate(zip(self.parts, self.norm, strict=True))
        }
        overall = torch.stack(list(scores.values())).sum(0)
        return {"score": scores.get(self.score, overall), **scores}


def format_request(name: str, prompt: str) -> str:
    """Return the request text of a reward, with the prompt filled in."""
    return (PROMPTS / f"{name}.txt").read_text(encoding="utf-8").replace(PROMPT_MARK, prompt)


def list_layers(tensors: Mapping[str, Tensor], prefix: str, file: Path, width: int) -> Layers:
    """Return the linear layers of a head in order: `PREFIXi.weight` and `PREFIXi.bias`, or one `PREFIXweight`.

    Raises:
        LoadingError: there are no layers, or they do not fit together.
    """
    stems = sorted({name.removesuffix("weight") for name in tensors if name.startswith(prefix) and name.endswith("weight")})
    layers = [(tensors[f"{stem}weight"].float(), tensors.get(f"{stem}bias")) for stem in stems]
    if [weight.shape[1] for weight, _ in layers] != [width, *(len(weight) for weight, _ in layers)][:-1] or not layers:
        raise LoadingError(f"the weights {file} have no head {prefix}* that fits a model of width {width}")
    return [(weight, None if bias is None else bias.float()) for weight, bias in layers]


def apply_layers(layers: Layers, x: Tensor) -> Tensor:
    """Return the output of linear layers with ReLU between them."""
    for number, (weight, bias) in enumerate(layers):
        x = functional.relu(x) if number else x
        x = functional.linear(x, weight.to(x.device), None if bias is None else bias.to(x.device))
    return x


def merge_lora(tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return the weights of a PEFT model by the names of its base model, with W + scale B A in place of each W."""
    plain = {name.removeprefix("base_model.model."): value for name, value in tensors.items()}
    merged = {name.replace(".base_layer.", "."): value for name, value in plain.items() if ".lora_" not in name}
    for name, down in plain.items():
        if ".lora_A." in name:
            target, up = f"{name.split('.lora_A.')[0]}.weight", plain[name.replace(".lora_A.", ".lora_B.")]
            merged[target] = (merged[target].float() + scale * up.float() @ down.float()).to(merged[target].dtype)
    return merged


def resize_image(image: Tensor) -> Tensor:
    """Return an image `[3, H, W]` in [0, 1] as two equal frames of about `AREA` pixels, integers from 0 to 255."""
    size = fit_size(*image.shape[-2:], least=AREA, most=AREA)
    return resize(to_bytes(image), size).expand(FRAMES, -1, -1, -1)


def fit_size(height: int, width: int, *, least: int, most: int) -> tuple[int, int]:
    """Return the size in whole tokens with an area within bounds and about the aspect ratio of an image.

    Source: qwen-vl-utils, `smart_resize`.
    """
    size = max(EDGE, round(height / EDGE) * EDGE), max(EDGE, round(width / EDGE) * EDGE)
    if size[0] * size[1] > most:
        shrink = math.sqrt(height * width / most)
        size = math.floor(height / shrink / EDGE) * EDGE, math.floor(width / shrink / EDGE) * EDGE
    elif size[0] * size[1] < least:
        grow = math.sqrt(least / (height * width))
        size = math.ceil(height * grow / EDGE) * EDGE, math.ceil(width * grow / EDGE) * EDGE
    return size


def choose_frame_count(total: int, target: float) -> int:
    """Return the even number of frames to score, near `target`, at least `LEAST_FRAMES` and at most all.

    Source: qwen-vl-utils, `smart_nframes`.
    """
    most = total // FRAMES * FRAMES
    return min(round(min(max(target, LEAST_FRAMES), most) / FRAMES) * FRAMES, most)


def to_patches(frames: Tensor) -> Tensor:
    """Return the input of the vision model, one row per patch, for frames `[T, 3, H, W]` of integers from 0 to 255.

    The four patches of a token are adjacent rows. Source: transformers' Qwen2VLImageProcessor.
    """
    pixels = normalise(frames / 255, CLIP_MEAN, CLIP_STD)
    order = "(t u) c (y m h) (x n w) -> (t y x m n) (c u h w)"
    return rearrange(pixels, order, u=FRAMES, m=MERGE, n=MERGE, h=PATCH, w=PATCH)
