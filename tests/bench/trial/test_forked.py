"""Functions in forked processes: how they end, and their limits of memory and time."""

import os
import signal
import sys
from pathlib import Path

from fluvial.bench.trial.forked import MOST_BYTES, Forked, ranks, running, wait


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
    """A pipe that both hold tells when the child has begun, and ends with the last of them."""
    reads, writes = os.pipe()

    def waits() -> None:
        if os.fork() == 0:
            os.write(writes, b"child")
        while True:
            signal.pause()

    process = Forked(waits, tmp_path / "out")
    os.close(writes)
    assert os.read(reads, 5) == b"child"
    ended = wait([process], seconds=0.1)
    assert ended.code != 0
    assert ended.last == "it takes more than 0.1 seconds"
    assert os.read(reads, 1) == b""
    os.close(reads)


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    def rank() -> int:
        if os.environ["RANK"] == "1":
            print("this one fails")
            return 5
        while True:
            signal.pause()

    ended = ranks(rank, tmp_path, 2)
    assert (ended.code, "this one fails" in ended.output) == (5, True)


def test_a_process_ends_with_its_block(tmp_path: Path) -> None:
    with running(signal.pause, tmp_path / "out") as process:
        assert process.poll() is None
    assert not Path(f"/proc/{process.pid}").exists()


def test_the_environment_of_a_process_is_its_own(tmp_path: Path) -> None:
    def says() -> None:
        print(os.environ["MADE_UP"], file=sys.stderr)

    assert wait([Forked(says, tmp_path / "out", {"MADE_UP": "seen"})]).last == "seen"
    assert "MADE_UP" not in os.environ
