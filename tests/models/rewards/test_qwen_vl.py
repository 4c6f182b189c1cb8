"""HPSv3, EditReward and VideoReward on tiny Qwen-VL models: the originals' own code or formulas, on the same weights."""

import json
import math
import typing
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny_qwen_vl as tiny
from helpers import tiny_rewards, wheels
from helpers.marks import Patch
from helpers.refusals import refuses
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from fluvial.core.random import key, normal
from fluvial.engines.scoring.signature import signature_of
from fluvial.models.rewards import qwen_vl
from fluvial.models.rewards.qwen_vl import (
    EditReward,
    Hpsv3,
    VideoReward,
    choose_frame_count,
    fit_size,
    format_request,
    merge_lora,
    resize_image,
    to_patches,
)

PROMPTS = ["a red cat", "two dogs and a {prompt} of the <|image_pad|> kind", "a red cat"]
SMALL = 6 * 28 * 28  # pixels of an image in these tests


@pytest.fixture(autouse=True)
def _small(monkeypatch: Patch) -> None:
    monkeypatch.setattr(qwen_vl, "AREA", SMALL)
    monkeypatch.setattr(qwen_vl, "LEAST_VIDEO_AREA", 4 * 28 * 28)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("hpsv3", "editreward", "videoreward")}
    for name, kind in (("hpsv3", "Qwen2VL"), ("editreward", "Qwen2_5_VL"), ("videoreward", "Qwen2VL")):
        tiny.save_base(made[name], kind)
    state = tiny.published(tiny.backbone("Qwen2VL", extra=1))
    save_file({**state, **tiny.head("rm_head.", 2, seed=1)}, made["hpsv3"] / "HPSv3.safetensors")
    state = tiny.published(tiny.backbone("Qwen2_5_VL", extra=1), old=False)
    heads = {**tiny.head("rm_heads.head_0.", 2, seed=2), **tiny.head("rm_heads.head_1.", 2, seed=3)}
    save_file({**state, **heads}, made["editreward"] / "model.safetensors")
    tiny.save_video_reward(made["videoreward"], adapted())
    return made


def adapted() -> dict[str, Tensor]:
    plain = {**tiny.published(tiny.backbone("Qwen2VL", extra=3)), "rm_head.weight": normal(key(9), (1, tiny.WIDTH))}
    found = {}
    for number, (name, value) in enumerate(plain.items()):
        if name.endswith("q_proj.weight"):
            stem = f"base_model.model.{name.removesuffix('weight')}"
            found[f"{stem}base_layer.weight"] = value
            found[f"{stem}lora_A.default.weight"] = normal(key(2 * number), (2, value.shape[1]))
            found[f"{stem}lora_B.default.weight"] = normal(key(2 * number + 1), (value.shape[0], 2))
        else:
            found[f"base_model.model.{name.replace('q_proj.', 'q_proj.base_layer.')}"] = value
    return found


def made(name: str, folders: dict[str, Path], **options: Any) -> Any:
    kinds: dict[str, Any] = {"hpsv3": Hpsv3, "editreward": EditReward, "videoreward": VideoReward}
    return kinds[name](folders[name], base=str(folders[name]), **{"dtype": "float32", **options})


def as_pil(image: Tensor) -> Image.Image:
    return Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())


def processed(images: list[Image.Image]) -> tuple[Tensor, Tensor]:
    from transformers import Qwen2VLImageProcessorPil

    found = Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 12845056})(images, return_tensors="pt")
    return found["pixel_values"], found["image_grid_thw"]


def chat(text: str, grid: Tensor, medium: str = "image") -> list[int]:
    tokens = tiny.tokenizer()
    tokens.add_tokens(["<|Reward|>"] if medium == "image" else list(VideoReward.tokens), special_tokens=True)
    media = "".join(f"<|vision_start|>{f'<|{medium}_pad|>' * int(each.prod() // 4)}<|vision_end|>" for each in grid)
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    whole = f"{system}<|im_start|>user\n{media}{text}<|im_end|>\n<|im_start|>assistant\n"
    return list(tokens(whole, add_special_tokens=False)["input_ids"])


def original_hpsv3(state: dict[str, Tensor]) -> Any:
    """Return the model of HPSv3's wheel with weights, on a stand-in for the class of transformers 4.45 that it extends.

    That class holds the vision model and the language model side by side, and gives tokens the positions 0, 1, 2, ... if it
    is given none (`modeling_qwen2_vl.py`, Qwen2VLModel.forward).
    """
    net = tiny.backbone("Qwen2VL", extra=1)

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = net.language_model.embed_tokens

        def forward(self, inputs_embeds: Tensor, attention_mask: Tensor, position_ids: None, **others: Any) -> Any:
            places = torch.arange(inputs_embeds.shape[1]).expand(3, *inputs_embeds.shape[:2])
            output = net.language_model(inputs_embeds=inputs_embeds, attention_mask=attention_mask, position_ids=places)
            return (output.last_hidden_state,)

    class Vision(nn.Module):
        def get_dtype(self) -> torch.dtype:
            return torch.float32

        def forward(self, pixels: Tensor, grid_thw: Tensor) -> Tensor:
            return net.visual(pixels, grid_thw=grid_thw).pooler_output

    class Generation(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.config, self.model, self.visual = config, Language(), Vision()

    file = wheels.install("hpsv3", "1.0.0") / "hpsv3" / "model" / "qwen2vl_trainer.py"
    names = {"torch": torch, "nn": nn, "Qwen2VLForConditionalGeneration": Generation}
    kind = wheels.definitions(
        file, "Qwen2VLRewardModelBT", **names, **{name: getattr(typing, name) for name in ("Optional", "List")}
    )["Qwen2VLRewardModelBT"]
    tokens = tiny.tokenizer()
    settings = SimpleNamespace(
        hidden_size=tiny.WIDTH,
        image_token_id=tokens.convert_tokens_to_ids("<|image_pad|>"),
        pad_token_id=0,
        output_attentions=False,
        output_hidden_states=False,
        use_return_dict=True,
    )
    found = kind(settings, output_dim=2, reward_token="special", special_token_ids=[len(tokens)], rm_head_type="ranknet")
    layers = tiny.head("rm_head.", 2, seed=1)
    found.rm_head = nn.Sequential(*(nn.Linear(1, 1) if place in (0, 3, 5) else nn.ReLU() for place in range(6)))
    for place in (0, 3, 5):
        found.rm_head[place].weight.data = layers[f"rm_head.{place}.weight"]
        found.rm_head[place].bias.data = layers[f"rm_head.{place}.bias"]
    return found.eval()


def from_wheel(path: str, *names: str, **given: Any) -> dict[str, Any]:
    return wheels.definitions(wheels.install("hpsv3", "1.0.0") / "hpsv3" / path, *names, **given)


@torch.no_grad()
def test_hpsv3_is_the_original(folders: dict[str, Path]) -> None:
    """Its own request, its own sizes, and its own model, in batches padded on the right with a mask."""
    constants = from_wheel("dataset/data_collator_qwen.py", "INSTRUCTION", "prompt_with_special_token")
    sizes = from_wheel(
        "dataset/utils.py", "round_by_factor", "ceil_by_factor", "floor_by_factor", "smart_resize", "MAX_RATIO", math=math,
        IMAGE_FACTOR=28, MIN_PIXELS=0, MAX_PIXELS=0,
    )  # fmt: skip
    images = tiny_rewards.images(3, 41, 73)
    height, width = sizes["smart_resize"](41, 73, min_pixels=SMALL, max_pixels=SMALL)
    pixels, grid = processed([as_pil(image).resize((width, height), Image.Resampling.BICUBIC) for image in images])
    asked = [constants["INSTRUCTION"].format(text_prompt=text) + constants["prompt_with_special_token"] for text in PROMPTS]
    # The original cannot take a prompt with a token of an image; here it is text.
    rows = [chat(text.replace("<|image_pad|>", "[image]"), grid[:1]) for text in asked]
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # autocast of CUDA
        wanted = original_hpsv3({})(input_ids=ids, attention_mask=mask, pixel_values=pixels, image_grid_thw=grid)["logits"]
    found = made("hpsv3", folders)(images, [text.replace("<|image_pad|>", "[image]") for text in PROMPTS])
    torch.testing.assert_close(found, wanted[:, 0], rtol=1e-4, atol=1e-5)
    assert found.std() > 1e-3


@pytest.mark.parametrize(("height", "width"), [(512, 512), (41, 73), (1000, 30), (448, 448), (720, 1280)])
def test_images_are_prepared_as_the_original_does(height: int, width: int, monkeypatch: Patch) -> None:
    """The size of its wheel's `smart_resize`, PIL's bits, and the patches of transformers' processor."""
    monkeypatch.undo()
    area = qwen_vl.AREA
    assert area == 200704
    sizes = from_wheel(
        "dataset/utils.py", "round_by_factor", "ceil_by_factor", "floor_by_factor", "smart_resize", "MAX_RATIO", math=math,
        IMAGE_FACTOR=28, MIN_PIXELS=0, MAX_PIXELS=0,
    )  # fmt: skip
    wanted = sizes["smart_resize"](height, width, min_pixels=area, max_pixels=area)
    assert fit_size(height, width, least=area, most=area) == wanted
    (image,) = tiny_rewards.images(1, height, width)
    pixels, grid = processed([as_pil(image).resize(wanted[::-1], Image.Resampling.BICUBIC)])
    found = resize_image(image)
    assert (1, found.shape[-2] // 14, found.shape[-1] // 14) == tuple(grid[0].tolist())
    torch.testing.assert_close(to_patches(found), pixels, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def reference(name: str, folders: dict[str, Path], text: str, pixels: Tensor, grid: Tensor) -> Tensor:
    """Return the hidden states of one sample at the reward's tokens, `[k, D]`, by transformers' model."""
    reward = made(name, folders)
    ids = torch.tensor([chat(text, grid, reward.medium)])
    names = ("pixel_values_videos", "video_grid_thw") if reward.medium == "video" else ("pixel_values", "image_grid_thw")
    places = torch.arange(ids.shape[1]).expand(3, 1, -1)
    output = reward.model(input_ids=ids, position_ids=places, **dict(zip(names, (pixels, grid), strict=True)))
    return output.last_hidden_state[torch.isin(ids, reward.ids)]


def ranknet(tensors: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    for place in ("0", "3", "5"):
        x = functional.linear(x, tensors[f"{prefix}{place}.weight"], tensors[f"{prefix}{place}.bias"])
        x = functional.relu(x) if place != "5" else x
    return x


def test_editreward_is_its_formula(folders: dict[str, Path]) -> None:
    """The mean of two heads' first outputs, for two requests with the image before and the image after the edit.

    Source: EditReward, `inference_edit.py` and `model/qwen2_5_vl_trainer.py` with `ranknet_multi_head` and the pooling
    strategy `mean`.
    """
    after, before = (
        tiny_rewards.images(2, 50, 60),
        [*tiny_rewards.images(1, 80, 40, seed=5), *tiny_rewards.images(1, 30, 33)],
    )
    found = made("editreward", folders)(after, PROMPTS[:2], before)
    for i in range(2):
        both = [as_pil(image) for image in (before[i], after[i])]
        sizes = [fit_size(image.height, image.width, least=SMALL, most=SMALL) for image in both]
        pixels, grid = processed([image.resize(size[::-1]) for image, size in zip(both, sizes, strict=True)])
        parts = []
        for head, (part, file) in enumerate(EditReward.requests.items()):
            if i == 0:  # the other prompt has a token of an image, which is none of the media's
                hidden = reference("editreward", folders, format_request(file, PROMPTS[i]), pixels, grid)
                wanted = ranknet(tiny.head(f"rm_heads.head_{head}.", 2, seed=2 + head), f"rm_heads.head_{head}.", hidden)
                torch.testing.assert_close(found[part][i], wanted[0, 0], rtol=1e-4, atol=1e-5)
            parts.append(found[part][i])
        torch.testing.assert_close(found["score"][i], torch.stack(parts).mean())
    other = made("editreward", folders)(after, PROMPTS[:2], before[::-1])
    assert not torch.allclose(other["score"], found["score"], atol=1e-5)
    assert signature_of(made("editreward", folders)).takes("condition_images")


def test_videoreward_is_its_formula(folders: dict[str, Path]) -> None:
    """Three scores at three tokens, each less its mean and over its deviation, and their sum.

    Source: VideoAlign, `inference.py` and `trainer.py`; frames as `vision_process.py` samples them at two per second.
    """
    video = tiny_rewards.images(40, 60, 90).transpose(0, 1)[None]
    reward = made("videoreward", folders, fps=16.0)
    found = reward(torch.cat([video, video.flip(2)]), PROMPTS[:2])
    chosen = [round(i * 39 / 3) for i in range(4)]  # 40 frames at 16 per second, two per second: 5, the nearest even is 4
    size = fit_size(60, 90, least=4 * 28 * 28, most=448 * 448)
    frames = functional.interpolate(video[0, :, chosen].transpose(0, 1).double() * 255, size, mode="bicubic", antialias=True)
    whole = frames.clamp(0, 255).round()
    grid = torch.tensor([[2, size[0] // 14, size[1] // 14]])
    hidden = reference("videoreward", folders, format_request("videoreward", PROMPTS[0]), to_patches(whole), grid)
    y = functional.linear(hidden, normal(key(9), (1, tiny.WIDTH)))[:, 0]
    wanted = (y - torch.tensor([3.7, 1.2, -1.0])) / torch.tensor([2.2, 1.4, 2.6])
    got = torch.stack([found[part][0] for part in ("VQ", "MQ", "TA")])
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["score"], found["VQ"] + found["MQ"] + found["TA"])
    assert abs(float(found["score"][0] - found["score"][1])) > 1e-4
    only = made("videoreward", folders, score="VQ")(video, PROMPTS[:1])
    torch.testing.assert_close(only["score"], only["VQ"])
    refuses(r"videoreward scores videos of 2 frames or more, got samples \[3, 60, 90\]", reward, video[:, :, 0], PROMPTS[:1])


def test_frames_of_a_video_are_counted_as_the_original_does() -> None:
    """Its `smart_nframes` with `fps` 2: an even number, at least four, at most all."""
    names = ("round_by_factor", "ceil_by_factor", "floor_by_factor", "smart_nframes")
    constants: dict[str, Any] = {"FRAME_FACTOR": 2, "FPS": 2.0, "FPS_MIN_FRAMES": 4, "FPS_MAX_FRAMES": 768}
    original = from_wheel("dataset/utils.py", *names, math=math, **constants)["smart_nframes"]
    for total in (4, 5, 16, 33, 81, 121):
        for fps in (8.0, 16.0, 24.0):
            assert choose_frame_count(total, total / fps * 2) == original({"fps": 2.0}, total, fps), (total, fps)


def test_adapters_are_merged_as_peft_merges_them() -> None:
    from peft import LoraConfig, get_peft_model

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.other = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Any:
            return self.other(self.q_proj(x))

    model = get_peft_model(Net(), LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj"]))
    tiny_rewards.randomise(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    wanted = model.merge_and_unload().state_dict()
    found = merge_lora(state, 3.0)
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("name", ["hpsv3", "editreward"])
def test_gradients_reach_the_images(name: str, folders: dict[str, Path]) -> None:
    reward, images = made(name, folders, batch=3), tiny_rewards.images(3, 50, 60).requires_grad_()
    conditions = [[*tiny_rewards.images(3, 40, 70, seed=3)]] if name == "editreward" else []

    def scores(reward: Any, images: Tensor) -> Tensor:
        found = reward(images, PROMPTS, *conditions)
        return found["score"] if isinstance(found, dict) else found

    found = scores(reward, images)
    (grad,) = torch.autograd.grad(found.sum(), images)
    assert grad.flatten(1).norm(dim=1).min() > 0
    alone = scores(made(name, folders, batch=1), images.detach())
    assert not alone.requires_grad
    torch.testing.assert_close(alone, found.detach(), rtol=1e-4, atol=1e-5)


def test_weights_are_bfloat16_by_default(folders: dict[str, Path]) -> None:
    reward = Hpsv3(folders["hpsv3"], base=str(folders["hpsv3"]))
    assert {parameter.dtype for parameter in reward.model.parameters()} == {torch.bfloat16}
    images = tiny_rewards.images(1)
    found, exact = reward(images, PROMPTS[:1]), made("hpsv3", folders)(images, PROMPTS[:1])
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), exact.numpy(), atol=0.1)


def test_what_is_wrong_is_one_line(folders: dict[str, Path], tmp_path: Path) -> None:
    """Another base, a tokenizer of another model, a head that does not fit, settings that are missing."""
    hpsv3, edit, video = (str(folders[name]) for name in ("hpsv3", "editreward", "videoreward"))
    refuses("is of the architecture 'qwen2_5_vl', expected 'qwen2_vl'", Hpsv3, hpsv3, base=edit)
    refuses("hpsv3: the folder", Hpsv3, edit, base=hpsv3)
    refuses("fps is 0, expected a number above 0", VideoReward, video, base=video, fps=0)
    refuses("score is 'vq', expected one of Overall, VQ, MQ, TA", VideoReward, video, base=video, score="vq")
    file = folders["videoreward"] / "checkpoint-11352" / "model.pth"
    refuses("expected the folder that has model_config.json", VideoReward, file, base=video)
    state = tiny.published(tiny.backbone("Qwen2VL", extra=1))
    save_file(state, tmp_path / "HPSv3.safetensors")
    refuses(r"have no head rm_head\.\* that fits a model of width 16", Hpsv3, tmp_path, base=hpsv3)
    save_file(
        {**tiny.published(tiny.backbone("Qwen2VL", extra=0)), **tiny.head("rm_head.", 2, seed=1)}, tmp_path / "w.safetensors"
    )
    refuses("tokens and the weights", Hpsv3, tmp_path / "w.safetensors", base=hpsv3)
    tiny.save_video_reward(tmp_path / "video", adapted())
    (tmp_path / "video" / "model_config.json").write_text(json.dumps({"data_config": {}}))
    refuses("model_config.json are not VideoReward's: KeyError", VideoReward, tmp_path / "video", base=video)
