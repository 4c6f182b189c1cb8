"""`fluvial report RUN`: write the report of a run folder, whether the run has ended or not."""

import sys
from collections.abc import Sequence
from pathlib import Path

from fluvial.engines.cli.listing import paragraphs
from fluvial.engines.errors import UsageError
from fluvial.engines.extensions.report import page

USAGE = """usage: fluvial report RUN

Write report.html to the run folder RUN: curves, images, numbers and settings in one file, which needs no network.
fluvial train writes it when a run ends.
"""


def run(args: Sequence[str]) -> None:
    """Write a report and print its path."""
    if args and args[0] in ("-h", "--help"):
        print(paragraphs(USAGE), end="")
        return
    if len(args) != 1:
        raise UsageError(f"report takes the folder of one run, got {len(args)} words (fluvial report --help)")
    if not args[0]:
        raise UsageError("report takes the folder of one run, got '' (fluvial report --help)")
    out = Path(args[0])
    print(page.write(out))
    for problem in page.damage(out):
        print(f"fluvial: {problem}", file=sys.stderr)
