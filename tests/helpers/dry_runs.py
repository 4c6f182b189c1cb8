"""Check of a dry run: no error, one read-back per update, no read in a rollout, and the gathers promised."""

from fluvial.engines.dryrun.report import PhaseReport, Report

WAITS = ("read", "synchronisation")
ENCODED = "models/pipelines/base.py"  # a prompt that is not in the cache, before the loop over steps
LENGTHS = "models/pipelines/z_image.py"  # Z-Image's passes read the lengths of the prompts
ONCE = "engines/train/learner.py"  # further reads of an update: weights of the items, and rewards that alignprop logs


def check(report: Report, *, units: int | None = None) -> None:
    """Fail unless a dry run went as fluvial promises.

    Args:
        report: the report.
        units: number of units of communication of the network, where FSDP2 gathers each once per update (comm=keep).
    """
    assert report.error is None, report.error
    assert report.fits, f"{report.peak} bytes"
    update = report.phase("update")
    read_back = [wait for wait in update.waits if wait.kind in WAITS and not wait.line.startswith((ONCE, LENGTHS))]
    assert [wait.times for wait in read_back] == [1], f"reads of the update: {read_back}"
    for name in {"rollout"} & {phase.name for phase in report.phases}:
        waits = [wait for wait in report.phase(name).waits if wait.kind in WAITS]
        reads = [wait for wait in waits if not wait.line.startswith(LENGTHS) and ENCODED not in wait.line]
        assert not reads, f"reads of the {name}: {reads}"
    if units is not None:
        found = gathers(update)
        assert found == units, f"{found} gathers of an update, expected {units}"


def gathers(phase: PhaseReport) -> int:
    """Return the number of times that FSDP2 gathers parameters in a phase."""
    return sum(each.calls for each in phase.communication if each.name == "all_gather" and "_fsdp_" in each.line)
