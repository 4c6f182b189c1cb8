"""Properties of methods, the same for the built-in ones and for yours: `check_method(mine)` in a test of your own.

Each trains a net of two thousand parameters (`fluvial.testing.tiny`), in this process or on two ranks, started for it.
"""

import importlib.util
import inspect
import multiprocessing
import os
import pickle
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fluvial.engines.engine.world import World, init_world
from fluvial.engines.errors import UsageError
from fluvial.engines.gathered import gather
from fluvial.engines.run.method import Method, Preferences
from fluvial.engines.run.method import check_method as check_declaration
from fluvial.testing import tiny

ROUNDING = 1e-3  # of a gradient's norm, between sums in another order; a method that is wrong differs by far more
RANKS = 2


class MethodCase(NamedTuple):
    """A method under test.

    Args:
        changes: settings of the run by dotted names.
        out: folder of its runs.
    """

    method: Method
    changes: Mapping[str, Any]
    out: Path
    world: World | None

    def start(self, *, rollouts: int = 1, **changes: Any) -> tiny.TinyRun:
        """Return a run of some rollouts with the method, on a model that predicts what it needs."""
        own = {"updates": rollouts * self.method.passes.updates, "sampling": self.method.sampling}
        config = tiny.config(self.out, method=self.method, **{**own, **self.changes, **changes})
        return tiny.TinyRun(config, self.world, tiny.job(self.method.needs.prediction or "velocity"))


def learns(case: MethodCase) -> None:
    """The first update has a gradient, finite and not 0."""
    run = case.start()
    run.rollout()
    norm = run.infos[0].grad_norm
    assert 0 < norm < float("inf"), f"the first update has a gradient of norm {norm:g}, expected a finite number above 0"


def begins_at_ratio_one(case: MethodCase) -> None:
    """The ratio of the policy to that of the rollout is exactly 1 in the first update, if the method takes one."""
    if not case.method.needs.ratio:
        return
    run = case.start()
    run.rollout()
    found = run.infos[0].max_abs.get("log_ratio")
    assert found is not None, "needs.ratio is True, and the diagnostics of the loss have no field log_ratio"
    assert found == 0, f"the first update has a |log ratio| of {found:g}, expected 0: rollout and update differ"


def resumes_to_the_bit(case: MethodCase) -> None:
    """Two rollouts end in the bits of one, a checkpoint, and one more in another trainer."""
    whole, before, after = (case.start(rollouts=2) for _ in range(3))
    whole.rollout()
    record = whole.rollout()
    before.rollout()
    before.trainer.save()
    (saved,) = (case.out / "checkpoints").iterdir()
    after.trainer.resume(saved)
    shutil.rmtree(case.out / "checkpoints")
    again, state = after.rollout(), after.trainer.engine.state()
    hint = "what a method remembers between batches belongs to `run.state` or `run.average`"
    assert again["loss"] == record["loss"], f"a resumed run has the loss {again['loss']}, expected {record['loss']}: {hint}"
    for name, tensor in whole.trainer.engine.state().items():
        assert torch.equal(gather(tensor), gather(state[name])), f"a resumed run has other bits of {name}: {hint}"


def adds_up_over_micro_batches(case: MethodCase) -> None:
    """The gradient is the same, but for rounding, with passes of other sizes: a row's loss is of that row alone."""
    first, second = (_gradient(case.start(**{"engine.update_micro_batch": size})) for size in (2, 4))
    _compare(second, first, "with four rows per pass in place of two: the loss of a row depends on other rows")


def is_the_same_on_two_ranks(case: MethodCase) -> None:
    """The gradient is the same, but for rounding, on two ranks that share the samples."""
    if case.world is not None and case.world.size > 1:
        raise UsageError("check_method starts its own ranks: call it in one process")
    alone = _gradient(case.start())
    _compare(_on_ranks(case), alone, f"on {RANKS} ranks: take statistics over all of them, by `run.mean` or `run.gather`")


PROPERTIES: dict[str, Callable[[MethodCase], None]] = {
    function.__name__: function
    for function in (
        learns,
        begins_at_ratio_one,
        resumes_to_the_bit,
        adds_up_over_micro_batches,
        is_the_same_on_two_ranks,
    )
}


def check_method(
    method: Method, properties: Iterable[str] = tuple(PROPERTIES), *, world: World | None = None, **changes: Any
) -> None:
    """Raise AssertionError, in one line, where a method lacks a property.

    Args:
        method: the method, with a small `sampling`: each property makes up to four rollouts.
        properties: names of `PROPERTIES`; by default all. Two ranks take about 15 s of processor time.
        world: the process group, where one is open.
        changes: settings of the run by dotted names, such as `train="lora"`, or `**{"kl.coef": 0.1}`.

    Raises:
        UsageError: it is no method, or learns from given preferences, which the tiny job does not have.
    """
    check_declaration(method)
    if isinstance(method.source, Preferences):
        raise UsageError(f"{method.method_name} learns from the folder {method.source.folder}, and check_method has none")
    for name in properties:
        if name not in PROPERTIES:
            raise UsageError("properties", name, f"one of {', '.join(PROPERTIES)}")
        with tempfile.TemporaryDirectory() as out:
            if world is None:
                with init_world() as alone:
                    PROPERTIES[name](MethodCase(method, changes, Path(out), alone))
            else:
                PROPERTIES[name](MethodCase(method, changes, Path(out), world))


def _gradient(run: tiny.TinyRun) -> dict[str, Tensor]:
    """Return the gradient of the first update of a run, up to a factor."""
    optimize, found = run.trainer.engine.update, dict[str, Tensor]()

    def note(*args: Any, **options: Any) -> Any:
        info = optimize(*args, **options)
        if not found:
            found.update(run.gradient())
        return info

    run.trainer.engine.update = note  # type: ignore[method-assign]
    run.rollout()
    return found


def _compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str) -> None:
    """Raise AssertionError unless two gradients are the same but for rounding."""
    whole, other = (torch.cat([each[name].flatten().double() for name in sorted(each)]) for each in (expected, found))
    distance = float((other - whole).norm() / whole.norm())
    said = f"the gradient differs by {distance:.2g} of its norm, expected {ROUNDING:g} at most, {where}"
    assert distance <= ROUNDING, said


def _on_ranks(case: MethodCase) -> dict[str, Tensor]:
    """Return the gradient of a case on several ranks, each in a process of its own."""
    try:
        method = pickle.dumps((case.method, dict(case.changes)))
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise UsageError(
            f"{case.method.method_name} cannot be sent to other ranks: define it in a module ({error})"
        ) from None
    module, file = type(case.method).__module__, inspect.getsourcefile(type(case.method))
    spawn = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    answers = spawn.SimpleQueue()
    arguments = (module, file, method, case.out, port, answers)
    ranks = [spawn.Process(target=_run_rank, args=(rank, *arguments), daemon=True) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if failed := [rank for rank, process in enumerate(ranks) if process.exitcode]:
        raise AssertionError(f"rank {failed[0]} of {RANKS} failed: its own message says why")
    found: dict[str, Any] = answers.get()
    return {name: torch.tensor(values) for name, values in found.items()}


def _run_rank(rank: int, module: str, file: str, method: bytes, out: Path, port: int, answers: Any) -> None:
    """Make a rollout and its updates as one of several ranks; the first one answers with the gradient."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if importlib.util.find_spec(module.partition(".")[0]) is None:  # a test file that is on no path
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None
        assert spec.loader is not None
        parents = accumulate(module.split(".")[:-1], lambda *names: ".".join(names))  # pickle asks for them
        sys.modules |= {name: ModuleType(name) for name in parents}
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    made, changes = pickle.loads(method)  # bytes that the parent process made and passed as an argument
    with init_world() as world:
        case = MethodCase(made, changes, out, world)
        found = _gradient(case.start())
        if world.is_main:
            answers.put({name: tensor.tolist() for name, tensor in found.items()})
