"""Multiplies matrices at other addresses, for test_determinism.py: a script, because MKL reads its settings once."""

import itertools
import json
import sys

import torch
from helpers.addresses import placed
from torch import Tensor
from torch.nn import functional as F

SHAPES = ((4, 8, 8), (7, 13, 5), (33, 41, 29))
ALIGNED = (16, 48, 528)  # floats: multiples of 64 bytes
ODD = (1, 2, 3, 7)


def products(left: Tensor, right: Tensor) -> dict[str, Tensor]:
    return {
        "linear": F.linear(left[0], right[0]),
        "batched": torch.bmm(left, right.mT),
        "attention": F.scaled_dot_product_attention(left[None], right[None], right[None]),
    }


def changed() -> dict[str, int]:
    """Return how many products have other bits at multiples of 64 bytes, and at odd addresses."""
    count = {"aligned": 0, "odd": 0}
    generator = torch.Generator().manual_seed(0)
    for rows, inner, columns in SHAPES:
        left, right = (torch.randn(3, size, inner, generator=generator) for size in (rows, columns))
        expected = products(placed(left, 0), placed(right, 0))
        for kind, offsets in (("aligned", ALIGNED), ("odd", ODD)):
            for pair in itertools.product((0, *offsets), repeat=2):
                found = products(placed(left, pair[0]), placed(right, pair[1]))
                count[kind] += sum(not torch.equal(found[name], product) for name, product in expected.items())
    return count


if __name__ == "__main__":
    by_threads = {}
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        by_threads[threads] = changed()
    json.dump(by_threads, sys.stdout)
