"""The harness and the first benchmark: rows that say what they were taken on; no timing is asserted."""

import csv
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fluvial.bench import caches, harness, modular, phases, waits
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.run.config import with_values
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.window import RandomWindow

pytestmark = pytest.mark.long
CONFIG = caches.CachesConfig(steps=(8,))


def test_rows_are_appended_under_one_header(tmp_path: Path) -> None:
    row = harness.make_row("op", [3.0, 1.0, 2.0], provider="p", shape="4x4", amount=8, unit="samples")
    assert (row.p50, row.rate, row.runs) == (2.0, 4.0, 3)
    assert row.p20 < row.p50 < row.p80
    for _ in range(2):
        harness.append(tmp_path / "deep" / "rows.csv", [row])
    rows = list(csv.DictReader((tmp_path / "deep" / "rows.csv").read_text().splitlines()))
    assert len(rows) == 2
    assert all(rows[0][name] for name in ("device", "torch", "triton", "python", "date", "threads"))
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="move it away"):  # other columns are not mixed
        harness.append(tmp_path / "rows.csv", [row])
    assert (tmp_path / "rows.csv").read_text() == "a,b\n1,2\n"


def test_functions_are_timed_in_turn() -> None:
    calls: list[str] = []
    seconds = harness.alternate(2, {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, warmup=1)
    assert calls == ["a", "b"] * 3
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2}


def test_a_call_in_other_processes_returns_fails_or_is_stopped() -> None:
    """With the result of rank 0, and in one line with what went wrong."""
    assert harness.run_in_processes(divmod, 7, 2) == (3, 1)
    assert harness.run_in_processes(os.getenv, "OMP_NUM_THREADS", threads=3) == "3"
    assert harness.run_in_processes(os.getenv, "RANK", ranks=2, threads=1) == "0"
    with pytest.raises(RunError, match=r"^failed with code 1: ZeroDivisionError: "):
        harness.run_in_processes(divmod, 1, 0)
    with pytest.raises(RunError, match=r"^stopped after 0 s$"):
        harness.run_in_processes(time.sleep, 60, limit=0.4)


def test_a_process_that_is_stopped_takes_its_children_along(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(path := tmp_path / "fifo")
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(pipe, True)
    script = f"import time; file = open({str(path)!r}, 'w'); time.sleep(600); file.write('alive')"
    with pytest.raises(RunError, match="stopped after 10 s"):
        harness.run_in_processes(subprocess.call, [sys.executable, "-c", script], limit=10)
    assert "subprocess.py" in capfd.readouterr().err
    assert os.read(pipe, 5) == b""
    os.close(pipe)


def test_the_phases_of_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Four phases and the CPU time of full fine-tuning and LoRA, in the CSV and in a table; of eight samples."""
    recipe = phases.recipes.grpo()
    few = SamplingConfig(prompts=2, group=4, steps=4, window=RandomWindow(2, high=4))
    monkeypatch.setattr(phases.recipes, "grpo", lambda: with_values(recipe, {"sampling": few}))
    rows = phases.run(phases.PhasesConfig(prompts=2, runs=1, out=tmp_path))
    assert {(row.provider, row.op) for row in rows} == {
        (provider, op) for provider in ("full", "lora") for op in ("rollout", "reward", "update", "all", "cpu")
    }
    assert len((tmp_path / "phases.csv").read_text().splitlines()) == 11
    assert "samples/s" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")  # of diffusers' own parts
def test_a_modular_pipelines_blocks_compute_no_more_than_its_network() -> None:
    """Two passes, one of each half of guidance or one per sample, and every operation on matrices is the network's."""
    for row in modular.run(modular.ModularConfig(runs=1)):
        assert (row["passes"], row["operations, blocks / network"]) == ("2", "1.000")
    with pytest.raises(UsageError, match="there is no 'Flux9'"):
        modular.ModularConfig(("Flux9",))


def test_caches_leave_out_operations_and_change_pixels() -> None:
    """Of both halves of eight steps, guidance of every second one leaves out four; higher thresholds leave out more."""
    rows = {row.pop("cache"): [float(row[each]) for each in ("operations", "mean", "most")] for row in caches.run(CONFIG)}
    operations = {name: found[0] for name, found in rows.items()}
    assert rows["none"] == [1, 0, 0]
    assert all(0 < mean < most <= 1 for name, (left, mean, most) in rows.items() if left < 1)
    assert [operations[f"guidance {every}"] for every in (2, 3, 5)] == [12 / 16, 11 / 16, 10 / 16]
    for order in (0, 1, 2):
        assert 1 >= operations[f"first_block 0.05 {order}"] > operations[f"first_block 0.1 {order}"]
        assert operations[f"first_block 0.1 {order}"] > operations[f"first_block 0.2 {order}"]


def test_keys_of_an_edit_leave_out_its_prompt() -> None:
    """Four steps: one of the whole sequence, and three of the sample, which is less than half of it."""
    none, keys = caches.run(caches.CachesConfig("edits", steps=(4,), runs=1))
    assert (none["operations"], none["most"]) == ("1.0000", "0.0000")
    assert 0.25 + 0.75 * 0.45 < float(keys["operations"]) < 0.25 + 0.75 * 0.55
    assert float(keys["most"]) <= 1e-4
    with pytest.raises(UsageError, match="runs has no effect with model words, which is not timed"):
        caches.CachesConfig("words", runs=2)


def test_a_run_is_watched_until_its_first_update(capsys: pytest.CaptureFixture[str]) -> None:
    """Line, image and update are each seen, in this order; a run that ends before them ends in one line."""
    small = "--final-samples 4 --micro-batch 4 --sampling.prompts 1 --sampling.group 4"
    waits.run(waits.WaitsConfig(command=f"train ddpo {small}", runs=1))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[1] for row in rows[:-1]] == ["line", "image", "update"]
    cpu = [float(row[row.index("s,") + 1]) for row in rows[:-1]]
    assert cpu == sorted(cpu)
    assert cpu[0] < cpu[-1]
    with pytest.raises(UsageError, match=r"ended before its first update: .*--no-such"):
        waits.run(waits.WaitsConfig(command="train ddpo --no-such 1", runs=1))
