"""`fluvial report RUN ...`: write the report of a run folder, during or after the run, or compare several."""

import sys
from collections.abc import Sequence
from pathlib import Path

from fluvial.engines.errors import UsageError
from fluvial.engines.extensions.report import comparison, page

USAGE = """usage: fluvial report RUN [RUN ...]

Write report.html to the run folder RUN: curves, images, numbers and settings in one file, which needs no network.
fluvial train writes it when a run ends.

With several folders, such as fluvial report runs/*, or a folder of several runs, write comparison.html beside them: curves
in the same charts, the settings that differ, scores with intervals, seconds, and samples side by side. Files are ignored.
Folders without a run are named and left out.
"""


def run(args: Sequence[str]) -> None:
    """Write a report or a comparison, and print its path."""
    if not args or not all(args):
        got = "nothing" if not args else "''"
        raise UsageError(f"report takes the folder of a run, or of several, got {got} (fluvial report --help)")
    out = Path(args[0])
    if len(args) > 1 or (not comparison.is_run(out) and comparison.find_runs(out)):
        print(comparison.write([Path(each) for each in args]))
        return
    print(page.write(out))
    for problem in page.find_damage(out):
        print(f"fluvial: {problem}", file=sys.stderr)
