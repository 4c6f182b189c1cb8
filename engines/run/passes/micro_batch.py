"""The size of a micro-batch, chosen from memory and measured speed by forward and backward passes that leave no trace.

Passes are those of a micro-batch through the network; `PassesConfig` means epochs and minibatches over a batch instead.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.parallelize import count_programs
from fluvial.engines.engine.world import collective
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.run.log.progress import RunProgress
from fluvial.engines.run.passes.storages import LiveStorages
from fluvial.models.device import is_accelerator

GIB = 2**30
FASTER = 0.95  # a larger size is chosen if its time per sample is below this fraction of the best so far
USABLE = 0.8  # fraction of the free memory that passes may use: allocators leave gaps, and rewards need some too
REPEATS = 2  # timed passes per size; the faster one counts
AS_FAST = 0.98  # the smallest size with this fraction of the best speed is chosen
SLOWER = 1.1  # the search for pairs ends at a time per pair above this multiple of the best so far
TOO_LARGE = (
    "the passes of {} sample(s) do not fit into the memory: set `engine.checkpointing` to block, `engine.offload`, or a "
    "smaller resolution (fluvial plan adds up the bytes)"
)

Pass = Callable[[nn.Module, int], Tensor]  # forward pass of this many samples, to a tensor for a loss


class Passes(NamedTuple):
    """Forward passes like those of a run."""

    update: Pass  # with gradient
    rollout: Pass | None = None  # without gradient; None for a run without rollouts
    decode: Callable[[Tensor], Tensor] | None = None  # from the result of `rollout` to images, once per sample
    same: Callable[[int], bool] | None = None  # whether an update's pass of a size has a rollout's bits; None: not required


class Trial(NamedTuple):
    """Seconds and bytes of one size, on the slowest rank."""

    seconds: float  # rollout's forward plus update's forward and backward pass, see `_read_clock`; inf: out of memory
    peak: int  # bytes beyond weights and optimizer state, the largest of the ranks
    same: bool = True  # whether rows have the same bits as in a rollout's pass, on every rank

    @property
    def fits(self) -> bool:
        """Whether the passes fit into memory."""
        return self.seconds < math.inf

    def __str__(self) -> str:
        return "out of memory" if not self.fits else "other bits" if not self.same else ""


class Choice(NamedTuple):
    """A chosen size of micro-batches, and its trials."""

    micro_batch: int
    trials: dict[int, Trial]  # by size
    budget: int  # bytes that a pass may use
    seconds: float  # duration of the search
    name: str = "micro_batch"  # name of the setting

    @property
    def sizes(self) -> tuple[int, ...]:
        """The chosen size and the smaller sizes that were tried, largest first."""
        return tuple(sorted((size for size in self.trials if size <= self.micro_batch), reverse=True))

    @property
    def record(self) -> dict[str, float]:
        """The choice for the metrics."""
        rate = self.trials[self.micro_batch].seconds / self.micro_batch
        return {
            "chosen": self.micro_batch,
            "sizes_tried": len(self.trials),
            "seconds": self.seconds,
            "seconds_per_sample": rate,
            "peak_bytes": self.trials[self.micro_batch].peak,
            "budget_bytes": self.budget,
        }

    def __str__(self) -> str:
        tried = ", ".join(
            f"{size}: {str(trial) or f'{1000 * trial.seconds / size:.3g} ms'}" for size, trial in self.trials.items()
        )
        peak = self.trials[self.micro_batch].peak
        return (
            f"{self.name} {self.micro_batch}, chosen in {self.seconds:.1f} s (time per sample at {tried}; peak "
            f"{peak / GIB:.2f} of {self.budget / GIB:.2f} GiB)"
        )


def list_sizes(samples: int) -> list[int]:
    """Return the sizes to try: divisors of a rank's number of samples from 1 on, each at least twice the last.

    Other sizes would compute padding samples.
    """
    tried = [1]
    for size in range(2, samples + 1):
        if samples % size == 0 and size >= 2 * tried[-1]:
            tried.append(size)
    return tried


def choose_size(
    sizes: Sequence[int],
    measure: Callable[[int], Trial],
    *,
    budget: int,
    most: float = FASTER,
    again: bool = False,
    name: str = "micro_batch",
) -> Choice:
    """Choose the smallest size whose speed is at least 98 % of the best, among those with the bits of a rollout.

    Sizes are tried in turn. The search ends at a size whose extrapolated memory exceeds the budget, whose bits differ, or
    whose time per sample is too long.

    Args:
        sizes: sizes to try, rising; the first one is accepted whatever memory it uses.
        measure: function that tries a size; it must return the same on every rank.
        budget: bytes that a pass may use.
        most: largest accepted time per sample, as a multiple of the best so far.
        again: measure the accepted sizes once more, because times are noisy and differ little.
        name: name of the setting.

    Raises:
        UsageError: not even the first size fits.
    """
    start, trials, good = time.perf_counter(), dict[int, Trial](), list[int]()
    for size in sizes:
        if good and _extrapolate(trials, size) > budget:
            break
        trials[size] = trial = measure(size)
        if not good and not trial.fits:
            raise UsageError(TOO_LARGE.format(size))
        if good and not (trial.fits and trial.peak <= budget and trial.same):
            break
        if good and trial.seconds / size > most * min(trials[other].seconds / other for other in good):
            break
        good.append(size)
    for size in good if again and len(good) > 1 else ():
        trials[size] = trials[size]._replace(seconds=min(trials[size].seconds, measure(size).seconds))
    least = min(trials[size].seconds / size for size in good)
    best = next(size for size in good if AS_FAST * trials[size].seconds / size <= least)
    return Choice(best, trials, budget, time.perf_counter() - start, name)


def _extrapolate(trials: dict[int, Trial], size: int) -> float:
    """Extrapolate the bytes of a size linearly from the last two trials, or proportionally from the only one."""
    (last, now), *_ = reversed(trials.items())
    if len(trials) == 1:
        return now.peak * size / last
    before, then = list(trials.items())[-2]
    return now.peak + max(now.peak - then.peak, 0) / (last - before) * (size - last)


def measure_free_memory(device: torch.device) -> int:
    """Measure the bytes that this process can still allocate on a device; ranks on one host share its memory."""
    if is_accelerator(device):
        module = torch.get_device_module(device)
        free: int = module.mem_get_info(device)[0]
        return free + int(module.memory_reserved(device) - module.memory_allocated(device))
    return min(_measure_host_memory(), _measure_container_memory()) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _measure_host_memory() -> int:
    """Measure the available bytes of the host; without /proc, half of its memory."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _measure_container_memory(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Measure the bytes that the control group of this process still allows."""
    for most, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        try:
            return max(int((root / most).read_text(encoding="utf-8")) - int((root / used).read_text(encoding="utf-8")), 0)
        except (OSError, ValueError):  # no such file, or no limit
            continue
    return 2**62


@collective
@contextmanager
def open_trials(engine: Engine, passes: Passes) -> Iterator[Callable[[int], Trial]]:
    """Yield a function that tries a size.

    When the context ends, gradients, torch's random numbers and the modes of the modules are restored. Compiled blocks run
    eagerly, so that no size of a trial is compiled.

    Args:
        engine: engine of the run's network, between two updates.
        passes: passes to try.
    """
    device, failed = engine.world.device, False
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    persistent = [*engine.module.parameters(), *engine.module.buffers(), *engine.state().values(), *gradients]

    known: dict[int, tuple[int, bool]] = {}  # bytes and bits by size, which do not change from trial to trial

    def measure(size: int) -> Trial:
        nonlocal failed
        trial, same = Trial(math.inf, 0), True
        try:
            if size not in known:
                peak = _measure_peak(
                    lambda: _time_passes(engine, passes, size, decode=True), persistent, device, before=before
                )
                known[size] = peak, passes.same is None or passes.same(size)
            peak, same = known[size]
            trial = Trial(min(_time_passes(engine, passes, size) for _ in range(REPEATS)), peak)
        except torch.OutOfMemoryError:
            pass  # the exception holds the tensors of the pass until this block ends
        # All ranks get the same numbers, and so make the same decision.
        numbers = torch.tensor([[trial.seconds, trial.peak, not same]], dtype=torch.float64)
        seconds, most, differs = engine.world.gather(numbers).amax(0).tolist()
        failed = failed or seconds == math.inf
        return Trial(seconds, int(most), not differs)

    # New adapters add 0, which would hide differences in bits between sizes.
    filled = nullcontext() if passes.same is None else fill_zeros(engine)
    with _leave_no_trace(engine), filled, torch.compiler.set_stance("force_eager" if engine.compiles else "default"):
        with engine.world.agreed():
            try:  # a first pass of one sample gathers parameters and loads the decoder, unlike later passes
                _time_passes(engine, passes, 1, decode=True)
                with engine.inference():
                    pass  # registers the shards again
            except torch.OutOfMemoryError as error:
                raise UsageError(TOO_LARGE.format(1)) from error
        before = torch.get_device_module(device).memory_allocated(device) if is_accelerator(device) else 0
        yield measure
        _finish_passes(engine, passes, 1, failed=failed)


@collective
def run_once(engine: Engine, passes: Passes, size: int) -> None:
    """Run the passes of a size once, and leave no trace.

    Args:
        engine, passes: see `open_trials`.
        size: number of samples.
    """
    with _leave_no_trace(engine):
        _time_passes(engine, passes, size)
        _finish_passes(engine, passes, size, failed=False)


@contextmanager
def _leave_no_trace(engine: Engine) -> Iterator[None]:
    """Save gradients and the state of torch's random numbers, and restore them when the context ends."""
    device, parameters = engine.world.device, list(engine.module.parameters())
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        with torch.random.fork_rng([device] if is_accelerator(device) else [], device_type=device.type):
            yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if is_accelerator(device):
            torch.get_device_module(device).empty_cache()


def _time_passes(engine: Engine, passes: Passes, size: int, *, decode: bool = False) -> float:
    """Run the passes of a size, and return their seconds."""
    start = _read_clock(engine.world.device)
    if passes.rollout is not None:
        with engine.inference() as module:
            predicted = passes.rollout(module, size)
            if decode and passes.decode is not None:
                passes.decode(predicted.float())
    engine.sharded.set_last(False)
    with engine.sharded.train():
        passes.update(engine.module, size).float().square().mean().backward()
    return _read_clock(engine.world.device) - start


def _finish_passes(engine: Engine, passes: Passes, size: int, *, failed: bool) -> None:
    """Run a last pass that reduces the pending gradients, which the context then drops."""
    if failed:
        recover(engine)
    engine.sharded.set_last(True)
    with engine.sharded.train():
        passes.update(engine.module, size).float().square().mean().backward()
    with engine.inference():
        pass  # registers the shards again


@contextmanager
def fill_zeros(engine: Engine) -> Iterator[None]:
    """Fill trained parameters that are all 0, such as the second factors of new adapters, with noise.

    Values are drawn by torch's generator. When the context ends, the parameters are 0 again.
    """
    engine.sharded.reshard()
    empty = [shard for shard in engine.sharded.shards(trainable=True).values() if not shard.any()]
    for shard in empty:
        shard.normal_(std=0.02)
    try:
        yield
    finally:
        engine.sharded.reshard()
        for shard in empty:
            shard.zero_()


@collective
def recover(engine: Engine) -> None:
    """Reset the engine after an interrupted pass; RunError if this version of torch cannot."""
    reset = getattr(engine.sharded.copies or engine.module, "reset_iter_state", None)
    if reset is None:
        raise RunError(
            f"a pass was interrupted, and FSDP2 of torch {torch.__version__} cannot recover: set `engine.micro_batch` "
            "to a number and `engine.compile` to False, or use a newer torch"
        )
    reset()


def _read_clock(device: torch.device) -> float:
    """Return the time after the device has finished; on a CPU, the CPU time of this process over all threads.

    CPU time does not depend on other programs that use the cores.
    """
    if not is_accelerator(device):
        return time.process_time()
    torch.get_device_module(device).synchronize(device)
    return time.perf_counter()


def _measure_peak(run: Callable[[], object], persistent: Sequence[Tensor], device: torch.device, *, before: int) -> int:
    """Run a function, and return the peak of its allocated bytes, beyond those that exist anyway.

    Args:
        persistent: tensors that are not counted on the CPU.
        device: device of the computation.
        before: bytes that are not counted on a GPU.
    """
    if is_accelerator(device):
        module = torch.get_device_module(device)
        module.reset_peak_memory_stats(device)
        run()
        return int(module.max_memory_allocated(device)) - before
    with LiveStorages(persistent) as live:
        run()
    return live.peak


class WarmUp(NamedTuple):
    """Result of a warm-up."""

    programs: int  # compiled programs, or read from the cache
    seconds: float
    failure: str | None = None  # why blocks run eagerly instead

    def __str__(self) -> str:
        if self.failure is not None:
            return f"blocks cannot be compiled ({self.failure}): they run eagerly, as with engine.compile False"
        return f"blocks compiled to {self.programs} programs in {self.seconds:.1f} s"


@collective
def warm_up(engine: Engine, passes: Sequence[Passes], size: int, *, progress: RunProgress | None = None) -> WarmUp:
    """Run each of the passes with a number of samples, and leave no trace but the compiled programs.

    Passes of several sizes make the compiler treat a dimension as dynamic, so that further sizes need no new program. If the
    blocks cannot be compiled and `engine.compile` is auto, they run eagerly from now on.

    Args:
        engine: engine with compiled blocks, between two updates.
        passes: passes in each form that occurs in the run.
        size: number of samples.
        progress: progress that shows the number of the pass.

    Raises:
        UsageError: the blocks cannot be compiled, and `engine.compile` is True.
    """
    start, before, failure = time.perf_counter(), count_programs(), None
    for number, each in enumerate(passes):
        if progress is not None:
            progress.show_phase(f"compiling blocks, pass {number + 1} of {len(passes)}")
        try:
            run_once(engine, each, size)
        except torch._dynamo.exc.TorchDynamoException as error:
            failure = " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__
            break
    failures = [report for report in engine.world.gather_items(failure) if report is not None]
    if failures and engine.sharding.compile != "auto":
        raise UsageError(f"`engine.compile` is True, and the blocks cannot be compiled: {failures[0]}; set it to False")
    if failures:
        torch.compiler.set_stance("force_eager")
        recover(engine)
        run_once(engine, passes[0], size)  # eagerly
    return WarmUp(count_programs() - before, time.perf_counter() - start, failures[0] if failures else None)
