"""Weights that a rollout server takes: complete, of the right shapes, from its own folders; or nothing changes."""

import asyncio
import hashlib
import json
import os
import struct
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import asgi, real_sglang
from helpers.weight_servers import Served, adapted, ask, base, engine_of, listed, move, moved_base, run, served
from safetensors.torch import load_file, save_file
from torch import Tensor

import fluvial.engines.extensions.servers.rollout.served_weights as serving
from fluvial.engines.engine.world import init_world
from fluvial.engines.export.model_folder import export, write_lora
from fluvial.engines.extensions.wire.weight_buckets import (
    SHARED_FILES,
    UNKNOWN,
    SharedBucket,
    compute_adapter_checksum,
    compute_checksum,
    expect_checksums,
    flatten,
    plan_buckets,
)
from fluvial.models.lora import find_adapter_parameters

FULL, LORA = "transformer/diffusion_pytorch_model.safetensors", "pytorch_lora_weights.safetensors"


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Weights and an adapter as a trainer writes them, with what the trainer computes with each."""
    out, outputs = tmp_path_factory.mktemp("exports"), {}
    with init_world() as world:
        for name, module in {"full": moved_base(), "lora": adapted(base())}.items():
            engine = engine_of(module, world)
            if name == "lora":
                move(engine, seed=0)
                write_lora(engine.module, out / name, world=world)
            else:
                export(engine.module, out / name / "transformer", world=world)
            with engine.inference() as inner:
                outputs[name] = run(inner)
    return {"out": out, **outputs}


@pytest.fixture
def folder(tmp_path: Path, exports: dict[str, Any]) -> Path:
    """A folder of a server with copies that a test may damage."""
    for name in (f"full/{FULL}", f"lora/{LORA}"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes((exports["out"] / name).read_bytes())
    return tmp_path


def update(server: Served, path: Path, **more: Any) -> asgi.Answer:
    return ask(server, "/update_weights_from_disk", model_path=str(path), **more)


def set_lora(server: Served, path: Path, **more: Any) -> asgi.Answer:
    return ask(server, "/v1/set_lora", lora_nickname="a", lora_path=str(path), **more)


def send_bucket(
    server: Served, folder: Path, tensors: dict[str, Tensor], push: str = "p", index: int = 0, count: int = 1, **more: Any
) -> asgi.Answer:
    (places,) = plan_buckets(tensors, most_bytes=10**6)
    bucket = SharedBucket(push, index, count, "transformer", str(folder / "bucket"), places)
    (folder / "bucket").write_bytes(flatten(places, tensors.values()).numpy().tobytes())
    value = {"load_format": SHARED_FILES, "serialized_named_tensors": [json.dumps(bucket.as_json())], **more}
    return ask(server, "/update_weights_from_tensor", **value)


def state(server: Served) -> Any:
    weights = server.weights
    return run(weights.module).tolist(), weights.list_checksums(), weights.version, list(weights.adapters)


def refuses(server: Served, answer: asgi.Answer, says: str, before: Any) -> None:
    """Assert that a request was refused in one line that says why, and that nothing changed."""
    assert answer.status == 400, answer
    assert answer.value["success"] is False
    assert says in answer.value["message"], answer.value["message"]
    assert "\n" not in answer.value["message"]
    assert state(server) == before


def test_weights_and_adapters_come_and_go(folder: Path, exports: dict[str, Any]) -> None:
    """To the bit: an adapter over the base, the base without it, other weights, the adapter over those."""
    server = served(folder)
    plain = run(server.weights.module)
    assert set_lora(server, folder / "lora", weight_version="5").value["weight_version"] == 5
    assert torch.equal(run(server.weights.module), exports["lora"])
    assert not server.weights.module.get_parameter("into.base_layer.weight").requires_grad
    assert ask(server, "/v1/unmerge_lora_weights").value["weight_version"] == 6
    assert torch.equal(run(server.weights.module), plain)
    assert all(parameter.requires_grad for parameter in server.weights.module.parameters())
    assert update(server, folder / "full", weight_version=7, target_modules=["transformer"]).value["success"]
    assert torch.equal(run(server.weights.module), exports["full"])
    assert set_lora(server, folder / "lora" / LORA).status == 200
    expected = adapted(moved_base())
    server_adapter = load_file(folder / "lora" / LORA)
    for name, parameter in find_adapter_parameters(expected, "default").items():
        parameter.data.copy_(server_adapter[f"transformer.{name}"])
    assert torch.equal(run(server.weights.module), run(expected))


@pytest.mark.parametrize("merge_mode", ["dynamic", "merge"])
@pytest.mark.parametrize("route", ["disk", "buckets"])
def test_a_push_of_all_weights_takes_an_adapter_off(
    folder: Path, exports: dict[str, Any], route: str, merge_mode: str
) -> None:
    """The adapter of an earlier run; afterwards the server has exactly what was pushed, and its checksums say so."""
    server, tensors = served(folder), load_file(folder / "full" / FULL)
    assert set_lora(server, folder / "lora", merge_mode=merge_mode).status == 200
    if route == "disk":
        answer = update(server, folder / "full", weight_version=3)
    else:
        answer = send_bucket(server, folder, tensors, weight_version=3)
    assert (answer.status, answer.value["weight_version"]) == (200, 3)
    assert torch.equal(run(server.weights.module), exports["full"])
    wanted = expect_checksums({"transformer": compute_checksum(sorted(tensors.items()))})
    assert ask(server, "/get_weights_checksum", module_names=[*wanted]).value == wanted
    assert listed(server)["active"] == {}


def test_an_adapter_that_was_loaded_is_set_again_without_its_path(folder: Path, exports: dict[str, Any]) -> None:
    """By its nickname, with another strength, also after its file has gone; `merge_lora_weights` takes the last one."""
    server = served(folder)
    assert set_lora(server, folder / "lora").status == 200
    half = ask(server, "/v1/set_lora", lora_nickname="a", lora_path=None, strength=0.5)
    assert (half.status, server.weights.adapters["transformer"].scaling) == (200, 0.75)
    assert ask(server, "/v1/unmerge_lora_weights").status == 200
    (folder / "lora" / LORA).unlink()
    assert ask(server, "/v1/set_lora", lora_nickname=["a"]).status == 200
    assert torch.equal(run(server.weights.module), exports["lora"])
    assert ask(server, "/v1/merge_lora_weights", strength=-2.0).status == 200
    assert server.weights.adapters["transformer"].scaling == -3.0
    before = state(server)
    refuses(server, ask(server, "/v1/set_lora", lora_nickname="b"), "adapter b of transformer is not loaded", before)
    refuses(server, ask(server, "/v1/merge_lora_weights", strength=0), "alpha times strength is 0", before)
    answer = ask(served(folder), "/v1/merge_lora_weights")
    refuses(server, answer, "no adapter was set for transformer: send the lora_path", before)
    active = listed(server)["active"]["transformer"]
    assert [(each["nicknames"], each["mode"], each["strengths"]) for each in active] == [(["a"], "unmerged", [-2.0])]


def test_as_many_adapters_are_kept_as_there_is_room_for(folder: Path) -> None:
    """A trainer that pushes under a new nickname each time does not fill the memory."""
    server = served(folder)
    for number in range(serving.MOST_LOADED + 3):
        value = {"lora_nickname": f"n{number}", "lora_path": str(folder / "lora")}
        assert ask(server, "/v1/set_lora", **value).status == 200
    found = listed(server)["loaded_adapters"]
    assert [each["nickname"] for each in found] == [f"n{number}" for number in range(3, serving.MOST_LOADED + 3)]


def test_a_checksum_is_computed_once_per_change(
    folder: Path, exports: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it is asked for, and of the base not again for an adapter."""
    server = served(folder)
    counted = {
        name: mock.Mock(side_effect=getattr(serving, name)) for name in ("compute_checksum", "compute_adapter_checksum")
    }
    for name, function in counted.items():
        monkeypatch.setattr(serving, name, function)
    names = {"module_names": ["transformer", "transformer.lora"]}
    for strength in (1.0, 0.5, 0.25):
        assert set_lora(server, folder / "lora", strength=strength).status == 200
        sums = [ask(server, "/get_weights_checksum", **names).value for _ in range(3)]
        assert sums == [sums[0]] * 3
        assert sums[0]["transformer.lora"] == ask(server, "/get_weights_checksum").value["transformer.lora"]
    assert [function.call_count for function in counted.values()] == [1, 3]
    assert update(server, folder / "full").status == 200
    found = [ask(server, "/get_weights_checksum", **names).value for _ in range(3)]
    full = compute_checksum(sorted(load_file(folder / "full" / FULL).items()))
    assert found == [{"transformer": full, "transformer.lora": UNKNOWN}] * 3
    assert [function.call_count for function in counted.values()] == [2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tensor_checker_is_sglangs(folder: Path, dtype: torch.dtype) -> None:
    real_sglang.load()
    theirs = real_sglang.part("post_training.tensor_update_checker")
    server, path = served(folder, dtype=dtype), "/update_weights_from_tensor_checker"
    sums = theirs.build_named_tensor_sha256(server.weights.module.named_parameters())
    assert ask(server, path, target_module="transformer", expected_named_tensors_sha256=sums).value["success"]
    before = state(server)
    wrong = {**sums, "out.bias": "0", "out.weight": "1"}
    answer = ask(server, path, target_module="transformer", expected_named_tensors_sha256=wrong)
    refuses(server, answer, "2 tensors of transformer have another checksum: out.bias, out.weight", before)
    answer = ask(server, path, target_module="transformer", expected_named_tensors_sha256={"x": "0"})
    refuses(server, answer, "1 tensors of transformer are missing: x", before)
    refuses(server, ask(server, path, target_module="transformer", expected_named_tensors_sha256={}), "length >= 1", before)


def test_checksums_are_sglangs(folder: Path) -> None:
    """Of the parameters by name: each name's bytes, then its tensor's; adapters have one of their own."""
    server, digest = served(folder), hashlib.sha256()
    for name, parameter in sorted(base().named_parameters()):
        digest.update(name.encode() + parameter.detach().numpy().tobytes())
    answer = ask(server, "/get_weights_checksum").value
    assert answer == {"transformer": digest.hexdigest()}
    set_lora(server, folder / "lora")
    again = ask(server, "/get_weights_checksum", module_names=["transformer", "transformer.lora", "vae"]).value
    factors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(folder / "lora" / LORA).items()}
    assert again == {**answer, "transformer.lora": compute_adapter_checksum(factors, 1.5), "vae": "not_found"}
    assert compute_adapter_checksum(factors, 1.0) != compute_adapter_checksum(factors, 1.5)
    with pytest.raises(ValueError, match="ascending"):
        compute_checksum([("b", torch.ones(1)), ("a", torch.ones(1))])


def change(path: Path, **tensors: Tensor | None) -> None:
    held = {**load_file(path), **tensors}
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, tuple[Any, str]] = {
    "a missing tensor": (lambda file: change(file, **{"out.bias": None}), "is incomplete: out.bias and 0 more"),
    "an unknown name": (lambda file: change(file, extra=torch.ones(1)), "holds extra, which the network lacks"),
    "a wrong shape": (lambda file: change(file, **{"out.bias": torch.ones(3)}), "of shape [3], and the network has [16]"),
    "integers": (lambda file: change(file, **{"out.bias": torch.ones(16, dtype=torch.int32)}), "out.bias of torch.int32"),
    "a cut file": (cut, "cannot be read"),
    "a longer file": (lambda file: file.write_bytes(file.read_bytes() + b"0" * 5), "cannot be read"),
    "an endless header": (lambda file: file.write_bytes(struct.pack("<Q", 2**62) + b"{}"), "cannot be read"),
    "a pickle": (lambda file: torch.save({}, file), "cannot be read"),
    "a flipped bit": (flip, "its checksum is"),
    "no file": (lambda file: file.unlink(), "holds no weights"),
    "a pipe": (piped, "holds no weights"),
    "another kind of file": (lambda file: file.rename(file.with_suffix(".bin")), "holds no weights"),
}
ADAPTERS: dict[str, tuple[Any, str]] = {
    "a missing factor": (lambda file: change(file, **{"transformer.out.lora_A.weight": None}), "out has no factor A"),
    "an unknown layer": (lambda file: change(file, **{"transformer.no.lora_A.weight": torch.ones(2, 2)}), "no linear layer"),
    "a wrong shape": (lambda file: change(file, **{"transformer.out.lora_A.weight": torch.ones(2, 9)}), "architecture"),
    "a wrong rank": (lambda file: change(file, **{"transformer.out.lora_B.weight": torch.ones(16, 3)}), "architecture"),
    "a cut file": (cut, "cannot be read"),
    "a pickle": (lambda file: torch.save({}, file), "cannot be read"),
    "a huge file": (lambda file: os.truncate(file, 10**10), "has 10000000000 bytes, expected at most"),
    "no file": (lambda file: file.unlink(), "holds neither"),
}


@pytest.mark.parametrize(("kind", "damage"), [("full", each) for each in DAMAGES] + [("lora", each) for each in ADAPTERS])
def test_damaged_files_change_nothing(folder: Path, kind: str, damage: str) -> None:
    server, full = served(folder), folder / "full" / FULL
    set_lora(server, folder / "lora")
    sha256 = {"transformer": compute_checksum(sorted(load_file(full).items()))}
    before = state(server)
    act, says = (DAMAGES if kind == "full" else ADAPTERS)[damage]
    act(full if kind == "full" else folder / "lora" / LORA)
    send = partial(update, sha256=sha256) if kind == "full" else set_lora
    refuses(server, send(server, folder / kind, weight_version=9), says, before)


def test_paths_outside_the_roots_are_not_opened(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nor links that lead there, nor what an export has not finished."""
    outside, server = tmp_path_factory.mktemp("outside"), served(folder)
    before = state(server)
    (outside / "full").mkdir()
    (folder / "full").rename(outside / "full" / "inner")
    for path, says in {
        outside / "full" / "inner": "is outside the folders",
        folder / ".." / outside.name / "full" / "inner": "is outside the folders",
        Path("relative"): "is not an absolute path",
        folder / "nothing": "cannot be read: No such file",
        folder / ("x" * 3000): "cannot be read: File name too long",
        Path("/"): "is outside the folders",
    }.items():
        refuses(server, update(server, path), says, before)
        refuses(server, set_lora(server, path), says, before)
    (folder / "link").symlink_to(outside / "full" / "inner")
    refuses(server, update(server, folder / "link"), "is outside the folders", before)
    (folder / "full" / "transformer").mkdir(parents=True)
    (folder / "full" / FULL).symlink_to(outside / "full" / "inner" / FULL)
    refuses(server, update(server, folder / "full"), "is outside the folders", before)
    (folder / "lora" / LORA).rename(outside / LORA)
    (folder / "lora" / LORA).symlink_to(outside / LORA)
    refuses(server, set_lora(server, folder / "lora"), "is outside the folders", before)
    (folder / "loop").symlink_to(folder / "loop")
    refuses(server, update(server, folder / "loop"), "cannot be read", before)
    (outside / "full" / "inner").rename(folder / ".weights-3")
    refuses(server, update(server, folder / ".weights-3"), "is hidden", before)
    refuses(server, ask(server, "/update_weights_from_disk", model_path="/\0"), "cannot be read", before)


PICKLES = (
    "are pickles, and this server unpickles nothing: write safetensors to a folder that it reads (--weights-root), "
    "and POST that to /update_weights_from_disk as model_path, or to /v1/set_lora as lora_path"
)
PAIR = {"lora_nickname": ["a", "b"]}
WRONG: dict[str, list[tuple[Any, str]]] = {
    "/update_weights_from_disk": [
        ({}, "missing required field `model_path`"),
        ({"model_path": "/", "target_modules": "transformer"}, "target_modules: Expected `array"),
        ({"model_path": "FOLDER/full", "target_modules": ["vae"]}, "there is no network 'vae'"),
        ({"model_path": "FOLDER/lora"}, "holds no folder transformer"),
        ({"model_path": "FOLDER/full", "weight_version": -1}, "weight_version: Expected `int` >= 0"),
        ({"model_path": "FOLDER/full", "weight_version": "x"}, "weight_version: Expected `str` matching regex"),
        ({"model_path": "FOLDER/full", "sha256": {"transformer": "0"}}, "is damaged"),
        ([], "the body: Expected `object`, got `array`"),
    ],
    "/v1/set_lora": [
        ({**PAIR, "lora_path": ["x"]}, "lora_path has 1 items, expected 2, one per lora_nickname"),
        ({**PAIR, "strength": [1.0, 2.0, 3.0]}, "strength has 3 items, expected 2"),
        ({**PAIR, "lora_path": "x"}, "lora_path is a single path for 2 adapters"),
        ({"lora_nickname": ["a", "a"]}, "names an adapter of transformer twice"),
        ({"lora_nickname": ["a"] * 17}, "lora_nickname: Expected `array` of length <= 16"),
        ({"lora_nickname": []}, "lora_nickname: Expected `array` of length >= 1"),
        ({"lora_nickname": "a", "lora_path": None}, "adapter a of transformer is not loaded"),
        ({"lora_nickname": "a", "lora_path": "FOLDER/lora", "target": "critic"}, "target is 'critic'"),
        ({"lora_nickname": "a", "lora_path": "FOLDER/lora", "strength": 0}, "alpha times strength"),
        ({"lora_nickname": "a", "lora_path": "FOLDER/lora", "merge_mode": "x"}, "merge_mode: Invalid enum value 'x'"),
        ({"lora_nickname": "x", "strenght": 2.0}, "the body: Object contains unknown field `strenght`"),
    ],
    "/unload_lora_adapter": [
        ({"lora_name": "a"}, "adapter a is not loaded: GET /v1/list_loras"),
        ({}, "missing required field `lora_name`"),
    ],
    "/update_weights_from_tensor": [
        ({"load_format": "flattened_bucket", "serialized_named_tensors": ["gAR9"]}, PICKLES),
        ({"serialized_named_tensors": ["gAR9"]}, "are pickles"),
        ({"load_format": SHARED_FILES, "serialized_named_tensors": ["{}", "{}"]}, "holds 2, expected one bucket"),
        ({"load_format": SHARED_FILES}, "missing required field `serialized_named_tensors`"),
        ({"load_format": SHARED_FILES, "serialized_named_tensors": ["{"]}, "holds a text that is not JSON"),
    ],
    "/get_weights_checksum": [({"module_names": 3}, "module_names: Expected `array")],
}


@pytest.mark.parametrize("path", WRONG)
def test_wrong_requests_are_one_line(folder: Path, path: str) -> None:
    server = served(folder)
    before = state(server)
    for value, says in WRONG[path]:
        text = json.dumps(value).replace("FOLDER", str(folder))
        refuses(server, asyncio.run(asgi.call(server.app, path, json.loads(text))), says, before)


BUCKETS: dict[str, tuple[dict[str, Any], str]] = {
    "a file of another size": ({"bytes": 65}, "is not a file of"),
    "another folder": ({"file": "/etc/hostname"}, "is outside the folders"),
    "a gap": ({"start_idx": 1, "end_idx": 65}, "start_idx is 1, expected 0"),
    "a size that is not the shape's": ({"numel": 7}, "which differ from shape and dtype"),
    "a wrong name": ({"name": "nothing"}, "holds nothing, which the network lacks"),
    "a wrong shape": ({"shape": [4, 4]}, "out.bias of shape [4, 4], and the network has [16]"),
    "an unknown dtype": ({"dtype": "torch.complex64"}, "dtype: it is 'torch.complex64', expected one of"),
    "no places": ({"places": []}, "places: Expected `array` of length >= 1"),
    "incomplete": ({}, "is incomplete: blocks.0.inner.bias and"),
    "out of order": ({"index": 1, "count": 2}, "is out of order"),
    "a wrong index": ({"index": 3}, "index is 3"),
}


def test_a_wrong_bucket_changes_nothing(folder: Path) -> None:
    for changes, says in BUCKETS.values():
        server = served(folder)
        before = state(server)
        (folder / "bucket").write_bytes(bytes(changes.get("bytes", 64)))
        place = {"name": "out.bias", "shape": [16], "numel": 16, "dtype": "torch.float32", "start_idx": 0, "end_idx": 64}
        place |= {name: changes[name] for name in place.keys() & changes}
        bucket = {"push": "p", "index": 0, "count": 1, "module": "transformer", "places": [place]}
        bucket["file"] = str(folder / "bucket")
        bucket |= {name: changes[name] for name in bucket.keys() & changes}
        value = {"load_format": SHARED_FILES, "serialized_named_tensors": [json.dumps(bucket)]}
        refuses(server, ask(server, "/update_weights_from_tensor", **value), says, before)


def test_buckets_of_two_pushes_are_not_mixed(folder: Path) -> None:
    """The second half of another push, as of a trainer that was restarted, is refused, and drops the first half."""
    server, tensors = served(folder), {name: t + 1 for name, t in sorted(base().state_dict().items())}
    halves = [dict([*tensors.items()][:1]), dict([*tensors.items()][1:])]

    def sent(push: str, index: int) -> asgi.Answer:
        return send_bucket(server, folder, halves[index], push, index, 2)

    before = state(server)
    assert sent("a", 0).status == 200
    refuses(server, sent("b", 1), "is out of order", before)
    refuses(server, sent("a", 1), "is out of order", before)
    assert [sent("b", index).status for index in (0, 1)] == [200, 200]
    found = server.weights.list_tensors("transformer")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_change_that_fails_is_undone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of the copies, where one has other bits than were sent, and after the layers were replaced."""
    server, copy = served(folder), Tensor.copy_
    set_lora(server, folder / "lora")
    before, calls = state(server), []

    def failing(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(self)
        if len(calls) == 4:
            copy(self, torch.zeros(()))  # half done
            raise RuntimeError("CUDA error:\nout of memory")
        return copy(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "copy_", failing)
    answer = update(server, folder / "full")
    assert (answer.status, answer.value["message"]) == (500, "RuntimeError: CUDA error: out of memory")
    monkeypatch.setattr(Tensor, "copy_", copy)
    assert state(server) == before
    calls.clear()

    def damaging(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copy(self, *args, **kwargs)
        calls.append(self)
        if len(calls) == 4:
            self.reshape(-1)[:1].neg_()  # one bit
        return self

    monkeypatch.setattr(Tensor, "copy_", damaging)
    bucket = dict(sorted(moved_base().state_dict().items()))
    for push in (lambda: update(server, folder / "full"), lambda: send_bucket(server, folder, bucket)):
        calls.clear()
        answer = push()
        assert (answer.status, "was copied wrongly" in answer.value["message"]) == (500, True)
    monkeypatch.setattr(Tensor, "copy_", copy)
    assert state(server) == before
    load, tries = serving.load_lora, list[Any]()

    def once(*args: Any) -> None:
        tries.append(args)
        if len(tries) == 1:
            raise MemoryError("no memory")
        load(*args)

    monkeypatch.setattr(serving, "load_lora", once)
    save_file({"into.lora_A.weight": torch.ones(3, 24), "into.lora_B.weight": torch.ones(24, 3)}, folder / "x.safetensors")
    assert set_lora(server, folder / "x.safetensors").status == 500
    assert state(server) == before


def test_released_weights_come_back_to_the_bit(folder: Path) -> None:
    server = served(folder)
    before = state(server)
    for _ in range(2):
        assert ask(server, "/release_memory_occupation").value["success"]
    assert server.weights.released
    for path, value in {
        "/update_weights_from_disk": {"model_path": str(folder / "full")},
        "/v1/set_lora": {"lora_nickname": "a", "lora_path": str(folder / "lora")},
        "/v1/unmerge_lora_weights": {},
        "/get_weights_checksum": {},
    }.items():
        answer = ask(server, path, **value)
        assert answer.status == 400
        assert answer.value["detail"] == "the weights are released: POST /resume_memory_occupation first"
    assert ask(server, "/resume_memory_occupation").value["success"]
    assert state(server) == before
    with pytest.raises(ValueError, match="has adapters"):
        Served(adapted(base()), [folder])
