"""The source that makes samples in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from helpers import tiny_jobs as tiny
from torch import nn

from fluvial.core.random import key
from fluvial.engines.data.records import Prompt
from fluvial.engines.engine.engine import Engine
from fluvial.engines.sampling.generate import Requests, Sampling, generate, on_device
from fluvial.engines.sampling.source import InProcess


def test_chunks_are_those_of_generate_with_the_version_that_was_pushed() -> None:
    """The network is open while chunks are made, and closed when the last is taken or the rest is not wanted."""
    model, opened = tiny.Tiny(), list[str]()
    module = model.build()

    @contextmanager
    def behaviour() -> Iterator[nn.Module]:
        opened.append("open")
        try:
            yield module
        finally:
            opened.append("closed")

    source = InProcess(model, behaviour)
    sampling = Sampling(tiny.SHAPE, on_device(model.schedule(2, tiny.SHAPE), torch.device("cpu")))
    requests = Requests([Prompt("1")] * 4, [0, 1, 2, 3], key(5))
    source.push(cast(Engine, None), 7)
    expected = list(generate(model, module, requests, sampling, micro_batch=2))
    found = list(source.generate(requests, sampling, micro_batch=2))
    assert [chunk.version for chunk in found] == [7, 7]
    assert all(torch.equal(own.images, other.images) for own, other in zip(found, expected, strict=True))
    assert opened == ["open", "closed"]
    chunks = source.generate(requests, sampling, micro_batch=2)
    next(chunks)
    chunks.close()
    assert opened == ["open", "closed"] * 2
