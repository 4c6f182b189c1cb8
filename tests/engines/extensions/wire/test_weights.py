"""Buckets of weights: where tensors lie in them, and how they are described in JSON."""

import pytest
import torch

from fluvial.engines.extensions.wire.decode import WireError
from fluvial.engines.extensions.wire.weight_buckets import SharedBucket, flatten, parse_bucket, plan_buckets

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor(2.0),
    "c": torch.ones(3, dtype=torch.bfloat16),
    "d": torch.arange(40.0),
    "e": torch.ones(2),
    "f": torch.ones(0, 4),
}


def test_buckets_hold_every_tensor_once() -> None:
    """In their order, of one dtype, within the bytes unless one tensor alone is larger."""
    plan = plan_buckets(TENSORS, most_bytes=64)
    assert [[place.name for place in places] for places in plan] == [["a", "b"], ["c"], ["d"], ["e", "f"]]
    for places in plan:
        flat = flatten(places, [TENSORS[place.name] for place in places])
        assert len({place.dtype for place in places}) == 1
        assert flat.numel() == places[-1].end_idx
        for place in places:
            found = flat[place.start_idx : place.end_idx].view(place.dtype).reshape(place.shape)
            assert torch.equal(found, TENSORS[place.name])
    assert plan_buckets({}, most_bytes=64) == []


def test_a_bucket_travels_as_json() -> None:
    places = plan_buckets(TENSORS, most_bytes=64)[0]
    bucket = SharedBucket("push", 0, 4, "transformer", "/dev/shm/x", places)
    assert parse_bucket(bucket.as_json()) == bucket
    for change, says in (({"push": None}, "push: Expected `str`"), ({"count": 5000}, "count: Expected `int` <= 4096")):
        with pytest.raises(WireError, match=says):
            parse_bucket({**bucket.as_json(), **change})
    with pytest.raises(WireError, match=r"^the body: Expected `object`, got `int`$"):
        parse_bucket(1)
