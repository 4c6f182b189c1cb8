"""Discrete-event model of rollouts ahead of a trainer: how many servers, and how far ahead, keep the trainer busy.

Servers generate rollout j with the weights of version max(0, j - K); version v has learnt from v rollouts. They generate one
rollout after the other, each on all servers. The trainer learns from the rollouts in order. The events are:

    weights of version v are ready   when the updates on rollout v - 1 end
    servers begin rollout j          when rollout j - 1 is complete and version j - K is ready; new weights are pushed first
    rollout j is complete            its seconds later
    updates on rollout j end         their seconds after both rollout j and the updates on rollout j - 1

Times are in seconds. Failures, and the additional communication of more GPUs, are not modelled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from rich.console import Console

from fluvial.core.checks import BATCH, check_fields
from fluvial.engines.errors import UsageError
from fluvial.engines.run.log.progress import table

ROLLOUTS = 200  # length of a simulated run


@dataclass(frozen=True)
class AheadConfig:
    """Find how many servers, and how many updates ahead, keep a trainer busy.

    Args:
        rollout_seconds: Seconds that one server takes for the samples of a rollout, with their rewards.
        update_seconds: Seconds that the trainer takes for the updates on a rollout, on `gpus` GPUs.
        push_seconds: Seconds that the servers take to load the weights of an update.
        samples: Number of samples per rollout. Servers and GPUs of the trainer take whole samples.
        gpus: Number of GPUs of the trainer.
        servers: Number of servers; by default as many as keep the trainer busy.
        server_gpus: Number of GPUs per server.
        ahead: Largest number of updates that a rollout may be ahead.
        spread: Standard deviation of the seconds of rollouts and updates, as a fraction of their mean.
        idle: Fraction of the time that the trainer may wait for rollouts.
        most_gpus: Largest number of GPUs in the second table.
        seed: Seed of the random seconds, with a spread.
    """

    rollout_seconds: float = 0.0
    update_seconds: float = 0.0
    push_seconds: float = 0.0
    samples: int = 1024
    gpus: int = 1
    servers: int | None = None
    server_gpus: int = 1
    ahead: int = 4
    spread: float = 0.0
    idle: float = 0.05
    most_gpus: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        seconds = dict.fromkeys(("rollout_seconds", "update_seconds", "push_seconds"), (0, 1e9))
        counts = dict.fromkeys(("samples", "gpus", "servers", "server_gpus"), BATCH)
        shares = {"ahead": (0, 64), "spread": (0, 10), "idle": (0, 0.99), "most_gpus": (2, 2**20)}
        check_fields(self, "", **seconds, **counts, **shares)


class Timeline(NamedTuple):
    """Times of the events of a run, in seconds from its start."""

    starts: list[float]  # start of each rollout, before its weights are pushed
    rollout_ends: list[float]
    update_ends: list[float]  # end of the updates on each rollout
    versions: list[int]  # version of the weights of each rollout
    waited: float  # seconds that the trainer waited for rollouts

    @property
    def seconds(self) -> float:
        """Seconds of the whole run."""
        return self.update_ends[-1]

    @property
    def idle(self) -> float:
        """Fraction of the run that the trainer waited for rollouts."""
        return self.waited / self.seconds

    @property
    def seconds_per_rollout(self) -> float:
        """Mean seconds from the end of one rollout's updates to the end of the next's."""
        return self.seconds / len(self.update_ends)


def simulate(rollouts: Sequence[float], updates: Sequence[float], *, push: float = 0.0, ahead: int = 0) -> Timeline:
    """Return the events of a run, see the docstring of this file.

    Args:
        rollouts: seconds that the servers take for each rollout.
        updates: seconds that the trainer takes for the updates on each rollout.
        push: seconds that the servers take to load the weights of a version.
        ahead: number K of updates that a rollout is ahead.
    """
    starts, rollout_ends, update_ends = list[float](), list[float](), list[float]()
    versions, waited = list[int](), 0.0
    for number, (rollout, update) in enumerate(zip(rollouts, updates, strict=True)):
        version = max(0, number - ahead)
        ready = update_ends[version - 1] if version else 0.0
        starts.append(max(rollout_ends[-1] if rollout_ends else 0.0, ready))
        load = push if not versions or version != versions[-1] else 0.0
        versions.append(version)
        rollout_ends.append(starts[-1] + load + rollout)
        free = update_ends[-1] if update_ends else 0.0
        waited += max(rollout_ends[-1] - free, 0.0)
        update_ends.append(max(rollout_ends[-1], free) + update)
    return Timeline(starts, rollout_ends, update_ends, versions, waited)


def compute_steady_seconds(rollout: float, update: float, *, push: float = 0.0, ahead: int = 0) -> float:
    """Return the seconds per rollout of a long run in which all rollouts, and all updates, take equally long.

    They are max(update, push + rollout, (push + rollout + update) / (K + 1)): the bounds by the trainer, by the servers, and
    by the cycle of K + 1 rollouts from weights to weights.
    """
    return max(update, push + rollout, (push + rollout + update) / (ahead + 1))


def share_seconds(seconds: float, samples: int, parts: int) -> float:
    """Return the seconds of the largest of `parts` parts of `samples` samples."""
    return seconds * math.ceil(samples / parts) / samples


def draw_times(mean: float, spread: float, stream: Random, count: int) -> list[float]:
    """Draw log-normal times with a mean, and a standard deviation of `spread` times the mean."""
    width = math.sqrt(math.log1p(spread * spread))
    return [mean * math.exp(width * stream.gauss(0.0, 1.0) - width * width / 2) for _ in range(count)]


def simulate_config(config: AheadConfig, *, servers: int, ahead: int, gpus: int | None = None) -> Timeline:
    """Simulate a run of a configuration.

    Args:
        config: seconds of rollouts and updates, and their spread.
        servers: number of servers.
        ahead: number of updates that a rollout is ahead.
        gpus: number of GPUs of the trainer, by default `config.gpus`.
    """
    rollout = share_seconds(config.rollout_seconds, config.samples, servers)
    update = _scale_update_seconds(config, config.gpus if gpus is None else gpus)
    streams = Random(f"rollouts {config.seed}"), Random(f"updates {config.seed}")
    rollouts, updates = (
        draw_times(mean, config.spread, stream, ROLLOUTS) for mean, stream in zip((rollout, update), streams, strict=True)
    )
    return simulate(rollouts, updates, push=config.push_seconds, ahead=ahead)


def find_least(config: AheadConfig) -> tuple[int, int] | None:
    """Return the smallest (servers, K) that keeps the trainer busy, or None."""
    if config.servers is not None:
        return _find_least_ahead(config, config.servers)
    low, high = 1, 1
    while _find_least_ahead(config, high) is None:
        if high >= config.samples:  # further servers would get no sample
            return None
        low, high = high + 1, min(2 * high, config.samples)
    while low < high:  # more servers are never slower
        middle = (low + high) // 2
        low, high = (low, middle) if _find_least_ahead(config, middle) is not None else (middle + 1, high)
    return _find_least_ahead(config, high)


def _find_least_ahead(config: AheadConfig, servers: int) -> tuple[int, int] | None:
    """Return the servers with the smallest K that keeps the trainer busy, or None."""
    for ahead in range(config.ahead + 1):
        if simulate_config(config, servers=servers, ahead=ahead).idle <= config.idle:
            return servers, ahead
    return None


class GpuSplit(NamedTuple):
    """Division of GPUs between a trainer and servers."""

    gpus: int  # of the trainer
    servers: int
    ahead: int
    run: Timeline
    in_turn: float  # seconds per rollout if all GPUs sample and then all GPUs learn


def find_best_split(config: AheadConfig, total: int) -> GpuSplit:
    """Return the division of GPUs with the most rollouts per second, with the smallest K that costs at most 1 % of them."""
    most = (total - 1) // config.server_gpus

    def estimate_seconds(servers: int) -> float:
        rollout = share_seconds(config.rollout_seconds, config.samples, servers)
        update = _scale_update_seconds(config, total - servers * config.server_gpus)
        return compute_steady_seconds(rollout, update, push=config.push_seconds, ahead=config.ahead)

    servers = min(range(1, most + 1), key=estimate_seconds)
    gpus = total - servers * config.server_gpus
    runs = [simulate_config(config, servers=servers, ahead=ahead, gpus=gpus) for ahead in range(config.ahead + 1)]
    ahead = next(k for k, run in enumerate(runs) if run.seconds <= 1.01 * runs[-1].seconds)
    everyone = total // config.server_gpus
    in_turn = (
        share_seconds(config.rollout_seconds, config.samples, everyone)
        + _scale_update_seconds(config, total)
        + config.push_seconds
    )
    return GpuSplit(gpus, servers, ahead, runs[ahead], in_turn)


def show(config: AheadConfig, *, console: Console) -> None:
    """Print which K and how many servers keep the trainer busy, and the best division of up to `most_gpus` GPUs.

    Raises:
        UsageError: seconds of rollouts or updates are missing, or there are too few GPUs for a trainer and a server.
    """
    for name in ("rollout_seconds", "update_seconds"):
        if not getattr(config, name):
            raise UsageError(name, 0.0, "the seconds of a measured run")
    if config.most_gpus <= config.server_gpus:
        expected = f"more than the {config.server_gpus} GPUs of a server"
        raise UsageError("most_gpus", config.most_gpus, expected, "a trainer needs one as well")
    fewest = find_least(config)
    most = config.servers or (fewest[0] if fewest else config.samples)
    counts = [*(() if config.servers else (2**power for power in range(most.bit_length()) if 2**power < most)), most]
    rows = {
        _format_servers(count): tuple(
            f"{simulate_config(config, servers=count, ahead=ahead).idle:.1%}" for ahead in range(config.ahead + 1)
        )
        for count in counts
    }
    heads = tuple(f"K = {ahead}" for ahead in range(config.ahead + 1))
    gpus = f"{config.gpus} GPU{'s' if config.gpus > 1 else ''}"
    console.print(table(f"time that a trainer on {gpus} waits, by updates ahead", heads, rows), highlight=False)
    if fewest is None:
        who = _format_servers(config.servers) if config.servers else "no number of servers"
        verb = "do not keep" if config.servers and config.servers > 1 else "does not keep" if config.servers else "keeps"
        line = f"With K up to {config.ahead}, {who} {verb} the trainer busy ({config.idle:.0%} idle at most)."
    else:
        run = simulate_config(config, servers=fewest[0], ahead=fewest[1])
        line = (
            f"{_format_servers(fewest[0])} and K = {fewest[1]} keep the trainer busy: it waits {run.idle:.1%} of the time, "
            f"and a rollout takes {run.seconds_per_rollout:.3g} s."
        )
    console.print(line, highlight=False, soft_wrap=True)
    totals = (2**power for power in range(1, config.most_gpus.bit_length()) if config.server_gpus < 2**power)
    splits = {total: find_best_split(config, total) for total in totals}
    rows = {
        f"{total} GPUs": (
            str(split.gpus),
            str(split.servers),
            str(split.ahead),
            f"{split.run.idle:.1%}",
            f"{config.samples / split.run.seconds_per_rollout:.3g}",
            f"{config.samples / split.in_turn:.3g}",
        )
        for total, split in splits.items()
    }
    heads = ("trainer", "servers", "K", "waits", "samples/s", "in turn")
    console.print(table("the fastest division of the GPUs", heads, rows), highlight=False)
    console.print("in turn: samples/s if all GPUs sample, and then all learn.", highlight=False, soft_wrap=True)


def _scale_update_seconds(config: AheadConfig, gpus: int) -> float:
    """Return the seconds of the updates on a number of GPUs, each with whole samples."""
    per_sample = config.update_seconds / math.ceil(config.samples / config.gpus)
    return per_sample * math.ceil(config.samples / gpus)


def _format_servers(count: int) -> str:
    return "1 server" if count == 1 else f"{count} servers"
