"""Every route of the server, asked with sglang's own request classes and HTTP client, and compared with its own handlers.

They are those of the wheel of sglang 0.5.23. What cannot be imported without its dependencies is compiled from its file, one
function at a time.
"""

import asyncio
import base64
import hashlib
import io
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest
import torch
import uvicorn
from helpers import asgi, real_sglang
from helpers import rollout_servers as servers
from helpers import tiny_jobs as tiny
from helpers.rollout_servers import Server
from helpers.weight_servers import base, moved_base
from PIL import Image
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from fluvial.engines.export.model_folder import list_base_tensors
from fluvial.engines.extensions.servers.rollout.policy import ServedPolicy
from fluvial.engines.extensions.servers.rollout.served_weights import ServedWeights
from fluvial.engines.sampling.generate import NO_GUIDANCE

pytestmark = pytest.mark.long  # it installs a wheel
HTTP = "multimodal_gen/runtime/entrypoints/http_server.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with all weights of another net, and with two adapters."""
    (tmp_path / "full/transformer").mkdir(parents=True)
    save_file(list_base_tensors(moved_base()), tmp_path / "full/transformer/diffusion_pytorch_model.safetensors")
    for name, rank in (("x", 2), ("y", 3)):
        tensors = {"into.lora_A.weight": torch.randn(rank, 24), "into.lora_B.weight": torch.randn(24, rank)}
        save_file(tensors, tmp_path / f"{name}.safetensors")
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Server:
    model, weights = tiny.Tiny(), ServedWeights(base().eval(), roots=[folder])
    cpu = torch.device("cpu")
    return servers.served(
        ServedPolicy("tiny", model, weights, shape=tiny.SHAPE, steps=tiny.STEPS, guidance=NO_GUIDANCE, device=cpu)
    )


@contextmanager
def running(server: Server) -> Iterator[str]:
    """Serve on a free port, and yield the address."""
    running = uvicorn.Server(uvicorn.Config(server.app, port=0, log_level="error"))
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        while not running.started:
            thread.join(0.01)
        yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join(30)


@pytest.fixture
def url(server: Server) -> Iterator[str]:
    with running(server) as address:
        yield address


def call(server: Server, path: str, asked: Any = None) -> asgi.Answer:
    """Return the answer to one of sglang's requests: a dataclass, a struct, or a model of pydantic; None is a GET."""
    if isinstance(asked, msgspec.Struct):
        asked = msgspec.to_builtins(asked)
    elif asked is not None and not isinstance(asked, dict):
        asked = asked.model_dump(exclude_unset=True) if hasattr(asked, "model_dump") else asdict(asked)
    return asyncio.run(asgi.call(server.app, path, asked))


def test_weights_are_pushed_and_checked_with_its_requests(server: Server, folder: Path) -> None:
    structs = real_sglang.part("entrypoints.post_training.io_struct")
    checker = real_sglang.part("post_training.tensor_update_checker")
    path, names = "multimodal_gen/runtime/loader/weight_utils.py", {"hashlib": hashlib, "torch": torch, "DTensor": DTensor}
    summed = real_sglang.function(path, "compute_weights_checksum", **names)
    answer = call(server, "/update_weights_from_disk", structs.UpdateWeightFromDiskReqInput(str(folder / "full")))
    assert (answer.status, answer.value["success"], type(answer.value["message"])) == (200, True, str)
    theirs = {name: tensor.detach() for name, tensor in moved_base().named_parameters()}
    assert call(server, "/get_weights_checksum", structs.GetWeightsChecksumReqInput()).value == {
        "transformer": summed(theirs.items())
    }
    assert call(server, "/get_weights_checksum", structs.GetWeightsChecksumReqInput(["vae"])).value == {"vae": "not_found"}
    sums = checker.build_named_tensor_sha256(theirs.items())
    expected = structs.UpdateWeightFromTensorCheckerReqInput("transformer", sums)
    assert call(server, "/update_weights_from_tensor_checker", expected).value["success"] is True
    for path, asked in (
        ("/release_memory_occupation", structs.ReleaseMemoryOccupationReqInput()),
        ("/resume_memory_occupation", structs.ResumeMemoryOccupationReqInput()),
    ):
        answer = call(server, path, asked)
        assert (answer.status, answer.value["success"]) == (200, True)


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_its_pickles_are_refused_with_the_route_of_safetensors(server: Server, load_format: str | None) -> None:
    """A payload that would write a file if it was unpickled; one per GPU, and those of an adapter, too."""
    structs = real_sglang.part("entrypoints.post_training.io_struct")
    marker = Path(f"/tmp/fluvial-unpickled-{os.getpid()}")
    payload = base64.b64encode(b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR.").decode()
    for more in ({}, {"payload_gpu_uuids": ["a", "b"]}, {"weight_update_mode": "lora_merge", "lora_rank": 2}):
        asked = structs.UpdateWeightFromTensorReqInput([payload] * 2, load_format=load_format, **more)
        answer = call(server, "/update_weights_from_tensor", asked)
        assert (answer.status, answer.value["success"]) == (400, False)
        assert "/update_weights_from_disk" in answer.value["message"]
    assert not marker.exists()
    assert server.policy.version == 0


def test_adapters_are_set_with_its_requests(server: Server, folder: Path) -> None:
    """And `list_loras` has the fields and values of its own `get_lora_status`."""
    requests = real_sglang.part("entrypoints.control_requests")
    status = real_sglang.function("multimodal_gen/runtime/pipelines_core/lora/pipeline.py", "get_lora_status", Any=Any)
    paths = [str(folder / f"{name}.safetensors") for name in "xy"]
    asked = requests.SetLoraReq(["x", "y"], paths, strength=[0.5, 2.0], merge_mode="merge", lora_alpha=[None, 6])
    assert call(server, "/v1/set_lora", asked).value["status"] == "ok"
    theirs = SimpleNamespace(
        loaded_adapter_paths=dict(zip("xy", paths, strict=True)),
        modules={"transformer": 1},
        lora_layers={},
        _is_lora_effective_for_module=lambda name, layers: True,
        cur_adapter_config={"transformer": (["x", "y"], [0.5, 2.0])},
        cur_adapter_name={"transformer": "x,y"},
        cur_adapter_path={"transformer": ",".join(paths)},
        cur_adapter_strength={"transformer": 0.5},
        is_lora_merged={"transformer": False},
    )
    theirs.modules["fake_score_transformer"] = None
    assert call(server, "/v1/list_loras").value == status(theirs)
    assert call(server, "/v1/set_lora", requests.SetLoraReq("x")).value["status"] == "ok"  # cached
    assert server.policy.weights.adapters["transformer"].scaling == 1.0
    assert call(server, "/v1/merge_lora_weights", requests.MergeLoraWeightsReq(strength=0.25)).value["status"] == "ok"
    assert server.policy.weights.adapters["transformer"].scaling == 0.25
    assert call(server, "/v1/unmerge_lora_weights", requests.UnmergeLoraWeightsReq()).value["status"] == "ok"
    assert call(server, "/v1/list_loras").value["active"] == {}
    answer = call(server, "/v1/set_lora", requests.SetLoraReq("unknown"))
    assert (answer.status, type(answer.value["detail"])) == (400, str)
    unload = "srt/managers/io_struct.py"  # its server of language models has the only route that unloads
    assert real_sglang.fields(unload, "UnloadLoRAAdapterReqInput") == {"lora_name", "lora_id"}
    answer = call(server, "/unload_lora_adapter", {"lora_name": "x", "lora_id": None})
    assert real_sglang.fields(unload, "LoRAUpdateOutput") <= set(answer.value)
    assert (answer.value["success"], answer.value["loaded_adapters"]) == (True, {"y": paths[1]})


def test_images_are_made_with_its_requests(server: Server) -> None:
    """The image is that of a rollout with the seed; a list of seeds has one per image."""
    protocol = real_sglang.part("entrypoints.openai.protocol")
    asked = protocol.ImageGenerationsRequest(
        prompt="1", n=2, seed=[7, 3], response_format="b64_json", size="4x4", num_inference_steps=3, guidance_scale=1.0
    )
    answer = call(server, "/v1/images/generations", asked)
    assert answer.status == 200, answer.value
    found = protocol.ImageResponse(**answer.value)
    for each, seed in zip(found.data, (7, 3), strict=True):
        (sample,) = server.samples(seed=seed, rollout=False, width=4, height=4, num_inference_steps=3)
        with Image.open(io.BytesIO(base64.b64decode(str(each.b64_json)))) as image:
            assert (image.format, image.size) == ("PNG", (4, 4))
            red = torch.tensor(np.asarray(image)[..., 0]).long()
        assert torch.equal(red, (sample.generated_output[0] * 255).round().long())
    for file in ("jpeg", "webp"):
        asked = protocol.ImageGenerationsRequest(prompt="1", output_format=file, output_compression=10)
        (only,) = protocol.ImageResponse(**call(server, "/v1/images/generations", asked).value).data
        with Image.open(io.BytesIO(base64.b64decode(str(only.b64_json)))) as image:
            assert image.format == file.upper()


class Videos(tiny.Tiny):
    """Four frames of 16 x 16 pixels, which are drawn from 2 x 2 numbers."""

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        if (height, width, frames) != (16, 16, 4):
            raise ValueError(f"samples have 16 x 16 pixels and 4 frames, not {width} x {height} and {frames}")
        return (1, 4, 2, 2)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return super().decode(latents).expand(-1, 3, -1, -1, -1).repeat_interleave(8, -1).repeat_interleave(8, -2)


def decode_samples(file: bytes) -> torch.Tensor:
    """Return the frames of a file, `[F, H, W, 3]`."""
    av = pytest.importorskip("av")
    with av.open(io.BytesIO(file)) as container:
        assert container.streams.video[0].average_rate == 8
        return torch.tensor(np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]))


def test_videos_are_made_with_its_requests_and_its_client(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is the video of a rollout with its seed, but for what H.264 loses; jobs are listed, refused and forgotten."""
    pytest.importorskip("av")
    protocol, module, model = real_sglang.part("entrypoints.openai.protocol"), real_sglang.http_client(), Videos()
    waits = SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=lambda seconds: time.sleep(0.01))
    monkeypatch.setattr(module, "time", waits)
    cpu, weights = torch.device("cpu"), ServedWeights(base().eval(), roots=[folder])
    policy = ServedPolicy("tiny", model, weights, shape=(1, 4, 2, 2), steps=3, guidance=NO_GUIDANCE, device=cpu)
    videos = servers.served(policy)
    with running(videos) as url:
        client = module.SGLDiffusionServerAPI(url)
        made = client.generate_video(
            "1", size="16x16", num_frames=4, fps=8, seed=7, output_path=str(folder), extra_fields={"n": 2}
        )
        job, (_, second) = protocol.VideoResponse(**made), videos.samples(seed=7, rollout=False, num_outputs_per_prompt=2)
        assert (job.status, job.size, job.num_outputs, job.error) == ("completed", "16x16", 2, None)
        assert Path(str(job.file_path)).read_bytes()[4:8] == b"ftyp"
        file = httpx2.get(f"{url}/v1/videos/{job.id}/content?variant=1").content
        expected = second.generated_output.permute(1, 2, 3, 0) * 255
        assert (decode_samples(file).float() - expected).abs().mean() < 6
        with pytest.raises(RuntimeError, match="400"):
            client.generate_video("1", size="32x16", num_frames=4)
        fields, files = {"prompt": "1", "num_frames": "4", "size": "16x16"}, {"input_reference": ("a.png", b"")}
        refused = httpx2.post(f"{url}/v1/videos", data=fields, files=files)
        assert refused.json()["detail"].startswith("image_path is set, and this server samples from prompts without images")
        asked = protocol.VideoGenerationsRequest(prompt="1", enable_frame_interpolation=True)
        refused = httpx2.post(f"{url}/v1/videos", json=asked.model_dump())
        assert (refused.status_code, refused.json()["detail"][:26]) == (400, "enable_frame_interpolation")
        whole = protocol.VideoGenerationsRequest(prompt="1", size="16x16", num_frames=4).model_dump()
        assert set(httpx2.post(f"{url}/v1/videos", json=whole).json()) <= set(protocol.VideoResponse.model_fields)
        monkeypatch.setattr(Videos, "rate", 3, raising=False)  # frames per latent, by which a length in seconds is rounded
        timed = {"prompt": "1", "size": "16x16", "seconds": "1", "fps": 3}  # text, as OpenAI's client sends it
        assert httpx2.post(f"{url}/v1/videos", json=timed).json()["seconds"] == "1"
        listed = protocol.VideoListResponse(**httpx2.get(f"{url}/v1/videos").json())
        assert [listed.last_id, len(listed.data)] == [job.id, 3]
        assert httpx2.get(f"{url}/v1/videos?limit=1").status_code == 400
        assert httpx2.delete(f"{url}/v1/videos/{job.id}").json()["status"] == "deleted"
        assert httpx2.get(f"{url}/v1/videos/{job.id}").status_code == 404
    answer = call(server, "/v1/videos", protocol.VideoGenerationsRequest(prompt="1"))
    assert (answer.status, "the model makes images" in answer.value["detail"]) == (400, True)


def test_groups_of_another_backend_are_refused(server: Server) -> None:
    """The fields are those of sglang's main branch; its wheel has no such routes for diffusion yet."""
    where = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    answer = call(server, "/init_weights_update_group", {**where, "group_name": "weights", "backend": "nccl"})
    assert (answer.status, answer.value["message"]) == (400, "backend is 'nccl', expected gloo")
    assert call(server, "/destroy_weights_update_group", {"group_name": "weights"}).value["success"] is True


def test_edits_take_the_fields_of_its_form(server: Server) -> None:
    """At their defaults, with an image, which the tiny model is the first to refuse."""
    request = httpx2.Request("POST", "http://served", files=[("image[]", ("a.png", b"")), *real_sglang.form_of_edits()])
    headers = {"content-type": request.headers["content-type"]}
    answer = asyncio.run(asgi.call(server.app, "/v1/images/edits", body=request.read(), headers=headers))
    assert answer.status == 400
    assert answer.value["detail"].startswith("image_path is set, and this server samples from prompts without images")


def test_its_http_client_finds_the_model_makes_images_and_sets_adapters(url: str, folder: Path) -> None:
    client = real_sglang.http_client().SGLDiffusionServerAPI(url)
    info = client.get_model_info()
    assert (info["id"], info["task_type"], info["num_gpus"], info["dit_precision"]) == ("tiny", "T2I", 0, "fp32")

    def generated(seed: int) -> Any:
        return client.generate_image("1", size="4x4", n=2, seed=seed, num_inference_steps=3, enable_teacache=False)["data"]

    made = [generated(seed) for seed in (5, 5, 6)]
    assert made[0] == made[1] != made[2]
    assert len(made[0]) == 2
    assert client.set_lora("x", str(folder / "x.safetensors"), strength=0.5)["status"] == "ok"
    assert generated(5) != made[0]
    assert client.unset_lora()["status"] == "ok"
    assert client.set_lora("x", target="transformer")["status"] == "ok"
    assert client.unset_lora()["status"] == "ok"
    assert generated(5) == made[0]
    with pytest.raises(RuntimeError, match="Failed to set LoRA adapter: 400"):
        client.set_lora("unknown")


def test_probes_and_gateways_find_what_its_own_handlers_answer(server: Server, url: str) -> None:
    """Its own wait for a server ends, and our answers have all fields of its handlers, of the same types."""
    waited = real_sglang.function(HTTP, "_wait_until_http_live", asyncio=asyncio, httpx=httpx2)
    asyncio.run(asyncio.wait_for(waited(SimpleNamespace(url=lambda: url)), 10))
    task = SimpleNamespace(name="T2I", is_image_gen=lambda: True, accepts_image_input=lambda: False)
    task.data_type = lambda: SimpleNamespace(name="IMAGE")
    config = SimpleNamespace(task_type=task, get_supported_task_types=lambda: [task])
    settings = SimpleNamespace(model_path="tiny", served_model_name="tiny", tp_size=1, dp_size=1, pipeline_config=config)
    request = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(server_args=settings)))
    info = real_sglang.function(HTTP, "server_info_endpoint", __version__="1")
    assert {name: type(each) for name, each in asyncio.run(info(request)).items()}.items() <= types(server, "/server_info")
    common = SimpleNamespace(get_served_pipeline_class=lambda settings: tiny.Tiny)
    monkey = pytest.MonkeyPatch()
    monkey.setitem(__import__("sys").modules, "sglang.multimodal_gen.runtime.entrypoints.openai.common_api", common)
    try:
        theirs = asyncio.run(real_sglang.function(HTTP, "model_info_endpoint", logger=None)(request))
    finally:
        monkey.undo()
    assert theirs.items() <= call(server, "/model_info").value.items()
    assert asyncio.run(real_sglang.function(HTTP, "liveness")()).items() <= call(server, "/liveness").value.items()
    assert call(server, "/health").value["status"] == call(server, "/health_generate").value["status"] == "ok"
    cards = "multimodal_gen/runtime/entrypoints/openai/common_api.py"
    fields = real_sglang.fields(cards, "ModelCard") | real_sglang.fields(cards, "DiffusionModelCard")
    (card,) = call(server, "/v1/models").value["data"]
    assert fields == set(card)
    assert call(server, "/v1/models/tiny").value == card
    assert call(server, "/v1/models/other").status == 404
    assert call(server, "/v1/model_info").value["model_path"] == "tiny"


def types(server: Server, path: str) -> Any:
    return {name: type(each) for name, each in call(server, path).value.items()}.items()
