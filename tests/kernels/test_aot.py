"""Every kernel, compiled for GPUs that are not there: wide accesses, each operand read once, no spills, few registers."""

import math
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import triton
from helpers.marks import Patch

from fluvial.bench import aot, harness
from fluvial.bench.aot import AotRow
from fluvial.kernels.fused import rows
from fluvial.kernels.fused.velocity_error import function as velocity_error

# A multiprocessor of 65,536 registers holds 3 blocks of 128 threads with 168 registers each, whose threads have 16 loads or
# more of 16 bytes on their way: more than the 40 KiB that cover a Hopper's latency. On gfx942 a wave may have 512.
REGISTERS = 168
SHARED_BYTES = 16 * 1024
# Where more would slow long rows down: registers on NVIDIA's GPUs, and instructions per element. While an H100 moves the 10
# bytes per element of a draw it issues 88 instructions, and half as many of integers.
FEW_REGISTERS = {"nft_loss.error_sums": 72}
INSTRUCTIONS = {"sde_step.draw": 62}

pytestmark = pytest.mark.long


def faults(row: AotRow) -> Iterable[str]:
    if row.load_bits not in (0, 128):
        yield f"reads {row.load_bits} bits at a time, or an operand twice"
    if row.store_bits not in (0, 128):
        yield f"writes {row.store_bits} bits at a time, or an operand twice"
    if row.spill_bytes:
        yield f"spills {row.spill_bytes} bytes"
    if row.registers > REGISTERS:
        yield f"takes {row.registers} registers"
    if row.target.startswith("sm_") and row.registers > FEW_REGISTERS.get(row.kernel, REGISTERS):
        yield f"takes {row.registers} registers on {row.target}"
    if row.chunks == "several" and row.instructions > INSTRUCTIONS.get(row.kernel, math.inf):
        yield f"takes {row.instructions} instructions per element on {row.target}"
    if row.shared_bytes > SHARED_BYTES:
        yield f"takes {row.shared_bytes} bytes of shared memory"


def complaints(rows: Iterable[AotRow]) -> list[str]:
    return [f"{row.kernel} ({row.operands}, {row.chunks} chunks): {fault}" for row in rows for fault in faults(row)]


def committed() -> list[AotRow]:
    return harness.read(Path(__file__).parents[2] / "bench" / "results" / "aot.csv", AotRow)


@pytest.mark.parametrize("target", aot.TARGETS)
def test_the_machine_code_of_every_kernel(target: str) -> None:
    """If the committed table is of these very kernels, some of its rows are compiled again; else every launch is."""
    rows = [row for row in committed() if row.target == target]
    if {(row.sources, row.triton) for row in rows} == {(aot.sources(), triton.__version__)}:
        launches = aot.launches()
        for number in range(list(aot.TARGETS).index(target), len(launches), 16):
            assert aot.compile_launch(launches[number], target) == rows[number]
    else:
        rows = aot.table([target])
    assert len(rows) > 100
    assert {row.kernel.partition(".")[0] for row in rows} == {"gaussian_step", "sde_step", "nft_loss"}
    assert complaints(rows) == []


def test_the_committed_table_has_every_launch() -> None:
    rows = committed()
    assert len(rows) == len(aot.launches()) * len(aot.TARGETS)
    assert complaints(rows) == []


def test_changed_code_is_noticed(tmp_path: Path, monkeypatch: Patch) -> None:
    def hashed(code: str) -> str:
        (tmp_path / "kernel.py").write_text(code)
        aot.sources.cache_clear()
        return aot.sources()

    monkeypatch.setattr(aot.gaussian_step, "__file__", str(tmp_path / "kernel.py"))
    one = hashed('def f(x):\n    """Double."""\n    return 2 * x\n')
    same = hashed('def f(x):\n    """Return twice x."""\n    return 2 * x  # doubled\n')
    other = hashed('def f(x):\n    """Double."""\n    return 3 * x\n')
    aot.sources.cache_clear()
    assert one == same != other


def test_a_grid_of_many_samples_fits() -> None:
    """65,536 samples are more than the second dimension of a grid holds: programs are counted in the first alone."""
    with aot.caught() as launches:
        velocity_error(torch.empty(65536, 1), torch.empty(65536, 1))
        velocity_error(torch.empty(1, 2**20).expand(65536, 2**20), torch.empty(1, 2**20).expand(65536, 2**20))
        with rows.launches(1):
            velocity_error(torch.empty(1, 2**20).expand(65536, 2**20), torch.empty(1, 2**20).expand(65536, 2**20))
    assert [launch.grid for launch in launches] == [(65536,), (2**24,), (65536,), (2**24,)]
    assert 65536 * 2**20 > 2**31


@pytest.mark.parametrize("kernel", ["residual_sums", "error_sums", "draw"])
def test_partial_sums_are_published_before_a_program_is_counted(kernel: str) -> None:
    """One thread stores them and then adds to the counter, with acquire-release order; the others' are read after that."""
    with rows.launches(1):
        launch = next(
            launch
            for launch in aot.launches()
            if launch.kernel.fn.__name__ == kernel and launch.arguments["counter_ptr"] is not None
        )
    code = aot.machine_code(launch, "sm_90").asm["ptx"].splitlines()
    (counted,) = [number for number, line in enumerate(code) if "atom.global.gpu.acq_rel.add.u32" in line]
    thread = code[counted].split()[0]
    before = [line.split()[0] for line in code[:counted] if re.search(r"st\.global\.b32", line)]
    assert before
    assert set(before) == {thread}
    read = [number for number, line in enumerate(code) if "ld.global.cg.b32" in line]
    assert read
    assert min(read) > counted
    assert any("bar.sync" in line for line in code[counted : min(read)])


def test_a_narrow_access_and_a_second_read_are_found() -> None:
    """The test above can fail: operands off by one element are read a number at a time."""
    launch = next(launch for launch in aot.launches() if launch.kernel.fn.__name__ == "residual_sums")
    assert aot.compile_launch(launch, "sm_90").load_bits == 128
    crooked = launch._replace(arguments=launch.arguments | {"s_v": launch.arguments["length"] + 1})
    assert aot.compile_launch(crooked, "sm_90").load_bits < 128
