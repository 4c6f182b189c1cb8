"""Weight sync: servers compute with the trainer's weights after a push, or are named as those that do not.

Two ranks push what one does, and a trainer that is killed leaves nothing to take.
"""

import asyncio
import gc
import json
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from helpers import asgi, launch
from helpers.fake_servers import loopback
from helpers.tiny_jobs import Tiny
from helpers.weight_servers import Served, adapted, ask, base, engine_of, move, moved_base, run, served
from torch import Tensor, nn
from workers import pushes
from workers.pushes import fill_shards

from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.extensions.remote.push_folder import LOCK
from fluvial.engines.extensions.remote.weight_sync import FACTOR_METHODS, METHODS, Method, WeightSync
from fluvial.engines.extensions.wire.client import HttpClient
from fluvial.engines.extensions.wire.weight_buckets import Checksum
from fluvial.models.lora import Dora, Lokr, copy_adapter, find_lora_layers, use_adapter
from fluvial.models.lora_layer import Product
from fluvial.models.pipelines.wan import EXPERTS


@pytest.fixture
def lora(one: World) -> Engine:
    """An engine that trains an adapter, which is not where it started."""
    engine = engine_of(adapted(base()), one)
    move(engine, seed=0)
    return engine


def output(engine: Engine) -> torch.Tensor:
    with engine.inference() as module:
        return run(module)


def test_an_adapter_is_pushed_by_its_file(tmp_path: Path, one: World, lora: Engine) -> None:
    """To the bit; the base is equal, and is not sent. It has one name, and a path per push, so that sglang reads it."""
    server, sync, listed = served(tmp_path), WeightSync(one, folder=tmp_path), list[dict[str, str]]()
    for version in (3, 4, 5):
        move(lora, seed=version)
        assert sync.push(lora, version, [server.client]) == {}
        assert torch.equal(run(server.weights.module), output(lora))
        assert server.weights.version == version
        assert [path.name for path in sync.path.iterdir() if path.is_dir()] == [f"lora-{version}"]
        listed += server.client.get("/v1/list_loras")["loaded_adapters"]
    assert server.requests.count("/v1/set_lora") == 3
    assert "/update_weights_from_disk" not in server.requests
    assert [len({each[name] for each in listed}) for name in ("nickname", "path")] == [1, len(listed)] == [1, 3]
    sync.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", FACTOR_METHODS)
def test_the_base_is_pushed_once_to_a_server_that_has_another(tmp_path: Path, one: World, method: Method) -> None:
    """And does not stay in the folder, which may be memory."""
    engine = engine_of(adapted(moved_base()), one)
    move(engine, seed=0)
    server, sync = served(tmp_path), WeightSync(one, folder=tmp_path, method=method)
    for version in (1, 2):
        assert sync.push(engine, version, [server.client]) == {}
        assert torch.equal(run(server.weights.module), output(engine))
        assert not list(sync.path.glob("base-*"))
    assert server.requests.count("/update_weights_from_disk") == 1
    sync.forget(server.client.address)  # it may have started again, and has not
    assert sync.push(engine, 3, [server.client]) == {}
    assert server.requests.count("/update_weights_from_disk") == 1


@pytest.mark.parametrize("method", ["auto", "shared_memory", "broadcast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_weights_are_pushed(tmp_path: Path, one: World, method: Any, dtype: torch.dtype) -> None:
    """To the bit, in the server's dtype, in one folder or in several buckets."""
    engine, server = engine_of(moved_base(), one), served(tmp_path, dtype=dtype)
    sync = WeightSync(one, folder=tmp_path, method=method, bucket_bytes=2000)
    assert sync.push(engine, 7, [server.client]) == {}
    expected = moved_base().to(dtype).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in server.weights.module.state_dict().items())
    assert server.weights.version == 7
    assert (server.requests.count("/update_weights_from_tensor") > 2) == (method != "auto")


def test_an_adapter_is_pushed_as_it_computes(tmp_path: Path, one: World, lora: Engine) -> None:
    """Merged; with the product of its layers, whose rounding the bits show; or another one than that which is trained."""
    merged: list[tuple[Method, Engine]] = [("disk", lora)]
    merged += [(method, engine_of(adapted(base(), form=form), one)) for method in METHODS for form in (Dora(), Lokr())]
    for method, engine in merged:
        move(engine, seed=0)
        server = served(tmp_path)
        assert WeightSync(one, folder=tmp_path, method=method).push(engine, 1, [server.client]) == {}
        assert server.weights.adapters == {}
        torch.testing.assert_close(run(server.weights.module), output(engine), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(run(server.weights.module), run(base()))
    products: tuple[Product, ...] = ("factors", "merged")
    for product in products:
        engine, server = engine_of(adapted(base(), product=product), one), served(tmp_path)
        move(engine, seed=0)
        WeightSync(one, folder=tmp_path, product=product).push(engine, 1, [server.client])
        assert torch.equal(run(server.weights.module), output(engine))
    engine, server = engine_of(adapted(base(), "default", "old"), one), served(tmp_path)
    move(engine, seed=1)
    copy_adapter(engine.module, "default", "old")
    move(engine, seed=2)
    WeightSync(one, folder=tmp_path).push(engine, 1, [server.client], adapter="old")
    with engine.inference() as inner, use_adapter(inner, "old"):
        assert torch.equal(run(server.weights.module), run(inner))


@pytest.mark.parametrize("method", ["shared_memory", "broadcast"])
def test_an_adapter_in_buckets_is_what_its_file_is(tmp_path: Path, one: World, lora: Engine, method: Method) -> None:
    """To the bit, for several servers, which keep their group where there is one; no file stays."""
    servers = [served(tmp_path, name=f"localhost:{number}") for number in (1, 2)]
    sync = WeightSync(one, folder=tmp_path, method=method)
    with pytest.raises(RunError, match="no server took the weights of update 0: there is none"):
        sync.push(lora, 0, [])
    for version, factor in ((1, 1), (2, 2)):
        move(lora, seed=version)
        cast(Any, lora.module).peft_config["default"].lora_alpha *= factor
        for layer in find_lora_layers(lora.module).values():
            layer.lora_alpha["default"] *= factor
            layer.scaling["default"] *= factor
        assert sync.push(lora, version, [server.client for server in servers]) == {}
        assert {server.weights.version for server in servers} == {version}
        assert all(torch.equal(run(server.weights.module), output(lora)) for server in servers)
        assert [path.name for path in sync.path.iterdir()] == [LOCK]
    groups = [server.requests.count("/init_weights_update_group") for server in servers]
    assert groups == [int(method == "broadcast")] * 2
    sync.close()


def test_a_broadcast_begins_again_without_a_server_that_fails(tmp_path: Path, one: World, lora: Engine) -> None:
    """One that knows no groups, one that refuses a bucket, and one that has restarted and so left its group."""
    good, bad = served(tmp_path), served(tmp_path)
    for path, answer, says in (
        ("/destroy_weights_update_group", RunError("answered 404"), "404"),
        ("/update_weights_from_tensor", lambda answer: {"success": False, "message": "no"}, "refused: no"),
        ("/get_weights_checksum", lambda found: {**found, **dict.fromkeys({*found} & LORA, "0")}, "another checksum"),
    ):
        sync = WeightSync(one, folder=tmp_path, method="broadcast", bucket_bytes=1000)
        broken: Any = Broken(bad.client, path, answer)
        for version in (1, 2):
            move(lora, seed=version)
            failed = sync.push(lora, version, [good.client, broken])
            assert [*failed] == ["http://localhost:9"]
            assert says in failed["http://localhost:9"]
            assert torch.equal(run(good.weights.module), output(lora))
        broken.path = ""
        assert sync.push(lora, 3, [good.client, broken]) == {}
        sync.close()
    assert torch.equal(run(bad.weights.module), output(lora))


WRONG_BUCKETS: dict[str, dict[str, Any]] = {
    "there is no group": {"file": "other"},
    "more than all weights": {"places": [{"name": "x", "shape": [10**6], "numel": 10**6, "end_idx": 4 * 10**6}]},
}


def test_wrong_groups_are_one_line(tmp_path: Path) -> None:
    server, group = served(tmp_path), {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    assert (
        "expected gloo" in ask(server, "/init_weights_update_group", **group, group_name="a", backend="nccl").value["detail"]
    )
    place = {"name": "x", "shape": [1], "dtype": "torch.float32", "start_idx": 0, "end_idx": 4, "numel": 1}
    bucket = {"push": "p", "index": 0, "count": 1, "module": "transformer", "file": "a", "places": [place]}
    server.routes.group = cast(Any, SimpleNamespace(name="a", broadcast=lambda flat: None))
    for says, changes in WRONG_BUCKETS.items():
        changed = {**bucket, **changes, "places": [{**place, **each} for each in changes.get("places", [{}])]}
        asked: dict[str, Any] = {"load_format": "fluvial_broadcast", "serialized_named_tensors": [json.dumps(changed)]}
        found = ask(server, "/update_weights_from_tensor", **asked)
        assert found.status in (400, 409)
        assert says in found.value["detail"], found.value
    for module, tensor in (("transformer.lora", "x.lora_A.weight"), ("transformer.lora", "into.lora_A.weight")):
        changed = {**bucket, "module": module, "places": [{**place, "name": tensor, "shape": [1, 1]}]}
        asked = {"load_format": "fluvial_broadcast", "serialized_named_tensors": [json.dumps(changed)], "lora_alpha": 1.0}
        assert "fit no linear layer" in ask(server, "/update_weights_from_tensor", **asked).value["detail"]


@pytest.mark.parametrize("method", ["auto", "disk", "shared_memory", "broadcast"])
def test_the_adapter_of_another_run_is_taken_off(tmp_path: Path, one: World, lora: Engine, method: Any) -> None:
    """Also by a server that keeps it over new weights, as sglang does; and one that has it still is left out."""
    server, full = served(tmp_path), engine_of(moved_base(), one)
    WeightSync(one, folder=tmp_path).push(lora, 1, [server.client])
    assert server.weights.adapters

    def kept(found: dict[str, str]) -> dict[str, str]:
        return {**found, **dict.fromkeys({*found} & {"transformer.lora"}, "0" * 64)}

    stubborn: Any = Broken(server.client, "/get_weights_checksum", kept)
    with pytest.raises(RunError, match="another checksum"):
        WeightSync(one, folder=tmp_path, method=method).push(full, 2, [stubborn])
    WeightSync(one, folder=tmp_path).push(lora, 3, [server.client])
    server.requests.clear()
    WeightSync(one, folder=tmp_path, method=method).push(full, 4, [server.client])
    changes = [path for path in server.requests if "unmerge" in path or "update_weights" in path]
    assert changes[0] == "/v1/unmerge_lora_weights"
    assert torch.equal(run(server.weights.module), output(full))


class Pair(nn.ModuleDict):
    """Two nets, each with half of the output."""

    def __init__(self, *seeds: int) -> None:
        super().__init__({name: Tiny(seed=seed).build() for name, seed in zip(EXPERTS, seeds, strict=True)})

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([network(*inputs) for network in self.values()])


def test_both_networks_of_a_model_are_pushed(tmp_path: Path, one: World) -> None:
    lora = Engine(adapted(Pair(0, 1)), [], OptimizerConfig(), one, updates=1)
    for name, shard in lora.sharded.shards(trainable=True).items():
        shard.fill_(0.1 if "transformer_2" in name else 0.2)
    full = Engine(Pair(2, 3), [], OptimizerConfig(), one, updates=1)
    server = Served(Pair(0, 1).eval(), [tmp_path])
    for method in METHODS:
        for engine in (lora, full) if method in FACTOR_METHODS else (full,):
            assert WeightSync(one, folder=tmp_path, method=method).push(engine, 1, [server.client]) == {}
            with engine.inference() as module:
                assert torch.equal(run(server.weights.module), run(module))
            assert set(server.weights.adapters) == (set(EXPERTS) if engine is lora else set())
            asyncio.run(asgi.call(server.app, "/v1/unmerge_lora_weights", {}))


class Buffered(nn.Module):
    """A net with a buffer that bfloat16 would round."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("angles", torch.full((3,), 1 / 3))


def test_buffers_of_a_server_in_bfloat16_are_not_rounded(tmp_path: Path, one: World) -> None:
    module = Buffered()
    module.get_buffer("angles").fill_(1 / 7)
    trained = module.inner.weight.detach().clone()
    engine = Engine(module, [], OptimizerConfig(), one, updates=1)
    other = Buffered()
    other.inner.to(torch.bfloat16)
    server = Served(other, [tmp_path])
    assert WeightSync(one, folder=tmp_path).push(engine, 1, [server.client]) == {}
    assert torch.equal(other.get_buffer("angles"), torch.full((3,), 1 / 7))
    assert torch.equal(other.inner.weight, trained.to(torch.bfloat16))


class Broken:
    """A server that is down, or whose answers are changed on the way."""

    def __init__(self, inner: Any, path: str, answer: Any) -> None:
        self.inner, self.path, self.answer, self.address = inner, path, answer, "http://localhost:9"

    def get(self, path: str) -> Any:
        return self._changed(path, self.inner.get(path))

    def post(self, path: str, value: Any) -> Any:
        return self._changed(path, self.inner.post(path, value))

    def _changed(self, path: str, answer: Any) -> Any:
        if path != self.path:
            return answer
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer(answer)


LORA = {"transformer.lora"}
DOWN = RunError("http://localhost:9/v1/set_lora cannot be reached: Connection refused")


@pytest.mark.parametrize(
    ("path", "answer", "says"),
    [
        ("/v1/set_lora", DOWN, "cannot be reached"),
        ("/v1/set_lora", lambda answer: {"success": False, "message": "no"}, "refused: no"),
        ("/get_weights_checksum", lambda answer: dict.fromkeys(answer, "0" * 64), "has other base weights"),
        ("/get_weights_checksum", lambda answer: {}, "has other base weights"),
        ("/get_weights_checksum", lambda found: {**found, **dict.fromkeys({*found} & LORA, "0")}, "another checksum"),
        # It has restarted with other base weights since these were compared.
        ("/get_weights_checksum", lambda found: found | {"transformer": "0"} if len(found) > 1 else found, "another che"),
        ("/v1/models", RunError("http://localhost:9/v1/models did not answer"), "did not answer"),
    ],
)
def test_a_server_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, one: World, lora: Engine, path: str, answer: Any, says: str
) -> None:
    good, bad = served(tmp_path), served(tmp_path)
    sync = WeightSync(one, folder=tmp_path)
    broken: Any = Broken(bad.client, path, answer)
    failed = sync.push(lora, 1, [good.client, broken])
    assert list(failed) == ["http://localhost:9"]
    assert says in failed["http://localhost:9"]
    assert torch.equal(run(good.weights.module), output(lora))
    with pytest.raises(RunError, match=r"^no server took the weights of update 2: [^\n]*$"):
        sync.push(lora, 2, [broken])
    broken.path = ""  # it is well again
    assert sync.push(lora, 3, [good.client, broken]) == {}
    assert torch.equal(run(bad.weights.module), output(lora))


def test_an_adapter_without_a_checksum_has_to_be_listed(tmp_path: Path, one: World, lora: Engine) -> None:
    """As in sglang, whose checksum of an adapted base is of other names."""
    server = served(tmp_path)

    class Sglang(Broken):
        """Knows no checksum of adapters, and lists what `listed` says."""

        listed = True

        def post(self, path: str, value: Any) -> Any:
            answer = self.inner.post(path, value)
            return answer | dict.fromkeys({*answer} & LORA, "not_found") if "sum" in path else answer

        def get(self, path: str) -> Any:
            return self.inner.get(path) if self.listed or "list" not in path else {"loaded_adapters": []}

    sync = WeightSync(one, folder=tmp_path)
    peer: Any = Sglang(server.client, "", None)
    assert sync.push(lora, 1, [peer]) == {}
    peer.listed = False
    with pytest.raises(RunError, match="accepted the adapter of update 2, and does not list it"):
        sync.push(lora, 2, [peer])


def test_a_server_that_comes_back_is_given_the_last_push(tmp_path: Path, one: World, lora: Engine) -> None:
    sync = WeightSync(one, folder=tmp_path)
    assert "not kept" in str(sync.repeat(served(tmp_path).client))
    sync.push(lora, 5, [served(tmp_path).client])
    back = served(tmp_path)
    assert sync.repeat(back.client) is None
    assert torch.equal(run(back.weights.module), output(lora))
    assert back.weights.version == 5
    other = Served(moved_base().eval(), [tmp_path])
    assert "has other base weights" in str(sync.repeat(other.client))
    assert other.weights.version == 0
    assert sync.push(lora, 6, [other.client]) == {}  # which brings the base, too
    assert torch.equal(run(other.weights.module), output(lora))
    full = engine_of(moved_base(), one)
    sync.push(full, 7, [back.client])
    again = served(tmp_path)
    assert sync.repeat(again.client) is None
    assert torch.equal(run(again.weights.module), output(full))


def test_wrong_settings_are_one_line(tmp_path: Path, one: World, lora: Engine) -> None:
    with pytest.raises(UsageError, match=r"servers.weights is 'nccl', expected one of auto, disk, shared_memory, broadcast"):
        WeightSync(one, folder=tmp_path, method="nccl")  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"weights_folder is .*file/x, which cannot be written: Not a directory"):
        WeightSync(one, folder=tmp_path / "file" / "x")
    with pytest.raises(RunError, match="no server took the weights of update 1: there is none"):
        WeightSync(one, folder=tmp_path).push(lora, 1, [])


@pytest.mark.parametrize("train", ["all", "adapter", "buckets"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_hashed_once_per_push(
    tmp_path: Path, one: World, monkeypatch: pytest.MonkeyPatch, train: str, dtype: torch.dtype
) -> None:
    """However many servers there are; the base, which an adapter leaves as it is, once per run."""
    hashed, add = list[str](), Checksum.add

    def counted(self: Checksum, name: str, tensor: Tensor) -> None:
        hashed.append(name)
        add(self, name, tensor)

    engine = engine_of(adapted(base()) if train == "adapter" else base(), one)
    servers = [served(tmp_path, name=f"served{number}", dtype=dtype) for number in range(3)]
    sync = WeightSync(one, folder=tmp_path, method="shared_memory" if train == "buckets" else "auto", bucket_bytes=1000)
    monkeypatch.setattr(Checksum, "add", counted)
    tensors, each = len(base().state_dict()), list[int]()
    for version in (1, 2, 3):
        if train == "adapter":
            move(engine, seed=version)
        before = len(hashed)
        assert sync.push(engine, version, [server.client for server in servers]) == {}
        each.append(len(hashed) - before)
    changed = [path for path in servers[0].requests if "disk" in path]
    assert len(changed) == (3 if train == "all" else 0)  # a base in bfloat16 is the trainer's, rounded
    if train != "adapter":  # by the trainer; by each server of the files, whose bytes it copies
        assert each == [tensors * (1 + len(servers))] * 3
    else:  # two factors of each layer and the scale; in the first push the base too
        factors = 2 * len(find_lora_layers(engine.module)) + 1
        assert each == [(tensors + factors) * (1 + len(servers)), *[factors * (1 + len(servers))] * 2]


@pytest.mark.long
def test_a_server_holds_no_more_after_many_pushes(tmp_path: Path, one: World, lora: Engine) -> None:
    """An adapter takes the place of the one before, in the server's memory and on the disk."""
    server, sync = served(tmp_path), WeightSync(one, folder=tmp_path)

    def held() -> tuple[int, int, int]:
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
        files = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
        return len(tensors), sum(each.numel() * each.element_size() for each in tensors), files

    counts = []
    gc.collect()
    gc.freeze()  # what is there already is not looked at each time
    for version in range(1, 13):
        move(lora, seed=version)
        assert sync.push(lora, version, [server.client]) == {}
        counts.append(held())
    gc.unfreeze()
    assert counts[2:] == [counts[2]] * 10


def test_two_ranks_push_what_one_does(tmp_path: Path, one: World) -> None:
    main, other = launch.on_ranks(2, "workers.pushes:pushes", tmp_path / "two")
    alone = pushes.pushes(one, str(tmp_path / "one"))
    assert main == alone
    for method, found in other.items():
        assert found == {name: alone[method][name] for name in ("failed", "without servers")}
    assert all(found["sent"] for found in alone.values())
    assert alone["lora"]["without servers"] == "no server took the weights of update 4: there is none"
    assert list((tmp_path / "two").iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("method", ["disk", "shared_memory", "broadcast"])
def test_a_server_that_is_killed_in_a_push_harms_no_other(tmp_path: Path, one: World, method: Any) -> None:
    """With kill -9 at random moments: the other one has all tensors of the push. Of trainers see `test_ranks.py`."""
    server, delays = served(tmp_path), random.Random(0)
    engine = engine_of(base(), one)
    sync = WeightSync(one, folder=tmp_path, method=method, bucket_bytes=500)
    with loopback(server.handle) as url:
        for _ in range(3):
            with launch.Process("workers.pushes:serve", tmp_path, environment=launch.environment()) as process:
                peers = [HttpClient(url, patience=0), HttpClient(process.address(), patience=0)]
                timer = threading.Timer(delays.uniform(0.3, 0.6), process.kill)
                timer.start()
                version, failed = server.weights.version, dict[str, str]()
                while not failed:
                    version += 1
                    fill_shards(engine, version)
                    failed = sync.push(engine, version, peers)
                    tensors = server.weights.module.state_dict().values()
                    assert {float(number) for tensor in tensors for number in tensor.unique()} == {float(version)}
                assert [*failed] == [peers[1].address]
                assert process.wait(120) == -9
    sync.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("method", ["auto", "full"])
def test_a_trainer_that_is_killed_leaves_nothing_to_take(tmp_path: Path, one: World, method: str) -> None:
    """Its last complete push stays until another trainer comes; the one it was writing is hidden."""
    with launch.Process("workers.pushes:killed", tmp_path, method, environment=launch.environment()) as process:
        assert process.wait(120) == -9
    (left,) = tmp_path.iterdir()
    names = sorted(path.name for path in left.iterdir())
    whole, half = ("lora-1", ".lora-2") if method == "auto" else ("weights-1", ".weights-2")
    assert names == sorted([LOCK, whole, half])
    server = served(tmp_path)
    before = run(server.weights.module)

    def asked(name: str) -> asgi.Answer:
        if method == "auto":
            return ask(server, "/v1/set_lora", lora_nickname="a", lora_path=str(left / name))
        return ask(server, "/update_weights_from_disk", model_path=str(left / name))

    assert asked(half).status == 400
    assert asked(half).value["message"].endswith("is hidden, as the files of an unfinished export are")
    (left / half).rename(left / "named")  # even then
    assert asked("named").status == 400
    assert torch.equal(run(server.weights.module), before)
    assert server.weights.version == 0
    assert asked(whole).status == 200
    sync = WeightSync(one, folder=tmp_path)
    assert not left.exists()
    again = WeightSync(one, folder=tmp_path)  # of a trainer beside it, whose folder is in use
    assert sync.path.exists()
    assert sync.push(engine_of(adapted(base()), one), 1, [server.client]) == {}
    again.close()
    sync.close()
