"""`python -P -m fluvial.bench NAME`: run a benchmark, append its rows to bench/results, print a table."""

import sys

from fluvial.bench import phases
from fluvial.engines.cli import exit_with, parsed
from fluvial.engines.errors import UsageError

USAGE = """usage: python -P -m fluvial.bench NAME [--field value ...]

  phases   seconds and samples a second of rollout, reward and update of the built-in job
"""


def main(args: list[str]) -> int:
    """Run the benchmark that the arguments name."""
    if not args or args[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if args[0] != "phases":
        raise UsageError(f"unknown benchmark {args[0]!r}, expected phases")
    phases.run(parsed(phases.PhasesConfig, phases.PhasesConfig, "fluvial.bench phases", args[1:]))
    return 0


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
