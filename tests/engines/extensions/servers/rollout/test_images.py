"""Prompts with images: files in the server's folders or data URLs reach the pipeline, and nothing else is opened."""

import asyncio
import base64
import io
import json
import os
from collections.abc import Callable
from inspect import Parameter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from helpers import asgi, fake_servers, tiny_conditioned, tiny_pipelines
from helpers import rollout_servers as servers
from PIL import Image

from fluvial.core.random import key
from fluvial.engines.data.records import Prompt
from fluvial.engines.errors import UsageError
from fluvial.engines.extensions.servers.asgi import RequestError
from fluvial.engines.extensions.servers.rollout.orders import ServeLimits, check_file
from fluvial.engines.extensions.servers.rollout.policy import ServedPolicy, open_policy
from fluvial.engines.extensions.wire.request import RequestLimits
from fluvial.engines.run.jobs.settings import PipelineConfig
from fluvial.engines.sampling.generate import Guidance, Requests, Sampling, StochasticSteps, generate
from fluvial.engines.sampling.samplers import SAMPLERS
from fluvial.models.replay.kinds import SOUND, Sound

STEPS, ROW = 3, tiny_conditioned.ROWS["fill"]  # an image and a mask
LIMITS = ServeLimits(RequestLimits(pixels=64 * 64), body=40_000)


def url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images and a file of prompts with them."""
    folder = tmp_path_factory.mktemp("images")
    for number in range(4):
        tiny_conditioned.draw_image(folder / f"{number}.png", number, ROW.image)
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": "a fox", "image": f"{n}.png", "mask_image": f"{n + 1}.png"}) + "\n" for n in range(2))
    )
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> servers.Server:
    pipeline = PipelineConfig(height=16, width=16, call=tuple(f"{name}={value}" for name, value in ROW.call.items()))
    path, prompts = str(tiny_conditioned.save("fill", folder / "pipeline")), [str(folder / "prompts.jsonl")]
    settings: dict[str, Any] = {"weights": None, "steps": STEPS, "guidance": Guidance(ROW.scale), "pipeline": pipeline}
    of = open_policy(path, **settings, roots=[folder], prompts=prompts)
    return servers.served(of, micro_batch=2, limits=LIMITS)


def test_images_reach_the_pipeline(server: servers.Server, folder: Path) -> None:
    """By file, by bytes, and by bytes in another order with their names: the samples are those of generate to the bit."""
    files = [folder / "0.png", folder / "1.png"]
    own: dict[str, Any] = {"key": [7, 0], "ids": [5, 6], "recorded_only": True}
    body: dict[str, Any] = {"prompt": "a fox", "num_outputs_per_prompt": 2, "rollout_noise_level": 0.5}
    body |= {"rollout_sde_step_indices": [0, 1], "rollout_return_dit_trajectory": True, "rollout_debug_mode": False}
    data = [url(file.read_bytes()) for file in files]
    model = server.policy.model
    schedule = server.policy.schedule(STEPS, server.policy.shape)
    stochastic = StochasticSteps(SAMPLERS["flow_sde"].bind(0.5, schedule.levels), (0, 1))
    sampling = Sampling(server.policy.shape, schedule, server.policy.guidance, stochastic=stochastic)
    prompt = Prompt("a fox", media=dict(zip(ROW.media, files, strict=True)))
    requests = Requests([prompt] * 2, [5, 6], key(7))
    (chunk,) = generate(model, server.policy.weights.module, requests, sampling, micro_batch=2)
    named = {**own, "media": ["mask_image", "image"]}
    for given, options in ((map(str, files), own), (data, own), (data[::-1], named)):
        found = server.samples(**body, image_path=list(given), extra_sampling_params={"fluvial": options})
        for row, sample in enumerate(found):
            assert torch.equal(servers.trajectory(sample).latents[-1], chunk.trajectory.final[row])
            assert torch.equal(sample.generated_output, chunk.images[row])
            assert torch.equal(servers.log_probs(sample)[:2], chunk.trajectory.log_prob[row])
    other = server.samples(**body, image_path=data[::-1], extra_sampling_params={"fluvial": own})
    assert not torch.equal(other[0].generated_output, chunk.images[0])
    assert server.samples(prompt="a fox", image_path=data, rollout=False)[0].generated_output.shape == (3, 16, 16)


def form(*fields: tuple[str, Any]) -> dict[str, Any]:
    """Return a form as `asgi.call` takes it; files are bytes."""
    request = httpx2.Request(
        "POST",
        "http://served",
        files=[(name, ("file", value) if isinstance(value, bytes) else (None, str(value))) for name, value in fields],
    )
    return {"body": request.read(), "headers": {"content-type": request.headers["content-type"]}}


def test_forms_edit_images(server: servers.Server, folder: Path) -> None:
    """By files or by their links, as numbers or texts: the images are those of a rollout with the seed."""
    image, mask = ((folder / f"{number}.png").read_bytes() for number in range(2))
    values = [
        ("prompt", "a fox"),
        ("n", 2),
        ("seed", 7),
        ("num_frames", 1),
        ("enable_teacache", "False"),
        ("background", "auto"),
    ]
    made = [
        asyncio.run(asgi.call(server.app, "/v1/images/edits", **form(*values, *images)))
        for images in ([("image", image), ("mask", mask)], [("mask", mask), ("url[]", folder / "0.png")])
    ]
    assert [answer.status for answer in made] == [200, 200], made
    expected = server.samples(
        prompt="a fox", seed=7, num_outputs_per_prompt=2, image_path=[url(image), url(mask)], rollout=False
    )
    for answer in made:
        for each, sample in zip(answer.value["data"], expected, strict=True):
            with Image.open(io.BytesIO(base64.b64decode(each["b64_json"]))) as found:
                pixels = torch.tensor(np.asarray(found)).permute(2, 0, 1).long()
            assert torch.equal(pixels, (sample.generated_output * 255).round().long())


FORMS: dict[str, tuple[list[tuple[str, Any]], str]] = {
    "no image": ([("prompt", "a fox")], "has no image"),
    "a number that is none": ([("image", b""), ("prompt", "a fox"), ("n", "two")], "n"),
    "a number with a zero before it": ([("image", b""), ("prompt", "a fox"), ("n", "02")], "n: Expected"),
    "an unknown field": ([("image", b""), ("prompt", "a fox"), ("strength", "1")], "strength"),
    "what would change the image": ([("image", b""), ("prompt", "a"), ("enable_cache_dit", "true")], "enable_cache_dit is"),
    "no file of an image": ([("image", b"none"), ("mask", b"none"), ("prompt", "a")], "image cannot be read as PNG"),
    "many fields": ([("image", b"")] * 100, "more than 64 fields"),
}


def test_wrong_forms_are_one_line(server: servers.Server) -> None:
    for name, (fields, says) in FORMS.items():
        answer = asyncio.run(asgi.call(server.app, "/v1/images/edits", **form(*fields)))
        assert answer.status in (400, 413), name
        assert says in answer.value["detail"], (name, answer.value)
    whole = form(("image", b"\r\n--x"), ("prompt", "a"))
    for body, kind, status in (
        (whole["body"][:-5], None, 400),
        (whole["body"], "application/json", 415),
        (whole["body"], "multipart/form-data", 415),
    ):
        headers = whole["headers"] if kind is None else {"content-type": kind}
        answer = asyncio.run(asgi.call(server.app, "/v1/images/edits", body=body, headers=headers))
        assert answer.status == status, (body[-40:], kind, answer)


def gif() -> bytes:
    Image.new("RGB", (4, 4)).save(file := io.BytesIO(), "GIF")
    return file.getvalue()


WRONG: dict[str, tuple[int, Callable[[Path], str], str]] = {
    "a file elsewhere": (400, lambda folder: "/etc/hostname", "is outside the folders"),
    "a relative name": (400, lambda folder: "0.png", "is not an absolute path"),
    "a way out": (400, lambda folder: str(folder / "../../../etc/passwd"), "cannot be read|outside"),
    "a link that leads out": (400, lambda folder: str(folder / "link.png"), "is outside the folders"),
    "a pipe": (400, lambda folder: str(folder / "pipe.png"), "is not a file"),
    "a folder": (400, lambda folder: str(folder), "is not a file"),
    "a long name": (400, lambda folder: "/" + "a" * 5000, "a name of 5001 characters"),
    "no image": (400, lambda folder: str(folder / "prompts.jsonl"), "image cannot be read as PNG, JPEG, WEBP"),
    "a large file": (413, lambda folder: str(folder / "large.png"), "has 50000 bytes, expected at most 40000"),
    "a format that is not decoded": (400, lambda folder: url(gif()), "image cannot be read as PNG, JPEG, WEBP"),
    "many pixels": (413, lambda folder: url(fake_servers.bomb(100)), "100 x 100 pixels, expected at most 4096"),
    "a bomb": (400, lambda folder: url(fake_servers.bomb(60000)), "image cannot be read as"),
    "half an image": (400, lambda folder: url((folder / "0.png").read_bytes()[:-40]), "an image of"),
    "no base64": (400, lambda folder: "data:image/png;base64,???", "whose base64 cannot be read"),
    "a URL": (400, lambda folder: "http://169.254.169.254/latest", "is not an absolute path"),
    "text": (400, lambda folder: "data:text/plain,abc", "expected data:image/png;base64,..."),
}


def test_what_is_no_image_of_the_servers_folders_is_one_line(server: servers.Server, folder: Path) -> None:
    (folder / "link.png").symlink_to("/etc/hostname")
    os.mkfifo(folder / "pipe.png")  # opening it would wait for ever
    (folder / "large.png").write_bytes(b"0" * 50_000)
    for name, (status, image, says) in WRONG.items():
        found = server.problem(prompt="a fox", image_path=[image(folder), str(folder / "1.png")])
        assert found[0] == status, (name, found)
        assert any(part in found[1] for part in says.split("|")), (name, found)


def test_videos_and_sounds_are_bounded() -> None:
    """A video by its pixels, of all frames; a sound is one that nothing unpacks."""
    frames = [Image.new("RGB", (10, 10), (number, 0, 0)) for number in range(5)]
    frames[0].save(file := io.BytesIO(), "GIF", save_all=True, append_images=frames[1:])
    assert check_file(file.getvalue(), "video", 500) == file.getvalue()
    with pytest.raises(RequestError, match="image_path: video: the video has more than 499 pixels"):
        check_file(file.getvalue(), "video", 499)
    with pytest.raises(RequestError, match="image_path: video: a video of 4 bytes cannot be read as a video"):
        check_file(b"none", "video", 500)
    wave = SOUND.write(Sound(torch.zeros(1, 4), 400))
    assert check_file(wave, "audio", 1) == wave
    with pytest.raises(RequestError, match="image_path: audio cannot be read as WAV"):
        check_file(b"fLaC", "audio", 500)


def test_a_frame_rate_that_the_pipeline_does_not_use_is_refused() -> None:
    """It is an argument of the calls that are recorded; nothing else depends on it."""
    takes = {"frame_rate": Parameter("frame_rate", Parameter.KEYWORD_ONLY, default=24)}
    recorded = SimpleNamespace(recorded=True, takes=takes, call_arguments={})
    for model in (recorded, SimpleNamespace(recorded=True, takes={}, call_arguments={}), SimpleNamespace()):
        ServedPolicy.check_rate(SimpleNamespace(model=model), 24)  # type: ignore[arg-type]
    recorded.call_arguments["frame_rate"] = 25
    with pytest.raises(RequestError, match="fps is 24, and this pipeline was opened with frame_rate 25"):
        ServedPolicy.check_rate(SimpleNamespace(model=recorded), 24)  # type: ignore[arg-type]


def test_other_images_than_the_pipeline_takes_are_refused(server: servers.Server, folder: Path) -> None:
    for names, count, says in (
        (None, 0, "image_path holds 0 images, expected 2: image, mask_image"),
        (None, 1, "holds 1 images, expected 2"),
        (["image", "control_image"], 2, "(image, control_image), expected 2"),
        (["image"], 2, "one argument for each image"),
        (["image", "mask_image", "image"], 3, "image_path holds 2 images for image, expected one"),
    ):
        named: dict[str, Any] = {"extra_sampling_params": {"fluvial": {"media": names}}} if names else {}
        status, problem = server.problem(**({"image_path": [str(folder / "0.png")] * count} if count else {}), **named)
        assert (status, says in problem) == (400, True), problem


@pytest.mark.long
def test_lists_of_images_reach_the_pipeline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen-Image-Edit-Plus, whose one argument all images of a request are, named or not; in their order."""
    tiny_conditioned.without_scaling(monkeypatch)
    pipeline = PipelineConfig(height=16, width=16, text_tokens=300)
    path = str(tiny_conditioned.save("qwen-edit-plus", folder / "edit"))
    server = servers.served(
        open_policy(path, weights=None, steps=STEPS, guidance=Guidance(), pipeline=pipeline, roots=[folder]), micro_batch=2
    )
    files = [folder / "0.png", folder / "1.png"]
    policy = server.policy
    sampling = Sampling(policy.shape, policy.schedule(STEPS, policy.shape), policy.guidance)
    prompts = [Prompt("a fox", media={"image": tuple(files)}), Prompt("a fox", media={"image": files[0]})]
    for prompt in prompts:
        requests = Requests([prompt] * 2, [5, 6], key(7))
        (chunk,) = generate(policy.model, policy.weights.module, requests, sampling, micro_batch=2)
        given = [str(file) for file in (files if isinstance(prompt.media["image"], tuple) else files[:1])]
        for names in (None, ["image"] * len(given)):
            own = {"key": [7, 0], "ids": [5, 6]} | ({} if names is None else {"media": names})
            asked = {"prompt": "a fox", "image_path": given, "num_outputs_per_prompt": 2, "rollout": False}
            found = server.samples(**asked, extra_sampling_params={"fluvial": own})
            assert all(torch.equal(sample.generated_output, chunk.images[row]) for row, sample in enumerate(found))
    (other,) = server.samples(prompt="a fox", image_path=given * 2, rollout=False, seed=1)
    (again,) = server.samples(prompt="a fox", image_path=given, rollout=False, seed=1)
    assert not torch.equal(other.generated_output, again.generated_output)


@pytest.mark.parametrize("name", ["handwriting", "sd3"])
def test_prompts_that_change_nothing_are_refused(name: str, folder: Path) -> None:
    model = name if name == "handwriting" else str(tiny_pipelines.save(tiny_pipelines.ROWS[name], folder / name))
    (folder / "texts.txt").write_text("a fox\n")
    pipeline = PipelineConfig() if name == "handwriting" else PipelineConfig(height=16, width=16)
    with pytest.raises(UsageError, match=r"prompts.* no effect"):
        open_policy(
            model, weights=None, steps=STEPS, guidance=Guidance(), pipeline=pipeline, prompts=[str(folder / "texts.txt")]
        )
