"""Processes that share every sample answer as one process does, from parts of the weights."""

import json
import random
import re
import signal
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import launch, tiny_token_job
from helpers import tiny_transformers as tiny
from workers import serving
from workers.pushes import adapted_tokens

from fluvial.core.random import Key
from fluvial.engines.data.records import Prompt
from fluvial.engines.errors import RunError
from fluvial.engines.export.model_folder import list_base_tensors
from fluvial.engines.extensions.remote.weight_sync import FACTOR_METHODS, METHODS
from fluvial.engines.extensions.servers.rollout.orders import CLASSES, BatchSpec, SampleOrder
from fluvial.engines.extensions.servers.rollout.ranks import decode_arguments, encode_arguments
from fluvial.engines.extensions.servers.rollout.served_weights import Adapter, AppliedAdapters
from fluvial.engines.extensions.wire.client import HttpClient
from fluvial.engines.extensions.wire.request import ExtraParams, FluvialOptions, RolloutRequest
from fluvial.engines.extensions.wire.response import RolloutSample, read_response
from fluvial.engines.extensions.wire.tensors import pack, unpack_tree
from fluvial.engines.extensions.wire.weight_buckets import compute_adapter_checksum, compute_checksum
from fluvial.engines.gathered import layout
from fluvial.engines.sampling.generate import Guidance
from fluvial.models.digests import digest_tensor
from fluvial.models.lora import LowRank
from fluvial.models.lora_files import LoraFile
from fluvial.models.replay.media import MediaPrompt


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What one process, and the first of two, answers; the last one's own number of weights."""
    folder = tmp_path_factory.mktemp("weights")
    serving.write(folder)
    ranks = {size: launch.on_ranks(size, "workers.serving:serve", folder) for size in (1, 2)}
    return {1: ranks[1][0], 2: ranks[2][0], 0: ranks[2][1]}


def ask(url: str) -> list[RolloutSample]:
    body, headers = json.dumps({"prompt": "bb", "seed": 3}).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/rollout/generate", body, headers), timeout=60) as reply:
        return read_response(reply.read())


@pytest.mark.parametrize("when", ["first", "pushed", "adapted", "again", "auto"])
def test_samples_of_two_processes_are_those_of_one(found: dict[int, Any], when: str) -> None:
    one, two = found[1][when], found[2][when]
    for what in ("images", "log_probs"):
        torch.testing.assert_close(torch.tensor(two[what]), torch.tensor(one[what]), rtol=1e-4, atol=1e-5)
    assert (two["versions"], two["sums"]) == (one["versions"], one["sums"])


@pytest.mark.parametrize("way", FACTOR_METHODS[1:])
def test_an_adapter_in_buckets_is_what_its_file_is(found: dict[int, Any], way: str) -> None:
    """To the bit, on one process and on two; the adapter acts, and nothing is unpickled on the way."""
    for answers in (found[1], found[2]):
        assert answers[way] == answers["auto"]
        assert answers[way]["images"] != answers["first"]["images"]


def test_each_process_holds_a_part_and_goes_on_after_what_all_refuse(found: dict[int, Any]) -> None:
    ((status, problem),), last = found[2]["refused"], found[0]
    assert (status, "context_parallel is 2: hidden_states has 7 tokens" in problem) == (400, True)
    assert last["all"] == found[1]["numbers"]
    assert last["numbers"] + found[2]["numbers"] == last["all"]


RECIPE = BatchSpec((2, 3), 4, Guidance(2.0), "density", FluvialOptions(prefix=(1, 2)), "flow_sde", 0.5, (1,), 1, True)
MEDIA: dict[str, Any] = {"image": b"one", "images": (b"two", b"three")}
REQUEST = RolloutRequest("a", extra_sampling_params=ExtraParams(FluvialOptions(key=(2**32 - 1, 0), windows=((1,), (2,)))))
FACTORS = LoraFile(1, 2.0, ("to_q",), {"to_q.lora_A.weight": torch.tensor([[0.1, float("inf")]])})
CALLS: dict[str, tuple[Any, tuple[type, ...]]] = {
    "orders": (
        [
            SampleOrder(each, Prompt("a", media=MEDIA), REQUEST, Key(1, 2), 2**63 - 1, 0, (1,), ())
            for each in (RECIPE, replace(RECIPE, window=None, shared=(MediaPrompt("a", MEDIA), Key(3, 4))))
        ],
        CLASSES,
    ),
    "adapters": (
        {"transformer": AppliedAdapters((Adapter("x", "/x", 1.0, FACTORS),), FACTORS, -0.5, "auto"), "~": None},
        (AppliedAdapters, Adapter, LoraFile, LowRank),
    ),
    "weights": ({"~": {"x": torch.empty(2, 0, 3, dtype=torch.float8_e4m3fn, device="meta")}}, ()),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_travels_as_plain_data(name: str) -> None:
    value, kinds = CALLS[name]
    classes = {kind.__name__: kind for kind in kinds}
    found = decode_arguments(unpack_tree(pack(encode_arguments(value, classes))), classes)
    assert repr(found) == repr(value)
    if classes:
        with pytest.raises(TypeError, match="name its class in `on_all_ranks`"):
            encode_arguments(value, {})


SERVE = ("serve", "helpers.tiny_token_job:Toy", "--port", "0", "--micro-batch", "2", "--steps", "2")
SIZE = ("--pipeline.height", str(tiny_token_job.TOKENS), "--pipeline.width", str(tiny.WIDTH))


@pytest.mark.long
def test_processes_serve_and_end_together() -> None:
    with launch.started("fluvial.engines", *SERVE, *SIZE, ranks=2) as ranks:
        (sample,) = ask(ranks[0].address())
        assert sample.generated_output.shape == (3, tiny_token_job.TOKENS, tiny.WIDTH)
        for each in ranks:
            each.send_signal(signal.SIGTERM)
        assert [each.wait(30) for each in ranks] == [0, 0]
        assert not any("fluvial:" in each.stderr for each in ranks)


@pytest.mark.long
def test_none_outlives_another() -> None:
    """The one that serves says so at the next request; those that wait notice at once."""
    for killed in (0, 1):
        with launch.started("fluvial.engines", *SERVE, *SIZE, ranks=2) as ranks:
            url, other = ranks[0].address(), ranks[1 - killed]
            ranks[killed].kill()
            if killed:
                with pytest.raises(urllib.error.HTTPError, match="500"):
                    ask(url)
            assert other.wait(60) == 1
            assert re.search(r"^fluvial: .*(lost another process|is gone)", other.stderr, re.MULTILINE)


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS[1:])
def test_a_kill_during_pushes_leaves_old_or_new_weights(tmp_path: Path, method: str) -> None:
    """Of a trainer of all weights, or of an adapter: all parts of all tensors are of one push.

    Of one of the server's processes: the other one ends, too.
    """
    delays, tensors, factors = random.Random(1), list_base_tensors(tiny.flux()), layout(adapted_tokens(), adapter="default")

    def is_pushed(client: HttpClient, version: int, trained: str) -> bool:
        if trained == "adapter":
            filled = {name: torch.full(each.shape, float(version)) for name, each in factors.items()}
            sums = {
                "transformer": compute_checksum(sorted(tensors.items())),
                "transformer.lora": compute_adapter_checksum(filled, 1.5),
            }
            return bool(client.post("/get_weights_checksum", {}) == sums)
        sums = {name: digest_tensor(torch.full_like(each, version)) for name, each in tensors.items()}
        value = {"target_module": "transformer", "expected_named_tensors_sha256": sums}
        with suppress(RunError):
            return bool(client.post("/update_weights_from_tensor_checker", value)["success"])
        return False

    for killed, trained in enumerate(("tokens", "adapter")):
        way = "auto" if (method, trained) == ("disk", "adapter") else method  # as a file, not merged
        options = (*SERVE, *SIZE, "--weights-root", str(tmp_path))
        with launch.started("fluvial.engines", *options, ranks=2) as ranks:
            url, other = ranks[0].address(), ranks[1 - killed]
            client = HttpClient(url, patience=0)
            for victim in (None, None, ranks[killed]):
                pushing = ("workers.pushes:fill", tmp_path, url, way, trained)
                with launch.Process(*pushing, environment=launch.environment()) as trainer:
                    before = version = client.get("/v1/model_info")["weight_version"]
                    while version < before + 3:
                        assert trainer.poll() is None, trainer.stderr
                        version = client.get("/v1/model_info")["weight_version"]
                    time.sleep(delays.uniform(0, 0.2))
                    (victim or trainer).kill()
                    if victim is None:
                        trainer.wait(30)
                        last = client.get("/v1/model_info")["weight_version"]
                        assert is_pushed(client, last, trained) or is_pushed(client, last + 1, trained)
                    else:
                        assert other.wait(60) == 1
                        assert trainer.wait(60) == 1
                        assert "no server took the weights" in trainer.stderr


@pytest.mark.long
def test_a_model_whose_tokens_cannot_be_split_is_refused() -> None:
    done = launch.fluvial("serve", "handwriting", "--port", "0", ranks=2)
    assert done.returncode == 2
    assert "2 processes cannot share a sample" in launch.one_line(done.stderr)
