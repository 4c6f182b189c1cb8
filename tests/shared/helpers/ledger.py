"""Ledger of durations: CPU seconds and started processes of each test file, as tests/durations.csv records them.

`sessions.py --ledger` writes it and every run of `sessions.py` is compared with it. `test_ledger.py` holds it to its limits.
"""

import csv
import resource
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parents[2] / "durations.csv"
PROPERTIES = ("seconds", "processes", "long")  # of a test, in pytest's reports


class Test(NamedTuple):
    session: str
    file: str
    name: str
    seconds: float
    processes: int
    long: bool
    skipped: bool


class FileTimes(NamedTuple):
    session: str
    file: str
    long: bool
    tests: int
    processes: int
    seconds: float


def spent() -> tuple[float, int]:
    """Return the CPU seconds of this process, its children and the server's forks so far, and the number of these forks."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    forked = getattr(sys.modules.get("helpers.launch"), "forked", ())
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime + sum(forked), len(forked)


def tests(session: str, report: Path) -> list[Test]:
    read = []
    for case in ElementTree.parse(report).iter("testcase"):
        noted = {entry.get("name"): float(entry.get("value", 0)) for entry in case.iter("property")}
        seconds, processes, long = (noted.get(name, 0) for name in PROPERTIES)
        file = case.get("classname", "").replace(".", "/") + ".py"
        skipped = case.find("skipped") is not None
        read.append(Test(session, file, case.get("name", ""), seconds, int(processes), bool(long), skipped))
    return read


def rows(ran: Iterable[Test]) -> list[FileTimes]:
    groups: dict[tuple[str, str, bool], list[Test]] = {}
    for test in ran:
        groups.setdefault((test.session, test.file, test.long), []).append(test)
    return [
        FileTimes(*key, len(group), sum(test.processes for test in group), sum(test.seconds for test in group))
        for key, group in sorted(groups.items())
    ]


def load() -> list[FileTimes]:
    with FILE.open(newline="") as file:
        return [_row(**line) for line in csv.DictReader(file)]


def _row(session: str, file: str, long: str, tests: str, processes: str, seconds: str) -> FileTimes:
    return FileTimes(session, file, long == "long", int(tests), int(processes), float(seconds))


def save(measured: Iterable[FileTimes]) -> None:
    """Put rows into the ledger in place of those of the same tests, and drop those of files that are gone."""
    measured = [*measured]
    tests = {(row.file, row.long) for row in measured}
    kept = [row for row in load() if (row.file, row.long) not in tests]
    with FILE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FileTimes._fields)
        for row in sorted([*kept, *measured]):
            if (FILE.parents[1] / row.file).exists():
                writer.writerow(row._replace(long="long" * row.long, seconds=f"{row.seconds:.1f}"))  # type: ignore[arg-type]


def by_file(rows: Iterable[FileTimes]) -> dict[tuple[str, bool], FileTimes]:
    added: dict[tuple[str, bool], FileTimes] = {}
    for row in rows:
        old = added.get((row.file, row.long), row._replace(tests=0, processes=0, seconds=0.0))
        sums = {name: getattr(old, name) + getattr(row, name) for name in ("tests", "processes", "seconds")}
        added[row.file, row.long] = row._replace(**sums)
    return added


def growth(measured: Iterable[FileTimes], known: Iterable[FileTimes]) -> tuple[list[str], list[str]]:
    """Compare files of which all tests ran with the ledger.

    Returns:
        What is wrong, by the number of processes, and what took much longer, which may be the machine's fault.
    """
    wrong, slower = [], []
    before = by_file(known)
    for key, row in by_file(measured).items():
        old = before.get(key, row._replace(tests=0, processes=0, seconds=0.0))
        if row.tests < old.tests:
            continue
        if row.processes > 1.5 * old.processes + 2:
            wrong.append(
                f"{row.file} starts {row.processes} processes, {old.processes} in the ledger: share runs, or --ledger"
            )
        if row.seconds > 2 * old.seconds + 5:
            slower.append(f"{row.file}: {row.seconds:.0f} s of CPU, {old.seconds:.0f} s in the ledger")
    return wrong, slower
