"""Processes that share every sample answer as one process does, from parts of the weights."""

import json
import re
import signal
import urllib.error
import urllib.request
from typing import Any

import pytest
import torch
from helpers import launch, tiny_token_job
from helpers import tiny_transformers as tiny
from workers import serving

from fluvial.engines.extensions.wire.response import RolloutSample, read_response


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


@pytest.mark.parametrize("when", ["first", "pushed", "adapted", "again"])
def test_samples_of_two_processes_are_those_of_one(found: dict[int, Any], when: str) -> None:
    one, two = found[1][when], found[2][when]
    for what in ("images", "log_probs"):
        torch.testing.assert_close(torch.tensor(two[what]), torch.tensor(one[what]), rtol=1e-4, atol=1e-5)
    assert (two["versions"], two["sums"]) == (one["versions"], one["sums"])


def test_each_process_holds_a_part_and_goes_on_after_what_all_refuse(found: dict[int, Any]) -> None:
    ((status, problem),), last = found[2]["refused"], found[0]
    assert (status, "context_parallel is 2: hidden_states has 7 tokens" in problem) == (400, True)
    assert last["all"] == found[1]["numbers"]
    assert last["numbers"] + found[2]["numbers"] == last["all"]


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
def test_a_model_whose_tokens_cannot_be_split_is_refused() -> None:
    done = launch.fluvial("serve", "handwriting", "--port", "0", ranks=2)
    assert done.returncode == 2
    assert "2 processes cannot share a sample" in launch.one_line(done.stderr)
