"""Moves items between ranks; every field tells which item it is, for test_noising.py."""

from typing import Any

import torch

from fluvial.core.transitions import Transition
from fluvial.engines.engine.world import World
from fluvial.engines.sampling.items import RecordedSteps, rebalance


def move(world: World) -> list[Any]:
    """Return [{found by rank, expected}], with each item as [its number by each field]."""
    result = []
    for sequence in (1, 2):
        grouped = world.group_ranks(sequence)
        for counts in ([5, 0, 2, 1], [1, 9, 0, 3]):
            counts = counts[: grouped.data_size]
            rank, samples = grouped.data_rank, 3
            numbers = torch.arange(counts[rank]) + 100 * rank
            rows = torch.arange(counts[rank]) % samples
            pairs = RecordedSteps(
                x=numbers.float()[:, None, None].expand(-1, 2, 3),
                x_next=numbers.float()[:, None] + 0.5,
                level=numbers.float(),
                timestep=numbers,
                level_next=numbers.float(),
                predictions={"old": numbers.float()},
                transition=Transition(numbers.float(), numbers.float(), numbers.float()),
                log_prob_old=numbers.double(),
                signal=numbers.float(),
                weight=torch.ones(counts[rank]),
                sample=rows,
            )
            cond = {"tokens": (10.0 * rank + torch.arange(samples))[:, None].expand(-1, 4)}
            moved, table = rebalance(pairs, cond, counts, grouped)
            found = [
                [int(a), float(b), float(c), int(d), float(e)]
                for a, b, c, d, e in zip(
                    moved.level,
                    moved.x[:, 1, 2],
                    moved.x_next[:, 0],
                    moved.log_prob_old,
                    table["tokens"][moved.sample][:, 3],
                    strict=True,
                )
            ]
            expected = [
                [n + 100 * r, n + 100.0 * r, n + 100.0 * r + 0.5, n + 100 * r, 10.0 * r + n % samples]
                for r, count in enumerate(counts)
                for n in range(count)
            ]
            everyone = world.gather_items(found)
            for own in range(sequence):  # the ranks of a group have the same
                assert everyone[own::sequence] == everyone[::sequence]
            result.append({"found": everyone[::sequence], "expected": expected})
    return result
