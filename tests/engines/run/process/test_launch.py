"""Processes that `run.process.launch` starts: what they are told, how they stop, and which exit code the command has."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.refusals import refuses

from fluvial.engines.run.process import launch

# Ranks that import nothing, so that they start in milliseconds.
TOLD = """
    import os, socket
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS".split()
    given = os.environ.get("FLUVIAL_STORE_SOCKET")
    port = socket.socket(fileno=int(given)).getsockname()[1] if given else 0
    told = [os.environ[name] for name in names] + [str(port == int(os.environ["MASTER_PORT"])), sys.stdin.read()]
    (folder / os.environ["RANK"]).write_text(" ".join(told))
"""
COUNTS = """
    import os, signal, time
    seen = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: seen.append(number))
    (folder / ("ready" + os.environ["RANK"])).touch()
    until = time.monotonic() + 30
    while not seen and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.3)
    # Two signals at once may arrive as one, so the cause of a second one is looked at as well.
    shared = " in the command's process group" if os.getpgrp() == os.getpgid(os.getppid()) else ""
    (folder / os.environ["RANK"]).write_text(repr(seen) + shared)
"""
# Waits until the launcher has noticed the end of the other rank.
AFTER_THE_OTHER = """
import time
while not (folder / "pid").exists() or not (folder / "pid").read_text():
    time.sleep(0.01)
while pathlib.Path("/proc", (folder / "pid").read_text()).exists():
    time.sleep(0.01)
sys.exit(2)
"""


def script(folder: Path, code: str) -> list[str]:
    """Return the command of a rank that runs `code`, which knows `folder`."""
    head = f"import sys, pathlib\nfolder = pathlib.Path({str(folder)!r})\n"
    return [sys.executable, "-I", "-S", "-c", head + textwrap.dedent(code)]


def read(folder: Path, ranks: int) -> list[str]:
    """Return what each rank wrote."""
    return [(folder / str(rank)).read_text() for rank in range(ranks)]


def test_ranks_are_told_who_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 holds the socket of the port; cores are shared out, unless the person has said how many threads."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launch, "count_cores", lambda: 7)
    assert launch.launch(script(tmp_path, TOLD), 3) == 0
    assert read(tmp_path, 3) == [f"{rank} {rank} 3 3 127.0.0.1 2 {rank == 0} " for rank in range(3)]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert launch.launch(script(tmp_path, TOLD), 1) == 0
    assert read(tmp_path, 1) == ["0 0 1 1 127.0.0.1 5 True "]


@pytest.mark.parametrize(
    ("ends", "code", "says"),
    [
        (["", "sys.exit(2)"], 2, ""),
        ([AFTER_THE_OTHER, "(folder / 'pid').write_text(str(os.getpid())); sys.exit(1)"], 1, ""),
        (["", "import os; os.kill(os.getpid(), 9)"], 1, "fluvial: rank 1 of 2 was ended by SIGKILL\n"),
        (["import os; os.kill(os.getpid(), 2)", ""], 130, ""),
    ],
    ids=["one", "the_first", "killed", "interrupted"],
)
def test_the_exit_code_is_that_of_the_first_failure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], ends: list[str], code: int, says: str
) -> None:
    """A signal counts as a failure, and is named, because the rank could say nothing itself."""
    chosen = f"import os\nexec({ends!r}[int(os.environ['RANK'])])"
    assert launch.launch(script(tmp_path, chosen), 2) == code
    assert [line for line in capfd.readouterr().err.splitlines(keepends=True) if line.startswith("fluvial")] == (
        [says] if says else []
    )


def test_a_rank_that_hangs_after_another_failed_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a while to end by itself."""
    monkeypatch.setattr(launch, "GRACE", 0.5)
    hangs = "import os, signal\nif os.environ['RANK'] == '1': sys.exit(1)\nwhile True: signal.pause()"
    began = time.monotonic()
    assert launch.launch(script(tmp_path, hangs), 2) == 1
    assert time.monotonic() - began >= 0.5


def started(folder: Path, **options: Any) -> subprocess.Popen[bytes]:
    """Start two ranks that count signals, by a process of their own that takes its standard input for its terminal."""
    code = f"""
        import os
        from fluvial.engines.run.process.launch import launch
        if os.isatty(0):
            os.open(os.ttyname(0), os.O_RDWR)  # makes it the terminal of this session
        raise SystemExit(launch({script(folder, COUNTS)!r}, 2))
    """
    return subprocess.Popen([sys.executable, "-P", "-c", textwrap.dedent(code)], start_new_session=True, **options)


@pytest.mark.parametrize(
    ("number", "arrives", "code"),
    [(signal.SIGINT, signal.SIGINT, 0), (signal.SIGTERM, signal.SIGTERM, 0), (signal.SIGKILL, signal.SIGTERM, -9)],
)
def test_a_signal_reaches_each_rank_once(tmp_path: Path, number: signal.Signals, arrives: signal.Signals, code: int) -> None:
    """Whoever sends it to the command alone; SIGKILL leaves no rank behind."""
    command = started(tmp_path, stdin=subprocess.DEVNULL)
    wait_for(tmp_path, 2)
    command.send_signal(number)
    assert command.wait(60) == code
    while not all((tmp_path / str(rank)).exists() for rank in range(2)):  # at most 30 s, see COUNTS
        time.sleep(0.05)
    time.sleep(0.1)
    assert read(tmp_path, 2) == [f"[{int(arrives)}]"] * 2


def test_ctrl_c_in_a_terminal_reaches_each_rank_once(tmp_path: Path) -> None:
    """The terminal sends it to all processes in the foreground; a second one would stop a run at once."""
    terminal, inner = os.openpty()
    command = started(tmp_path, stdin=inner)
    wait_for(tmp_path, 2)
    os.write(terminal, b"\x03")
    assert command.wait(60) == 0
    assert read(tmp_path, 2) == [f"[{int(signal.SIGINT)}]"] * 2
    os.close(terminal)
    os.close(inner)


def test_a_signal_during_the_start_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To ranks that were not there yet."""
    started = list[object]()

    class Started(subprocess.Popen[bytes]):
        def __init__(self, command: Sequence[str], **options: Any) -> None:
            super().__init__(command, **options)
            if not started:
                os.kill(os.getpid(), signal.SIGTERM)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Started)
    assert launch.launch([sys.executable, "-I", "-S", "-c", "import time; time.sleep(30)"], 2) == 1
    assert len(started) == 2


def test_handlers_are_as_before(tmp_path: Path) -> None:
    """Also after an error; no rank is left."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(FileNotFoundError):
        launch.launch([str(tmp_path / "nothing")], 2)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    refuses("processes is 0, expected at least 1", launch.launch, ["true"], 0)


def wait_for(folder: Path, ranks: int) -> None:
    """Wait until the ranks handle signals."""
    until = time.monotonic() + 30
    while not all((folder / f"ready{rank}").exists() for rank in range(ranks)):
        assert time.monotonic() < until
        time.sleep(0.01)
