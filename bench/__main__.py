"""`python -P -m fluvial.bench NAME`: run a benchmark, append its rows to bench/results, print a table."""

import sys
from collections.abc import Callable

from fluvial.bench import aot, gpu, kernels, phases, serving, traffic
from fluvial.bench.objectives import report as objectives
from fluvial.bench.objectives.cases import ObjectivesConfig
from fluvial.bench.peers import report as peers
from fluvial.bench.update.cases import UpdateConfig
from fluvial.bench.update.report import run as update
from fluvial.engines.cli.main import exit_with
from fluvial.engines.cli.parse import parsed
from fluvial.engines.errors import UsageError

USAGE = """usage: python -P -m fluvial.bench NAME [--field value ...]

  phases      seconds and samples per second of rollout, reward and update of the built-in job
  update      collectives, host reads, memory and seconds of an optimizer update, beside the loop of published trainers
  peers       rollout and update beside the code of other projects, read from clones in a folder of yours
  serving     samples by `fluvial serve` beside the same samples in process: CPU time, bytes and latents
  objectives  every recipe on the built-in jobs: accuracy at equal samples and at equal time, with a plot
  kernels     the hot path of a step: reference, torch.compile and fused kernels against a copy, at sizes of real models
  traffic     bytes, launches and saved bytes of the hot path, counted
  gpu         what a lent GPU should settle: kernels, updates, compilation, batch invariance and nccl, each with a time limit
  aot         compile every kernel for GPUs that need not be present: registers, spills and widths of accesses
"""


def main(args: list[str]) -> int:
    """Run the benchmark that the arguments name."""
    if not args or args[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    benchmarks: dict[str, tuple[type, Callable[..., object]]] = {
        "phases": (phases.PhasesConfig, phases.run),
        "update": (UpdateConfig, update),
        "peers": (peers.PeersConfig, peers.run),
        "serving": (serving.ServingConfig, serving.run),
        "objectives": (ObjectivesConfig, objectives.run),
        "kernels": (kernels.KernelsConfig, kernels.run),
        "traffic": (traffic.TrafficConfig, traffic.run),
        "gpu": (gpu.GpuConfig, gpu.run),
        "aot": (aot.AotConfig, aot.run),
    }
    if args[0] not in benchmarks:
        raise UsageError(f"unknown benchmark {args[0]!r}, expected one of {', '.join(benchmarks)}")
    config, run = benchmarks[args[0]]
    run(parsed(config(), f"fluvial.bench {args[0]}", args[1:]))
    return 0


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
