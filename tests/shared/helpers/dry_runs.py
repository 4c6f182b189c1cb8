"""Check of a dry run: no error, one read-back per update, no read in a rollout, and the gathers promised."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from fluvial.engines.extensions.dryrun import run
from fluvial.engines.extensions.dryrun.report import PhaseReport, Report
from fluvial.engines.extensions.simulate.mode import Wait
from fluvial.engines.extensions.simulate.simulation import Simulation

WAITS = ("read", "synchronisation")
BLOCKING = "blocking copy to the device"
ENCODED = "models/pipelines/base.py"  # a prompt that is not in the cache, before the loop over steps


def check(report: Report, *, units: int | None = None, read_backs: Sequence[int] = (1,)) -> None:
    """Fail unless a dry run went as fluvial promises.

    Args:
        report: the report.
        units: number of units of communication of the network, where FSDP2 gathers each once per update (comm=keep).
        read_backs: number of reads of the update by line, one per update of each network that learns.
    """
    assert report.error is None, report.error
    assert report.fits, f"{report.peak} bytes"
    update = report.find_phase("update")
    read_back = [wait for wait in update.waits if wait.kind in WAITS]
    assert [wait.times for wait in read_back] == [*read_backs], f"reads of the update: {read_back}"
    for name in {"rollout", "decode", "update"} & {phase.name for phase in report.phases}:
        copies = [wait for wait in report.find_phase(name).waits if wait.kind == BLOCKING]
        ours = [wait for wait in copies if " < " not in wait.line]  # others are made by diffusers and transformers
        assert not ours, f"blocking copies of the {name}: {ours}"
    for name in {"rollout"} & {phase.name for phase in report.phases}:
        waits = [wait for wait in report.find_phase(name).waits if wait.kind in WAITS]
        others = [wait for wait in waits if ENCODED not in wait.line]
        assert not others, f"reads of the {name}: {others}"
    if units is not None:
        found = gathers(update)
        assert found == units, f"{found} gathers of an update, expected {units}"


def gathers(phase: PhaseReport) -> int:
    return sum(each.calls for each in phase.communication if each.name == "all_gather" and "_fsdp_" in each.line)


def reductions(phase: PhaseReport) -> int:
    return sum(each.calls for each in phase.communication if each.name == "reduce_scatter")


@contextmanager
def simulations() -> Iterator[list[Simulation]]:
    found, simulate = list[Simulation](), run.simulate

    @contextmanager
    def noted(*args: Any, **kwargs: Any) -> Iterator[Simulation]:
        with simulate(*args, **kwargs) as simulation:
            found.append(simulation)
            yield simulation

    with patch.object(run, "simulate", noted):
        yield found


def between(simulation: Simulation) -> dict[Wait, int]:
    """Return the waits of a rollout and its update outside of the phases: plans, gathered rewards, diagnostics."""
    return {
        wait: times for wait, times in simulation.mode.waits.items() if not wait.phase and wait.kind in (*WAITS, BLOCKING)
    }
