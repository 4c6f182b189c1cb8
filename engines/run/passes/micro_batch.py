"""The size of a micro-batch, chosen from memory and measured speed with passes that leave no trace."""

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
FASTER = 0.95  # a larger size is taken if its time per sample is below this fraction of the best so far
USABLE = 0.8  # fraction of the free memory that passes may take: allocators leave gaps, and rewards need some too
REPEATS = 2  # timed passes per size; the faster one counts
AS_FAST = 0.98  # of pairs per pass, the smallest number counts whose speed is this fraction of the best
SLOWER = 1.1  # no larger number of pairs is tried after one whose time per pair is this multiple of the best so far
TOO_LARGE = (
    "the passes of {} sample(s) do not fit into the memory: set `engine.checkpointing` to block, `engine.offload`, or a "
    "smaller resolution (fluvial plan adds up the bytes)"
)

Pass = Callable[[nn.Module, int], Tensor]  # a forward pass of as many samples, to a tensor that a loss can be made of


class Passes(NamedTuple):
    """Forward passes like those of a run."""

    update: Pass  # with gradient
    rollout: Pass | None = None  # without; None where the run makes no rollout
    decode: Callable[[Tensor], Tensor] | None = None  # from the result of `rollout` to images, once per sample
    same: Callable[[int], bool] | None = None  # whether an update's pass of a size has a rollout's bits; None: not asked


class Trial(NamedTuple):
    """Seconds and bytes of one size, on the slowest rank."""

    seconds: float  # of a rollout's forward pass and an update's forward and backward pass, see `_now`; inf: out of memory
    peak: int  # bytes beyond weights and optimizer state, on the rank that took most
    same: bool = True  # whether its rows have the bits that a rollout gives them, on every rank

    @property
    def fits(self) -> bool:
        """Whether the passes did not run out of memory."""
        return self.seconds < math.inf

    def __str__(self) -> str:
        return "out of memory" if not self.fits else "other bits" if not self.same else ""


class Choice(NamedTuple):
    """A size of micro-batches, and why."""

    micro_batch: int
    trials: dict[int, Trial]  # by size
    budget: int  # bytes that a pass may take
    seconds: float  # that the choice took
    name: str = "micro_batch"  # the setting

    @property
    def sizes(self) -> tuple[int, ...]:
        """The chosen size and the smaller ones that were tried, falling."""
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
        took = self.trials[self.micro_batch].peak
        return (
            f"{self.name} {self.micro_batch}, chosen in {self.seconds:.1f} s (time per sample at {tried}; peak "
            f"{took / GIB:.2f} of {self.budget / GIB:.2f} GiB)"
        )


def sizes(samples: int) -> list[int]:
    """Return the sizes to try: divisors of a rank's number of samples from 1 on, each at least twice the last.

    A size that does not divide them would compute samples that nobody asked for.
    """
    tried = [1]
    for size in range(2, samples + 1):
        if samples % size == 0 and size >= 2 * tried[-1]:
            tried.append(size)
    return tried


def choose(
    sizes: Sequence[int],
    measure: Callable[[int], Trial],
    *,
    budget: int,
    most: float = FASTER,
    again: bool = False,
    name: str = "micro_batch",
) -> Choice:
    """Return the smallest size whose speed is at least 98 % of the best, among those with the bits of a rollout.

    Sizes are tried in turn, as long as the memory of the next, which grows at most linearly, is within the budget, until one
    has other bits, or takes too long per sample.

    Args:
        sizes: sizes to try, rising; the first one is taken whatever memory it takes.
        measure: function that tries a size; it must return the same on every rank.
        budget: bytes that a pass may take.
        most: time per sample, in units of the best so far, beyond which a size is not taken and no larger one is tried.
        again: whether those that remain are tried once more, because times are noisy and differ little.
        name: the setting.

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
    """Return the bytes that a size will take: on the line through the last two, or in proportion to the only one."""
    (last, now), *_ = reversed(trials.items())
    if len(trials) == 1:
        return now.peak * size / last
    before, then = list(trials.items())[-2]
    return now.peak + max(now.peak - then.peak, 0) / (last - before) * (size - last)


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on a device; ranks on one host share its memory."""
    if is_accelerator(device):
        module = torch.get_device_module(device)
        free: int = module.mem_get_info(device)[0]
        return free + int(module.memory_reserved(device) - module.memory_allocated(device))
    return min(_free_on_host(), _free_in_container()) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _free_on_host() -> int:
    """Return the bytes that are available on the host; of a system without /proc, half of its memory."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _free_in_container(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that the control group of this process still allows."""
    for most, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        try:
            return max(int((root / most).read_text(encoding="utf-8")) - int((root / used).read_text(encoding="utf-8")), 0)
        except (OSError, ValueError):  # no such file, or no limit
            continue
    return 2**62


@collective
@contextmanager
def trials(engine: Engine, passes: Passes) -> Iterator[Callable[[int], Trial]]:
    """Yield a function that tries a size.

    Nothing of it remains when the context ends: gradients, torch's random numbers and the modes of the modules are as
    before. Compiled blocks run as they were written, so that no size of a trial is compiled.

    Args:
        engine: engine of the run's network, which has no update under way.
        passes: what is tried.
    """
    device, failed = engine.world.device, False
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    held = [*engine.module.parameters(), *engine.module.buffers(), *engine.state().values(), *gradients]

    known: dict[int, tuple[int, bool]] = {}  # bytes and bits by size, which do not change from trial to trial

    def measure(size: int) -> Trial:
        nonlocal failed
        trial, same = Trial(math.inf, 0), True
        try:
            if size not in known:
                peak = _peak(lambda: _seconds(engine, passes, size, decode=True), held, device, before=before)
                known[size] = peak, passes.same is None or passes.same(size)
            peak, same = known[size]
            trial = Trial(min(_seconds(engine, passes, size) for _ in range(REPEATS)), peak)
        except torch.OutOfMemoryError:
            pass  # outside of this block nothing refers to the tensors of the pass any more
        # All ranks take the same numbers, and so the same decision.
        numbers = torch.tensor([[trial.seconds, trial.peak, not same]], dtype=torch.float64)
        seconds, most, differs = engine.world.gather(numbers).amax(0).tolist()
        failed = failed or seconds == math.inf
        return Trial(seconds, int(most), not differs)

    # Adapters that add nothing yet would give the same bits whatever the size.
    filled = nullcontext() if passes.same is None else without_zeros(engine)
    with _no_trace(engine), filled, torch.compiler.set_stance("force_eager" if engine.compiles else "default"):
        with engine.world.agreed():
            try:  # of one sample, which gathers parameters and loads the decoder, as no later pass does
                _seconds(engine, passes, 1, decode=True)
                with engine.inference():
                    pass  # registers the shards again
            except torch.OutOfMemoryError as error:
                raise UsageError(TOO_LARGE.format(1)) from error
        before = torch.get_device_module(device).memory_allocated(device) if is_accelerator(device) else 0
        yield measure
        _end(engine, passes, 1, failed=failed)


@collective
def once(engine: Engine, passes: Passes, size: int) -> None:
    """Make the passes of a size once, and leave no trace.

    Args:
        engine, passes: see `trials`.
        size: number of samples.
    """
    with _no_trace(engine):
        _seconds(engine, passes, size)
        _end(engine, passes, size, failed=False)


@contextmanager
def _no_trace(engine: Engine) -> Iterator[None]:
    """Put gradients and torch's random numbers aside while the context lasts."""
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


def _seconds(engine: Engine, passes: Passes, size: int, *, decode: bool = False) -> float:
    """Make the passes of a size, and return the seconds that they took."""
    start = _now(engine.world.device)
    if passes.rollout is not None:
        with engine.inference() as module:
            predicted = passes.rollout(module, size)
            if decode and passes.decode is not None:
                passes.decode(predicted.float())
    engine.sharded.set_last(False)
    with engine.sharded.train():
        passes.update(engine.module, size).float().square().mean().backward()
    return _now(engine.world.device) - start


def _end(engine: Engine, passes: Passes, size: int, *, failed: bool) -> None:
    """Reduce and drop the gradients of all passes, so that the next update finds none."""
    if failed:
        recover(engine)
    engine.sharded.set_last(True)
    with engine.sharded.train():
        passes.update(engine.module, size).float().square().mean().backward()
    with engine.inference():
        pass  # registers the shards again


@contextmanager
def without_zeros(engine: Engine) -> Iterator[None]:
    """Compute with noise in place of trained parameters that are all 0, as the second factors of new adapters are.

    Their values are drawn by torch's generator, and they are 0 again when the context ends.
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
    """Reset the engine after a pass that ended halfway; RunError if this version of torch cannot."""
    reset = getattr(engine.sharded.copies or engine.module, "reset_iter_state", None)
    if reset is None:
        raise RunError(
            f"a pass ended halfway, after which FSDP2 of torch {torch.__version__} cannot go on: set `engine.micro_batch` "
            "to a number and `engine.compile` to False, or use a newer torch"
        )
    reset()


def _now(device: torch.device) -> float:
    """Return the time once the device has done what was asked of it; on a CPU, that of this process on all of its threads.

    A pass is then no slower because other programs have the cores.
    """
    if not is_accelerator(device):
        return time.process_time()
    torch.get_device_module(device).synchronize(device)
    return time.perf_counter()


def _peak(run: Callable[[], object], held: Sequence[Tensor], device: torch.device, *, before: int) -> int:
    """Return the most bytes that were allocated while a function ran, beyond those that are always held.

    Args:
        run: function.
        held: tensors that are not counted on the CPU.
        device: device of the computation.
        before: bytes that are not counted on a GPU.
    """
    if is_accelerator(device):
        module = torch.get_device_module(device)
        module.reset_peak_memory_stats(device)
        run()
        return int(module.max_memory_allocated(device)) - before
    with LiveStorages(held) as live:
        run()
    return live.peak


class WarmUp(NamedTuple):
    """Result of a warm-up."""

    programs: int  # that were compiled, or read from the cache
    seconds: float
    failure: str | None = None  # why blocks run as they were written instead

    def __str__(self) -> str:
        if self.failure is not None:
            return f"blocks cannot be compiled ({self.failure}): they run as written; engine.compile False says so"
        return f"blocks compiled to {self.programs} programs in {self.seconds:.1f} s"


@collective
def warm_up(engine: Engine, passes: Sequence[Passes], size: int, *, progress: RunProgress | None = None) -> WarmUp:
    """Make each of the passes with a number of samples, and leave no trace but the programs.

    Passes with other sizes make the compiler treat a dimension as variable, so that further sizes need no program of their
    own. If the blocks cannot be compiled and engine.compile is auto, they run as written from now on.

    Args:
        engine: engine with compiled blocks and no update under way.
        passes: passes in each form that the run will take.
        size: number of samples.
        progress: where a bar is shown.

    Raises:
        UsageError: the blocks cannot be compiled, and engine.compile is True.
    """
    start, before, failure = time.perf_counter(), count_programs(), None
    for number, each in enumerate(passes):
        if progress is not None:
            progress.phase(f"compiling blocks, pass {number + 1} of {len(passes)}")
        try:
            once(engine, each, size)
        except torch._dynamo.exc.TorchDynamoException as error:
            failure = " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__
            break
    failures = [report for report in engine.world.gather_items(failure) if report is not None]
    if failures and engine.sharding.compile != "auto":
        raise UsageError(f"`engine.compile` is True, and the blocks cannot be compiled: {failures[0]}; set it to False")
    if failures:
        torch.compiler.set_stance("force_eager")
        recover(engine)
        once(engine, passes[0], size)  # as written
    return WarmUp(count_programs() - before, time.perf_counter() - start, failures[0] if failures else None)
