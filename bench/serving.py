"""Cost of samples by a server: CPU time, bytes and latents, beside the same samples in process.

A real `fluvial serve` answers the client of training. Both processes have the same random weights, and their samples must
have the same bits. CPU time is user and system time of both processes: waits do not count, and other programs on the machine
change it less than wall time. Prompts are embedded by a table, latents are only enlarged, and there is no guidance, so
sampling is the network alone. A real run samples for longer, so that serving is a smaller share; its text encoders run at
both ends.

Then an adapter and all weights are pushed to the server by each transport, with and without checksums, in wall time, because
training waits for a push.
"""

import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fluvial.bench import harness
from fluvial.bench.peers.work import PeerModel
from fluvial.bench.update.cases import SIZES, NetworkSize
from fluvial.core.checks import check_fields
from fluvial.core.random import key
from fluvial.core.transitions import bind
from fluvial.engines.data.records import Prompt
from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.world import init_world
from fluvial.engines.errors import RunError
from fluvial.engines.extensions.remote.remote import RemoteSource
from fluvial.engines.extensions.remote.weight_sync import FACTOR_METHODS, METHODS, WeightSync
from fluvial.engines.extensions.wire.client import JSON, HttpClient, Reply
from fluvial.engines.extensions.wire.response import read_response
from fluvial.engines.gathered import layout
from fluvial.engines.sampling.build import build_source
from fluvial.engines.sampling.config import RolloutConfig, SamplingConfig
from fluvial.engines.sampling.generate import Chunk, Requests, Sampling, StochasticSteps, move_schedule
from fluvial.engines.sampling.samplers import Stochastic
from fluvial.engines.sampling.source import InProcess, RolloutSource
from fluvial.models.handwriting.model import CONFIG
from fluvial.models.lora import JOINT_ATTENTION, LoraConfig, add_lora

STEPS, ETA = 10, 0.7  # of the schedule, and of the noise
WINDOWS = (range(2, 3), range(2, 4), range(STEPS))  # the stochastic steps, which are recorded and sent


RANK = 16  # of the adapter that is pushed
PIXELS = 8  # pixels per latent, along a side


class Transformer(PeerModel):
    """SD3's transformer with random weights, and a trivial VAE."""

    def decode(self, latents: Tensor) -> Tensor:
        """Return the first channel as images `[B, 3, H, W]` in [0, 1]."""
        enlarged = latents[:, :1].float().repeat_interleave(PIXELS, 2).repeat_interleave(PIXELS, 3)
        return ((enlarged + 1) / 2).clamp(0, 1).expand(-1, 3, -1, -1)


# The server finds the models by these names. SMALL has 55 million parameters, and 256 tokens for 256 x 256 pixels.
SETTINGS = {
    **CONFIG,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 6,
    "num_attention_heads": 8,
    "attention_head_dim": 64,
    "caption_projection_dim": 512,
    "joint_attention_dim": 1024,
    "pooled_projection_dim": 768,
}
SMALL, TINY = Transformer(NetworkSize(SETTINGS, (16, 32, 32), 77)), Transformer(SIZES["tiny"])


@contextmanager
def open_server(name: str, samples: int) -> Iterator[tuple[str, Path]]:
    """Start a server of a model of this file; yield its address, and the folder of its process in /proc."""
    line = [sys.executable, "-P", "-m", "fluvial.engines", "serve", f"{__name__}:{name}", "--port", "0", "--micro-batch"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process: Any = subprocess.Popen(
        [*line, str(samples)], stdout=subprocess.PIPE, text=True, env=environment, encoding="utf-8"
    )
    try:
        match = re.search(r"http://\S+", process.stdout.readline())
        if match is None:
            raise RunError("serving: the server has not started; its message on standard error says why")
        yield match[0], Path("/proc", str(process.pid))
    finally:
        process.kill()
        process.wait(30)


def read_cpu_seconds(folder: Path) -> float:
    """Read user and system time of a process or thread, with a resolution of 10 ms on most machines."""
    numbers = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ServingConfig:
    """Measure CPU time, bytes and latents of samples by `fluvial serve`, beside the same samples in process.

    Args:
        samples: samples per rollout: one request, and one micro-batch.
        runs: rounds per window, after a warm-up round.
        tiny: use a tiny network and one round, and write no rows: bytes and latents are exact, times are meaningless.
        out: folder of serving.csv and pushes.csv; rows are appended.
    """

    samples: int = 4
    runs: int = 5
    tiny: bool = False
    out: Path = harness.RESULTS

    def __post_init__(self) -> None:
        check_fields(self, "serving", samples=(1, 256), runs=(1, 2**16))


@dataclass(frozen=True)
class ServingRow:
    """The cost of served samples; percentages are of the CPU time of sampling in process."""

    parameters: int
    steps: int
    recorded: int
    samples: int
    runs: int
    inside_seconds: float  # CPU time of a sample in process, median
    served_seconds: float  # of both processes
    overhead_p20: float  # percent, of the difference within a round
    overhead_p50: float
    overhead_p80: float
    around_p50: float  # percent, without copies by the thread that samples
    bytes_per_sample: float  # bodies of requests and replies
    latents_per_step: float  # per recorded step of a sample
    device: str
    threads: int
    torch: str
    python: str
    date: str


class Seconds(NamedTuple):
    """CPU time of a rollout."""

    client: float  # this process
    total: float  # with the server
    around: float  # without the thread of the server that samples


def time_rollout(source: RolloutSource, requests: Requests, sampling: Sampling, server: Path) -> tuple[Chunk, Seconds]:
    """Generate a rollout of a source, and return it with its CPU seconds; the server must be otherwise idle."""
    seconds, threads = read_cpu_seconds(server), {thread: read_cpu_seconds(thread) for thread in (server / "task").iterdir()}
    start = time.process_time()
    (chunk,) = source.generate(requests, sampling, micro_batch=len(requests.ids))
    client = time.process_time() - start
    time.sleep(0.1)  # the server closes the connection
    busiest = max(read_cpu_seconds(thread) - before for thread, before in threads.items())
    total = client + read_cpu_seconds(server) - seconds
    return chunk, Seconds(client, total, total - busiest)


def measure(config: ServingConfig) -> Iterator[ServingRow]:
    """Yield the row of each window; RunError if the server does not start, or its samples differ from this process's."""
    torch.set_num_threads(1)
    model, kept = TINY if config.tiny else SMALL, list[tuple[bytes, bytes]]()
    module, schedule = model.build().eval(), move_schedule(model.schedule(STEPS), torch.device("cpu"))
    count, runs = config.samples, 1 if config.tiny else config.runs
    requests = Requests([Prompt("1")] * count, range(count), key(17))

    with init_world() as world, open_server("TINY" if config.tiny else "SMALL", count) as (address, server):
        inside: RolloutSource = InProcess(model, lambda: nullcontext(module))
        settings = SamplingConfig(steps=STEPS, sampler=Stochastic(eta=ETA))
        remote = build_source(RolloutConfig(source=address), settings, model, lambda: nullcontext(module), world)
        assert isinstance(remote, RemoteSource)
        client = remote.pool.servers[0].client
        attempt = client.attempt

        def keep(path: str, body: bytes | None = None, content_type: str = JSON) -> tuple[Reply | None, str]:
            reply, problem = attempt(path, body, content_type)
            kept[:] = [(body or b"", b"" if reply is None else reply.body)]
            return reply, problem

        client.attempt = keep  # type: ignore[method-assign]
        for window in WINDOWS:
            stochastic = StochasticSteps(bind("flow_sde", ETA, schedule.levels), window)
            sampling = Sampling(model.size.event, schedule, stochastic=stochastic, final=False)  # as in training on steps
            rounds = list[tuple[float, Seconds]]()
            for number in range(runs + 1):
                # The order alternates from round to round.
                order: tuple[RolloutSource, ...] = (inside, remote) if number % 2 else (remote, inside)
                rollouts = {source: time_rollout(source, requests, sampling, server) for source in order}
                leaves = (optree.tree_leaves((chunk.trajectory, chunk.images)) for chunk, _ in rollouts.values())
                if not all(torch.equal(one, other) for one, other in zip(*leaves, strict=True)):
                    raise RunError("serving: the server makes other samples than this process, so nothing is compared")
                rounds.append((rollouts[inside][1].client, rollouts[remote][1]))
            (request, reply), rounds = kept[0], rounds[1:]
            percent = [100 * (there.total / here - 1) for here, there in rounds]
            around = [100 * there.around / here for here, there in rounds]
            sent = [sample.dit_trajectory for sample in read_response(reply)]
            latents = sum(len(trajectory.latents) for trajectory in sent if trajectory is not None)
            p20, p50, p80 = harness.compute_spread(torch.tensor(percent).double())
            yield ServingRow(
                parameters=sum(p.numel() for p in module.parameters()),
                steps=STEPS,
                recorded=len(window),
                samples=count,
                runs=runs,
                inside_seconds=median(here for here, _ in rounds) / count,
                served_seconds=median(there.total for _, there in rounds) / count,
                overhead_p20=p20,
                overhead_p50=p50,
                overhead_p80=p80,
                around_p50=median(around),
                bytes_per_sample=(len(request) + len(reply)) / count,
                latents_per_step=latents / (count * len(window)),
                **harness.collect_facts(ServingRow),
            )


@dataclass(frozen=True)
class PushRow:
    """The cost of a push of weights to one server on this machine."""

    parameters: int
    trained: str  # adapter or all
    weights: str  # rollout.servers.weights
    runs: int
    bytes: int  # of the tensors that are sent
    seconds_p20: float  # of a push, with the checksums of both sides
    seconds_p50: float
    seconds_p80: float
    without_sums_p50: float
    device: str
    threads: int
    torch: str
    python: str
    date: str


def measure_pushes(config: ServingConfig) -> Iterator[PushRow]:
    """Yield the row of each transport of an adapter, and of all weights; RunError if the server rejects them.

    The transports take turns. Those that send merged weights are measured with all weights only.
    """
    torch.set_num_threads(1)
    model, runs, versions = TINY if config.tiny else SMALL, 1 if config.tiny else config.runs, itertools.count()
    with init_world() as world, open_server("TINY" if config.tiny else "SMALL", config.samples) as (address, _):
        for trained, ways in {"adapter": FACTOR_METHODS, "all": METHODS[1:]}.items():
            module = model.build()
            if trained == "adapter":
                add_lora(module, LoraConfig(rank=RANK), JOINT_ATTENTION)
            engine, peer = Engine(module, [], OptimizerConfig(), world, updates=1), HttpClient(address)
            sent = layout(module, adapter="default" if trained == "adapter" else None)
            syncs = {way: WeightSync(world, method=way) for way in ways}

            def push(sync: WeightSync, verify: bool, engine: Engine = engine, peer: HttpClient = peer) -> None:
                next(iter(engine.sharded.shards(trainable=True).values())).add_(1e-3)
                sync.verify = verify
                sync.push(engine, next(versions), [peer])

            work = {f"{way}{sums}": partial(push, sync, sums) for way, sync in syncs.items() for sums in (True, False)}
            seconds = harness.alternate(runs, work)
            for way, sync in syncs.items():
                sync.close()
                p20, p50, p80 = harness.compute_spread(torch.tensor(seconds[f"{way}True"]).double())
                yield PushRow(
                    parameters=sum(parameter.numel() for parameter in model.build().parameters()),
                    trained=trained,
                    weights=way,
                    runs=runs,
                    bytes=sum(tensor.numel() * tensor.element_size() for tensor in sent.values()),
                    seconds_p20=p20,
                    seconds_p50=p50,
                    seconds_p80=p80,
                    without_sums_p50=median(seconds[f"{way}False"]),
                    **harness.collect_facts(PushRow),
                )


def run(config: ServingConfig) -> list[ServingRow]:
    """Measure, append to serving.csv and pushes.csv, and print two tables of Markdown."""
    rows, lines = list[ServingRow](), []
    for row in measure(config):
        rows.append(row)
        if not config.tiny:
            harness.append(config.out / "serving.csv", [row], ServingRow)
        lines.append(
            {
                "recorded": f"{row.recorded} of {row.steps}",
                "in process": f"{row.inside_seconds:.3f} s",
                "served": f"{row.served_seconds:.3f} s",
                "overhead": f"{row.overhead_p50:.1f} % ({row.overhead_p20:.1f} to {row.overhead_p80:.1f})",
                "around sampling": f"{row.around_p50:.1f} %",
                "MB per sample": f"{row.bytes_per_sample / 1e6:.2f}",
                "latents per step": f"{row.latents_per_step:.1f}",
            }
        )
    print(harness.format_markdown(lines))
    pushes = list(measure_pushes(config))
    if not config.tiny:
        harness.append(config.out / "pushes.csv", pushes, PushRow)
    print()
    print(
        harness.format_markdown(
            [
                {
                    "trained": row.trained,
                    "weights": row.weights,
                    "MB": f"{row.bytes / 1e6:.2f}",
                    "seconds per push": f"{row.seconds_p50:.3f} ({row.seconds_p20:.3f} to {row.seconds_p80:.3f})",
                    "without checksums": f"{row.without_sums_p50:.3f}",
                }
                for row in pushes
            ]
        )
    )
    return rows
