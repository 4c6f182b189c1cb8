"""Warm-up of compiled blocks: the passes of a run, made once before training, so that no update waits for a compiler."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.parallelize import count_programs
from fluvial.engines.errors import UsageError
from fluvial.engines.run.log.progress import RunProgress
from fluvial.engines.run.passes.micro_batch import Passes, once, recover


class WarmUp(NamedTuple):
    """Result of a warm-up."""

    programs: int  # that were compiled, or read from the cache
    seconds: float
    failure: str | None = None  # why blocks run as they were written instead

    def __str__(self) -> str:
        if self.failure is not None:
            return f"blocks cannot be compiled ({self.failure}): they run as written; engine.compile False says so"
        return f"blocks compiled to {self.programs} programs in {self.seconds:.1f} s"


def warm_up(engine: Engine, passes: Sequence[Passes], size: int, *, progress: RunProgress | None = None) -> WarmUp:
    """Make each of the passes with a number of samples, and leave no trace but the programs; every rank must take part.

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
    failures = [found for found in engine.world.gather_items(failure) if found is not None]
    if failures and engine.sharding.compile != "auto":
        raise UsageError(f"`engine.compile` is True, and the blocks cannot be compiled: {failures[0]}; set it to False")
    if failures:
        torch.compiler.set_stance("force_eager")
        recover(engine)
        once(engine, passes[0], size)  # as written
    return WarmUp(count_programs() - before, time.perf_counter() - start, failures[0] if failures else None)
