"""Pushes of weights to a server in the main rank's process, for test_weights.py and test_ranks.py."""

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from helpers import tiny_token_job, tiny_transformers
from helpers.fake_servers import loopback
from helpers.weight_servers import adapted, base, engine_of, move, moved_base, run, served
from safetensors.torch import load_file
from torch import nn

import fluvial.engines.export.model_folder as exporting
from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError
from fluvial.engines.extensions.remote.weight_sync import Method, WeightSync
from fluvial.engines.extensions.wire.client import HttpClient
from fluvial.engines.extensions.wire.weight_buckets import BROADCAST, SHARED_FILES, compute_checksum
from fluvial.models.lora import LoraConfig, add_lora


class Noting:
    """Client of a server that notes the bytes of every file that a request names."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.address, self.sent = inner, inner.address, list[str]()

    def get(self, path: str) -> Any:
        return self.inner.get(path)

    def post(self, path: str, value: Any) -> Any:
        named = value.get("serialized_named_tensors", ()) if value.get("load_format") == SHARED_FILES else ()
        buckets = [Path(json.loads(text)["file"]) for text in named]
        self.sent += ["broadcast"] * (value.get("load_format") == BROADCAST)
        folders = [Path(value[name]) for name in ("model_path", "lora_path") if name in value]
        files = [*buckets, *(file for folder in folders for file in sorted(folder.rglob("*.safetensors")))]
        self.sent += [_digest(file) for file in files]
        return self.inner.post(path, value)


def _digest(file: Path) -> str:
    """Return the SHA-256 of a bucket, or of the tensors of a file, whose header may hold its settings in any order."""
    if file.suffix == ".safetensors":
        return compute_checksum(sorted(load_file(file).items()))
    return hashlib.sha256(file.read_bytes()).hexdigest()


def pushes(world: World, folder: str) -> dict[str, Any]:
    """Push an adapter over another base, all weights and buckets; return what was sent, and what the server computes."""
    result: dict[str, Any] = {}
    for method, module in {
        "lora": adapted(moved_base()),
        "disk": adapted(base()),
        "full": moved_base(),
        "shared_memory": moved_base(),
        "broadcast": moved_base(),
        "broadcast lora": adapted(moved_base()),
    }.items():
        engine = engine_of(module, world, comm="reshard")
        if method in ("lora", "disk", "broadcast lora"):
            move(engine, seed=0)
        server = served(Path(folder))
        peer: Any = Noting(server.client)
        ways: dict[str, Method] = {"disk": "disk", "shared_memory": "shared_memory", "broadcast": "broadcast"}
        sync = WeightSync(world, folder=Path(folder), method=ways.get(method.split()[0], "auto"), bucket_bytes=3000)
        failed = sync.push(engine, 3, [peer])
        result[method] = {"failed": failed, "sent": peer.sent} if world.is_main else {"failed": failed}
        if world.is_main:
            result[method]["output"] = run(server.weights.module).tolist()
            result[method]["version"] = server.weights.version
        try:
            sync.push(engine, 4, [])
        except RunError as error:
            result[method]["without servers"] = str(error)
        sync.close()
    return result


def killed(folder: str, method: str) -> None:
    """Push once, and die in the middle of the second push: when half a file is written."""
    from fluvial.engines.engine.world import init_world

    with init_world() as world:
        engine = engine_of(adapted(base()) if method == "auto" else moved_base(), world)
        server = served(Path(folder))
        sync = WeightSync(world, folder=Path(folder))
        sync.push(engine, 1, [server.client])

        def half(tensors: Any, path: Path, **options: Any) -> None:
            path.write_bytes(b"half of a file")
            os.kill(os.getpid(), signal.SIGKILL)

        exporting.save_tensors = half  # type: ignore[assignment]
        with torch.no_grad():
            sync.push(engine, 2, [server.client])


def fill_shards(engine: Engine, version: int) -> None:
    """Set all that is trained to the number of a version, so that those of one push are told from those of two."""
    for shard in engine.sharded.shards(trainable=True).values():
        shard.fill_(float(version))


def adapted_tokens() -> nn.Module:
    """Return the network of `tiny_token_job` with an adapter."""
    module = tiny_transformers.flux()
    add_lora(module, LoraConfig(rank=2, alpha=3.0), tiny_token_job.Toy.lora_targets)
    return module


def fill(folder: str, url: str, method: Method, model: str) -> None:
    """Push weights without end, each push of one number, from the one after the server's."""
    from fluvial.engines.engine.world import init_world

    with init_world() as world:
        module = {"tokens": tiny_transformers.flux, "adapter": adapted_tokens}[model]()
        peer, engine = HttpClient(url, patience=0), Engine(module, [], OptimizerConfig(), world, updates=1)
        sync = WeightSync(world, folder=Path(folder), method=method, bucket_bytes=500)
        version = int(peer.post("/v1/unmerge_lora_weights", {})["weight_version"])
        while True:
            version += 1
            fill_shards(engine, version)
            assert sync.push(engine, version, [peer]) == {}


def serve(folder: str) -> None:
    """Serve weights until the end."""
    with loopback(served(Path(folder)).handle) as url:
        print(f"serving weights on {url}", flush=True)
        signal.pause()
