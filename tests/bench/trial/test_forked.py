"""Functions in forked processes: how they end, and their limits of memory and time."""

import os
import select
import signal
import sys
from pathlib import Path

import pytest

from fluvial.bench.trial.forked import MOST_BYTES, Forked, open_process, run_ranks, wait


def test_what_a_function_prints_and_its_exit_code_are_kept(tmp_path: Path) -> None:
    """In an environment of its own; an exception is the last line. A process ends with its block."""

    def says() -> int:
        print("three lines\nof\noutput" + os.environ["MADE_UP"])
        return 3

    def fails() -> None:
        raise KeyError("no such\npart")

    found = [wait([Forked(each, tmp_path / "out", {"MADE_UP": "!"})]) for each in (says, fails)]
    assert [(ended.code, ended.last) for ended in found] == [(3, "output!"), (1, "KeyError: 'no such\\npart'")]
    assert "MADE_UP" not in os.environ
    with open_process(signal.pause, tmp_path / "out") as process:
        assert process.poll() is None
    assert not Path(f"/proc/{process.pid}").exists()


def test_the_next_process_has_what_one_has_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    wait([Forked(lambda: print(__import__("this")), tmp_path / "out")])
    assert wait([Forked(lambda: print("this" in sys.modules), tmp_path / "out")]).last == "True"


def test_too_much_memory_ends_the_process_alone(tmp_path: Path) -> None:
    ended = wait([Forked(lambda: len(bytearray(2 * MOST_BYTES)), tmp_path / "out")])
    assert (ended.code, ended.last.startswith("MemoryError")) == (1, True)


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


def test_a_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    """Also if that one is killed: the pipe ends with the last of them."""
    reads, writes = os.pipe()

    def waits() -> None:
        os.write(writes, b"child")
        signal.pause()

    def starts() -> None:
        wait([Forked(waits, tmp_path / "inner")])

    process = Forked(starts, tmp_path / "out")
    os.close(writes)
    assert os.read(reads, 5) == b"child"
    process.kill()
    assert select.select([reads], [], [], 10)[0]
    assert os.read(reads, 1) == b""
    os.close(reads)


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    def rank() -> int:
        if os.environ["RANK"] == "1":
            print("this one fails")
            return 5
        while True:
            signal.pause()

    ended = run_ranks(rank, tmp_path, 2)
    assert (ended.code, "this one fails" in ended.output) == (5, True)
