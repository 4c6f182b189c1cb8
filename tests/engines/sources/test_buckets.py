"""Buckets: where tensors lie in them, and the payload of CUDA IPC with a stand-in for sglang's class."""

import base64
import sys
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from weight_servers import engine_of, moved_base

import fluvial.engines.sources.weights as syncing
from fluvial.engines.errors import UsageError
from fluvial.engines.fsdp.world import init_world
from fluvial.engines.sources.buckets import ipc_payload, ipc_request
from fluvial.engines.sources.weights import WeightSync
from fluvial.engines.wire.errors import WireError
from fluvial.engines.wire.weights import SharedBucket, buckets, checksum, flattened, shared_bucket

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(2.0), "c": torch.ones(3, dtype=torch.bfloat16),
    "d": torch.arange(40.0), "e": torch.ones(2), "f": torch.ones(0, 4),
}  # fmt: skip


@dataclass
class Metadata:
    """The fields of sglang's FlattenedTensorMetadata."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


def test_buckets_hold_every_tensor_once() -> None:
    """In their order, of one dtype, within the bytes unless one tensor alone is larger."""
    plan = buckets(TENSORS, most_bytes=64)
    assert [[place.name for place in places] for places in plan] == [["a", "b"], ["c"], ["d"], ["e", "f"]]
    for places in plan:
        flat = flattened(places, [TENSORS[place.name] for place in places])
        assert len({place.dtype for place in places}) == 1
        assert flat.numel() == places[-1].end_idx
        for place in places:
            found = flat[place.start_idx : place.end_idx].view(place.dtype).reshape(place.shape)
            assert torch.equal(found, TENSORS[place.name])
    assert buckets({}, most_bytes=64) == []


def test_a_bucket_travels_as_json() -> None:
    places = buckets(TENSORS, most_bytes=64)[0]
    bucket = SharedBucket("push", 0, 4, "transformer", "/dev/shm/x", places)
    assert shared_bucket(bucket.as_json()) == bucket
    for value, says in {1: "the body is of type int", (): "push is missing"}.items():
        with pytest.raises(WireError, match=says):
            shared_bucket(dict(value) if value == () else value)


def sglang(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put a stand-in for sglang's modules in the place of those; return what it was asked for."""
    calls: list[str] = []
    patch: Any = ModuleType("sglang.srt.utils.patch_torch")
    patch.monkey_patch_torch_reductions = lambda: calls.append("patched")
    bucket: Any = ModuleType("sglang.srt.weight_sync.tensor_bucket")
    bucket.FlattenedTensorMetadata = Metadata
    for name in ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.weight_sync"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, patch.__name__, patch)
    monkeypatch.setitem(sys.modules, bucket.__name__, bucket)
    return calls


def test_a_payload_is_what_sglang_unpickles(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, places = sglang(monkeypatch), buckets(TENSORS, most_bytes=64)[0]
    flat = flattened(places, [TENSORS[place.name] for place in places])
    payload = ipc_payload("transformer", places, flat)
    found = ForkingPickler.loads(base64.b64decode(payload))
    assert calls == ["patched"]
    assert torch.equal(found["transformer"]["flattened_tensor"], flat)
    assert found["transformer"]["metadata"][0] == Metadata("a", torch.Size([2, 3]), torch.float32, 0, 24, 6)
    assert [each.name for each in found["transformer"]["metadata"]] == ["a", "b"]
    request = ipc_request("transformer", [("GPU-1", payload), ("GPU-2", "y")], version=3)
    assert request == {
        "load_format": "flattened_bucket", "serialized_named_tensors": [payload, "y"],
        "payload_gpu_uuids": ["GPU-1", "GPU-2"], "target_modules": ["transformer"], "weight_version": "3",
    }  # fmt: skip


def test_a_push_by_ipc_holds_all_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In buckets of one network each, with the handle of every rank; run on the CPU."""

    class Sglang:
        """Unpickles buckets as sglang does, and keeps their tensors."""

        address = "http://sglang"

        def __init__(self) -> None:
            self.held: dict[str, torch.Tensor] = {}

        def get(self, path: str) -> Any:
            """Return the list of models."""
            return {"data": [{"dit_precision": "bf16"}]}

        def post(self, path: str, value: Any) -> Any:
            """Take a bucket, or return the checksum of what is there."""
            if path == "/get_weights_checksum":
                return {"transformer": checksum(sorted(self.held.items()))}
            (payload,), (gpu,) = value["serialized_named_tensors"], value["payload_gpu_uuids"]
            assert gpu == "GPU-7"
            (found,) = ForkingPickler.loads(base64.b64decode(payload)).values()
            for each in found["metadata"]:
                raw = found["flattened_tensor"][each.start_idx : each.end_idx]
                self.held[each.name] = raw.view(each.dtype).reshape(each.shape).clone()
            return {"success": True, "message": ""}

    sglang(monkeypatch)
    monkeypatch.setattr(syncing, "gpu_uuid", lambda device: "GPU-7")
    monkeypatch.setattr(syncing, "check_gpu", lambda device: None)
    peer, module = Sglang(), moved_base()
    with init_world() as world:
        sync = WeightSync(world, folder=tmp_path, method="cuda_ipc", bucket_bytes=2000)
        assert sync.push(engine_of(module, world), 1, [peer]) == {}
        assert "not kept" in str(sync.repeat(peer))
        sync.close()
    expected = moved_base().to(torch.bfloat16).state_dict()
    assert set(peer.held) == set(expected)
    assert all(torch.equal(peer.held[name], expected[name]) for name in expected)


def test_without_sglang_it_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"^tensors go to .* in sglang's own class, and sglang is [^\n]*$"):
        ipc_payload("transformer", buckets(TENSORS, most_bytes=64)[0], torch.zeros(28, dtype=torch.uint8))
