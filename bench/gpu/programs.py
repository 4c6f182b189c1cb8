"""Parts of a visit to a GPU with whole programs: kernels beside float64, runs, tests, and networks beside their plan."""

import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from xml.etree import ElementTree

import torch
from torch import Tensor

from fluvial.bench import harness
from fluvial.bench.gpu.config import GpuConfig, Rows
from fluvial.bench.operations import OPERATIONS, Operation, make_inputs
from fluvial.engines.engine.config import EngineConfig
from fluvial.engines.engine.world import init_world
from fluvial.engines.errors import RunError
from fluvial.engines.extensions.plan import check
from fluvial.engines.extensions.plan.plan import ImageSize, PlanConfig

ROOT = Path(__file__).resolve().parents[2]
PEAK = 989e12  # FLOP/s of dense bfloat16 products of an H100 SXM and an H200, by NVIDIA's data sheets
# Relative to the largest value: float32 sums, and gradients that are rounded to the velocities' bfloat16.
VALUE_BOUND, GRADIENT_BOUND = 1e-4, 1e-2
REWARD_BOUND = 0.03  # of a mean reward of 128 samples, beside the CPU's
TINY_RUN = (
    "--sampling.prompts 2 --sampling.group 2 --sampling.steps 4 --sampling.window.size 2 --sampling.window.high 3 "
    "--micro-batch 4 --passes.minibatches 1 --updates 1 --final-samples 4"
)
RUNS = {"float32": "--engine.compute float32 --engine.compile False", "bfloat16": "--engine.compile False"}
COMPILED = "bfloat16, compiled"
# (network, resolution, weights that are trained, samples per pass)
NETWORKS = (
    ("flux.1-dev", 512, "lora", 4),
    ("sd3.5-medium", 512, "lora", 8),
    ("flux.1-dev", 1024, "lora", 1),
    ("sd3.5-medium", 1024, "full", 2),
)


def compare_kernels(config: GpuConfig, rows: Rows, until: float) -> None:
    """Compare each operation and its gradient with the reference in float64; raise RunError if one is out of bounds."""
    device, wrong = torch.device(config.device), list[str]()
    cases = list(product(OPERATIONS, ((1271,), (16, 64, 64))))
    for provider in ("triton", "compiled") if config.device == "cuda" else ("reference",):
        for operation, event in cases:
            setting = f"{operation.name}, {provider}, 3 x {event}"
            torch.manual_seed(0)
            samples, numbers = make_inputs(operation, 3, event, dtype=torch.bfloat16, device=device)
            exact = _compute_values_and_gradients(operation, "reference", _widen(samples), _widen(numbers))
            try:
                values = _compute_values_and_gradients(operation, provider, samples, numbers)
            except Exception as failure:  # the other operations are compared nevertheless
                traceback.print_exc()
                wrong.append(f"{setting}: {type(failure).__name__}")
                continue
            for name, mine, theirs in zip(("value", *operation.gradients), values, exact, strict=True):
                error = float((mine.double() - theirs).abs().max() / theirs.abs().max())
                rows.add(
                    f"largest error of the {'value' if name == 'value' else 'gradient'} beside float64", setting, error, "1"
                )
                if not error <= (VALUE_BOUND if name == "value" else GRADIENT_BOUND):
                    wrong.append(f"{setting}, {name}: {error:.2g}")
    if wrong:
        raise RunError("; ".join(wrong))


def _compute_values_and_gradients(
    operation: Operation, provider: str, samples: dict[str, Tensor], numbers: dict[str, Tensor]
) -> list[Tensor]:
    leaves = {name: tensor.clone().requires_grad_(name in operation.gradients) for name, tensor in samples.items()}
    values = operation.call(provider, leaves, numbers)
    wanted = [leaves[name] for name in operation.gradients]
    return [values.detach(), *(torch.autograd.grad(values.sum(), wanted) if wanted else ())]


def _widen(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def train(config: GpuConfig, rows: Rows, until: float) -> None:
    """Run `fluvial train handwriting` on the CPU and on the device, and compare log-ratios and rewards.

    Raises:
        RunError: a run failed, rollout and update disagree in a run that is not compiled, or a reward is far from the CPU's.
    """
    folder = Path(mkdtemp())
    few = (TINY_RUN if config.size == "tiny" else "--updates 4 --final-samples 200").split()

    def start(name: str, flags: str, **environment: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "fluvial.engines", "train", "handwriting", "--out", str(folder / name)]
        return subprocess.Popen(
            [*command, "--evaluation.every", "0", *few, *flags.split()], env={**os.environ, **environment}
        )

    # Compilation takes longest, so this run and the CPU's overlap with the others, which are timed on other cores.
    background = {
        "cpu": start("cpu", "", CUDA_VISIBLE_DEVICES=""),
        COMPILED: start(COMPILED, "--engine.compile True --max-log-ratio 1"),
    }
    wrong = list[str]()
    for name, flags in RUNS.items():
        wrong += _compare_run(name, start(name, flags), folder, rows)
    for name, run in background.items():
        wrong += _compare_run(name, run, folder, rows)
    if wrong:
        raise RunError("; ".join(wrong))


def _compare_run(name: str, run: subprocess.Popen[bytes], folder: Path, rows: Rows) -> list[str]:
    """Wait for a run, write its rows, and return its problems."""
    if code := run.wait():
        return [f"{name}: exit code {code}"]
    wrong, records, expected = list[str](), _read_updates(folder / name), _read_updates(folder / "cpu")
    for record in records:
        setting = f"{name}, update {record['update']}"
        for phase, seconds in record["seconds"].items():
            rows.add(phase, setting, seconds, "s")
        rows.add("mean reward", setting, record["reward"]["mean"], "1")
        rows.add("largest first |log ratio|", setting, record["first_pass_max_abs_log_ratio"], "nats")
        if record["first_pass_max_abs_log_ratio"] and name != COMPILED:
            wrong.append(f"{setting}: the first |log ratio| is {record['first_pass_max_abs_log_ratio']:.2g}, expected 0")
    means = [[record["reward"]["mean"] for record in each] for each in (records, expected)]
    distance = max((abs(mine - cpu) for mine, cpu in zip(*means, strict=False)), default=0.0)
    rows.add("largest distance of a mean reward to the CPU's", name, distance, "1", f"of {min(map(len, means))} updates")
    return wrong if distance <= REWARD_BOUND else [*wrong, f"{name}: a mean reward is {distance:.2g} from the CPU's"]


def _read_updates(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    return [record for record in records if "loss" in record]


def run_kernel_tests(config: GpuConfig, rows: Rows, until: float) -> None:
    """Run the kernel tests on the device, or a few in Triton's interpreter on a CPU; raise RunError if one fails."""
    real = config.size == "real"
    report = config.out.resolve() / "kernels.xml"
    chosen: Sequence[str] = ("-n", "12", "--dist", "worksteal") if real else ("-k", "test_an_empty_batch")
    settings = {"FLUVIAL_TEST_DEVICE": "cuda"} if real else {"TRITON_INTERPRET": "1"}
    options = ["-q", "-o", "filterwarnings=default", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "tests/kernels/test_fused.py", *options, *chosen],
        cwd=ROOT,
        env={**os.environ, **settings, "FLUVIAL_NO_TYPECHECK": "1"},
        timeout=until - time.perf_counter(),
    )
    ran = list(ElementTree.parse(report).iter("testcase"))
    failed = [test.get("name") for test in ran if test.find("failure") is not None or test.find("error") is not None]
    rows.add("tests", "passed", len(ran) - len(failed), "tests")
    rows.add("tests", "failed", len(failed), "tests", ", ".join(map(str, failed))[:1000])
    if failed or not ran:
        raise RunError(f"{len(failed)} of {len(ran)} tests failed")


def time_networks(config: GpuConfig, rows: Rows, until: float) -> None:
    """Update published networks with random weights in bfloat16: seconds, MFU, and memory beside the plan's."""
    networks = NETWORKS if config.size == "real" else (("handwriting", None, "lora", 4),)
    for name, resolution, trained, micro_batch in networks:
        if time.perf_counter() > until:
            return
        plan = PlanConfig(
            train=trained,  # type: ignore[arg-type]
            pipeline=ImageSize(resolution, resolution),
            micro_batch=micro_batch,
            micro_batches=2,
            engine=EngineConfig(compute="bfloat16", compile=False, checkpointing="block" if trained == "full" else "none"),
        )
        _time_network(
            name, plan, f"{name}{f' {resolution}^2' if resolution else ''}, {trained}, {micro_batch} per pass", rows
        )
        gc.collect()  # hooks hold modules in reference cycles


def _time_network(name: str, plan: PlanConfig, setting: str, rows: Rows) -> None:
    with init_world() as world:
        _time_case(check.build_case(name, plan, world), setting, rows)


def _time_case(case: check.PlanCase, setting: str, rows: Rows) -> None:
    engine, items, loss, micro_batch = case.engine, case.items, case.loss, case.micro_batch
    count, on_gpu = len(items["timestep"]), engine.world.device.type == "cuda"
    for compared in check.compare(case):
        rows.add(f"{compared.kind}, planned", setting, compared.planned, "bytes")
        rows.add(f"{compared.kind}, counted", setting, compared.measured, "bytes")
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def update() -> None:
        engine.update(items, loss, torch.ones(count, device=engine.world.device), count=count, micro_batch=micro_batch)

    def step() -> None:
        with engine.inference():
            loss({name: tensor[:micro_batch] for name, tensor in items.items()})

    flops = engine.update(items, loss, count=count, micro_batch=micro_batch).flops
    seconds = harness.alternate(3, {"update": update, "rollout step": step})
    for what, times in seconds.items():
        rows.add(what, setting, sorted(times)[1], "s", f"of {min(times):.4g} to {max(times):.4g}")
    rows.add("MFU of an update", setting, flops / sorted(seconds["update"])[1] / PEAK, "1", f"of {PEAK:g} FLOP/s")
    if on_gpu:
        rows.add("allocator's peak", setting, torch.cuda.max_memory_allocated(), "bytes")
        rows.add("allocator's reserved", setting, torch.cuda.max_memory_reserved(), "bytes")
