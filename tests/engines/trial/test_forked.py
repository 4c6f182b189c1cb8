"""Functions in forked processes: how they end, and their limits of memory and time."""

import os
import sys
import time
from pathlib import Path

from fluvial.engines.trial.forked import MOST_BYTES, Forked, ranks, running, wait


def test_what_a_function_prints_and_its_exit_code_are_kept(tmp_path: Path) -> None:
    def says() -> int:
        print("three lines\nof\noutput")
        return 3

    ended = wait([Forked(says, tmp_path / "out")])
    assert (ended.code, ended.last) == (3, "output")


def test_an_exception_is_the_last_line(tmp_path: Path) -> None:
    def fails() -> None:
        raise KeyError("no such\npart")

    ended = wait([Forked(fails, tmp_path / "out")])
    assert ended.code == 1
    assert ended.last == "KeyError: 'no such\\npart'"


def test_too_much_memory_ends_the_process_alone(tmp_path: Path) -> None:
    ended = wait([Forked(lambda: len(bytearray(2 * MOST_BYTES)), tmp_path / "out")])
    assert ended.code == 1
    assert ended.last.startswith("MemoryError")


def test_too_much_time_ends_the_process_and_its_children(tmp_path: Path) -> None:
    def sleeps() -> None:
        child = os.fork()
        if child:
            Path(tmp_path / "child").write_text(str(child))
        time.sleep(60)

    ended = wait([Forked(sleeps, tmp_path / "out")], seconds=0.3)
    assert ended.code != 0
    assert ended.last == "it takes more than 0.3 seconds"
    child, until = Path(f"/proc/{(tmp_path / 'child').read_text()}/status"), time.monotonic() + 10
    while child.exists() and "(zombie)" not in child.read_text():
        assert time.monotonic() < until


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    def rank() -> int:
        if os.environ["RANK"] == "1":
            print("this one fails")
            return 5
        time.sleep(60)
        return 0

    started = time.monotonic()
    ended = ranks(rank, tmp_path, 2)
    assert (ended.code, "this one fails" in ended.output) == (5, True)
    assert time.monotonic() - started < 30


def test_a_process_ends_with_its_block(tmp_path: Path) -> None:
    with running(lambda: time.sleep(60), tmp_path / "out") as process:
        assert process.poll() is None
    assert not Path(f"/proc/{process.pid}").exists()


def test_the_environment_of_a_process_is_its_own(tmp_path: Path) -> None:
    def says() -> None:
        print(os.environ["MADE_UP"], file=sys.stderr)

    assert wait([Forked(says, tmp_path / "out", {"MADE_UP": "seen"})]).last == "seen"
    assert "MADE_UP" not in os.environ
