"""Run by torchrun: pairs whose every field tells which pair it is, moved between ranks, for test_pairs.py."""

import json
import sys
from pathlib import Path

import torch

from fluvial.engines.cli.main import exit_with
from fluvial.engines.fsdp.world import init_world
from fluvial.engines.rollout.items import Items, rebalance


def main(args: list[str]) -> int:
    """Write [{found by rank, expected}], a pair being [its number by each field]."""
    result = []
    with init_world() as world:
        for sequence in (1, 2):
            grouped = world.grouped(sequence)
            for counts in ([5, 0, 2, 1], [1, 9, 0, 3]):
                counts = counts[: grouped.data_size]
                rank, samples = grouped.data_rank, 3
                numbers = torch.arange(counts[rank]) + 100 * rank
                rows = torch.arange(counts[rank]) % samples
                pairs = Items(
                    x=numbers.float()[:, None, None].expand(-1, 2, 3), x_next=numbers.float()[:, None] + 0.5,
                    level=numbers.float(), timestep=None,
                    log_prob_old=numbers.double(), target_weight=numbers.float(), weight=torch.ones(counts[rank]),
                    sample=rows,
                )  # fmt: skip
                cond = {"tokens": (10.0 * rank + torch.arange(samples))[:, None].expand(-1, 4)}
                moved, table = rebalance(pairs, cond, counts, grouped)
                assert moved.x_next is not None
                assert moved.log_prob_old is not None
                found = [
                    [int(a), float(b), float(c), int(d), float(e)]
                    for a, b, c, d, e in zip(
                        moved.level, moved.x[:, 1, 2], moved.x_next[:, 0], moved.log_prob_old,
                        table["tokens"][moved.sample][:, 3], strict=True,
                    )
                ]  # fmt: skip
                expected = [
                    [n + 100 * r, n + 100.0 * r, n + 100.0 * r + 0.5, n + 100 * r, 10.0 * r + n % samples]
                    for r, count in enumerate(counts)
                    for n in range(count)
                ]
                everyone = world.gather_items(found)
                for own in range(sequence):  # the ranks of a group have the same
                    assert everyone[own::sequence] == everyone[::sequence]
                result.append({"found": everyone[::sequence], "expected": expected})
        if world.is_main:
            Path(args[0]).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
