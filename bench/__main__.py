"""`python -P -m fluvial.bench NAME`: run a benchmark, append its rows to bench/results, print a table. `pretrain-MODEL`
writes the base weights of a built-in model."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from fluvial.bench import aot, caches, kernels, modular, phases, pretrain, prompts, serving, traffic, waits
from fluvial.bench.gpu.config import GpuConfig
from fluvial.bench.gpu.parts import run as run_parts
from fluvial.bench.peers import report as peers
from fluvial.bench.studies import few_steps, objectives, tunnel
from fluvial.bench.update.cases import UpdateConfig
from fluvial.bench.update.measure import run as update
from fluvial.engines.cli.main import exit_with
from fluvial.engines.cli.parse import console, parse_config
from fluvial.engines.errors import UsageError


def main(args: list[str]) -> int:
    """Run a benchmark by name."""
    write_weights = partial(pretrain.pretrain, console=console())
    benchmarks: dict[str, tuple[Callable[[], Any], Callable[..., object]]] = {
        "phases": (phases.PhasesConfig, phases.run),
        "update": (UpdateConfig, update),
        "peers": (peers.PeersConfig, peers.run),
        "serving": (serving.ServingConfig, serving.run),
        "objectives": (objectives.ObjectivesConfig, objectives.run),
        "few-steps": (few_steps.FewStepsConfig, few_steps.run),
        "tunnel": (tunnel.TunnelConfig, tunnel.run),
        "kernels": (kernels.KernelsConfig, kernels.run),
        "traffic": (traffic.TrafficConfig, traffic.run),
        "gpu": (GpuConfig, run_parts),
        "caches": (caches.CachesConfig, caches.run),
        "modular": (modular.ModularConfig, modular.run),
        "prompts": (prompts.PromptsConfig, prompts.run),
        "waits": (waits.WaitsConfig, waits.run),
        "aot": (aot.AotConfig, aot.run),
        **{f"pretrain-{model}": (recipe, write_weights) for model, recipe in pretrain.RECIPES.items()},
    }
    if not args or args[0] in ("-h", "--help"):
        print("usage: python -P -m fluvial.bench NAME [--field value ...]\n")
        for name, (config, _) in benchmarks.items():
            print(f"  {name:28}{(config.__doc__ or '').splitlines()[0]}")
        return 0
    if args[0] not in benchmarks:
        raise UsageError(f"unknown benchmark {args[0]!r}, expected one of {', '.join(benchmarks)}")
    config, run = benchmarks[args[0]]
    run(parse_config(config(), f"fluvial.bench {args[0]}", args[1:]))
    return 0


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
