"""Ahead-of-time compilation of every kernel, as the operations launch it, for GPUs that need not be present.

Instructions, registers, spills, shared memory and the width of every access to global memory are read from the machine code.
Launches are intercepted with their arguments, so that the compiled kernels are those that an operation launches.
"""

import ast
import functools
import hashlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from fluvial.bench import harness
from fluvial.core.random import fold_in, key
from fluvial.kernels.fused import gaussian_step, nft_loss, policy_loss, sde_step, step_log_prob, velocity_error
from fluvial.kernels.fused.rows import EXACT

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# dtypes of the velocities, and of the samples.
DTYPES = (
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
)
OUTPUTS = frozenset({"out_ptr", "dv_ptr", "dx_ptr", "dnext_ptr", "dref_ptr", "duncond_ptr"})
# The most numbers that a program stores: partial sums, a sample's results and the counter.
STORED_NUMBERS = {"residual_sums": 2 + 1 + gaussian_step.DIAGNOSTICS + 1, "error_sums": 4 + 3 + 1, "draw": 1 + 1 + 1}
# Loads of partial sums in the last program of a row: the loop over each sum, which the compiler unrolls.
LOADS_OF_SUMS = {"residual_sums": 2 * 8, "error_sums": 4 * 8, "draw": 8}
ROLLED = frozenset({"error_sums"})  # kernels whose loop over blocks is not unrolled
ROW = 8192  # elements per sample: two chunks, all aligned
SHORT = 1024  # one chunk
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64"}


class Launch(NamedTuple):
    """One launch of a kernel, with its arguments."""

    kernel: JITFunction
    arguments: dict[str, Any]
    warps: int
    grid: tuple[int, ...]

    @property
    def tiles(self) -> dict[str, torch.dtype]:
        """Return the operands `[B, N]` of a kernel over samples."""
        tensors = {name: t for name, t in self.arguments.items() if isinstance(t, Tensor)}
        if "BLOCKS" not in self.arguments or self.arguments["length"] < SHORT:
            return {}
        return {name: t.dtype for name, t in tensors.items() if t.shape[-1] == self.arguments["length"]}


@dataclass(frozen=True)
class AotRow:
    """Machine code of a kernel for one target; widths are those of accesses to samples, in bits.

    `instructions` is the number of instructions divided by the elements per thread; a loop counts as one iteration.
    """

    kernel: str
    target: str
    dtypes: str
    operands: str
    chunks: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    load_bits: int
    store_bits: int
    triton: str
    instructions: float = 0.0  # per element; 0 for a kernel that reads no samples
    sources: str = ""  # of the kernels that were compiled, see `sources`; an older table does not say


def launches() -> list[Launch]:
    """Return every different launch of the operations, forward and backward, for all dtypes and options."""
    kernels: dict[Any, Launch] = {}
    for run in _calls():
        with caught() as caught_launches:
            run()
        for launch in caught_launches:
            kernels.setdefault((launch.kernel.fn.__qualname__, launch.kernel.fn.__module__, _specialise(launch)), launch)
    return list(kernels.values())


@contextmanager
def caught() -> Iterator[list[Launch]]:
    """Intercept kernel launches instead of running them, and yield the list that collects them."""
    launched: list[Launch] = []

    def note(self: JITFunction, *args: Any, grid: Any, warmup: bool, num_warps: int, **kwargs: Any) -> None:
        arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
        launched.append(Launch(self, {name: arguments[name] for name in self.arg_names}, num_warps, grid))

    with patch.object(JITFunction, "run", note):
        yield launched


def machine_code(launch: Launch, target: str) -> Any:
    """Compile a launch for a target with Triton; the result has the code of every stage in `asm`."""
    types, constants, divisible = _specialise(launch)
    gpu, names = TARGETS[target], launch.kernel.arg_names
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    source = ASTSource(launch.kernel, dict(types), dict(constants), attributes)
    return triton.compile(source, target=gpu, options={"num_warps": _warps(launch, gpu), **EXACT})


def compile_launch(launch: Launch, target: str) -> AotRow:
    """Compile a launch for a target and read its machine code."""
    gpu, kernel = TARGETS[target], machine_code(launch, target)
    code = (_nvidia if gpu.backend == "cuda" else _amd)(kernel.asm)
    tiles = launch.tiles
    read = [dtype for name, dtype in tiles.items() if name not in OUTPUTS]
    written = [dtype for name, dtype in tiles.items() if name in OUTPUTS]
    name = launch.kernel.fn.__name__
    numbers = sum(isinstance(value, Tensor) for value in launch.arguments.values()) - len(tiles)
    numbers += "weights_ptr" in launch.arguments  # two numbers per sample
    numbers += LOADS_OF_SUMS.get(name, 0) if launch.arguments.get("counter_ptr") is not None else 0
    return AotRow(
        kernel=f"{launch.kernel.fn.__module__.rpartition('.')[2]}.{name}",
        target=target,
        dtypes=" ".join(sorted({TYPES[dtype] for dtype in tiles.values()})),
        operands=" ".join(f"{operand.removesuffix('_ptr')}:{TYPES[dtype]}" for operand, dtype in tiles.items()),
        chunks="one" if launch.arguments.get("sums_ptr", 0) is None else "several",
        registers=code.registers,
        spill_bytes=code.spill_bytes,
        shared_bytes=kernel.metadata.shared,
        load_bits=_width(code.loads, read, numbers, launch, gpu),
        store_bits=_width(code.stores, written, STORED_NUMBERS.get(name, 0), launch, gpu),
        triton=triton.__version__,
        instructions=round(code.instructions / _elements(launch, gpu), 1) if tiles else 0.0,
        sources=sources(),
    )


@functools.cache
def sources() -> str:
    """Return a hash of the kernels' code and of this file, without comments and docstrings."""
    digest = hashlib.sha256()
    for path in sorted([*Path(gaussian_step.__file__).parent.glob("*.py"), Path(__file__)]):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
                node.body[:1] = []
        digest.update(ast.dump(tree).encode())
    return digest.hexdigest()[:12]


def table(targets: Sequence[str] = tuple(TARGETS), *, workers: int = 2) -> list[AotRow]:
    """Compile every launch for every target in processes, because Python's parser is not thread-safe."""
    work = [(number, target) for target in targets for number in range(len(_all_launches()))]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_compile_item, work, chunksize=8))


@functools.cache
def _all_launches() -> list[Launch]:
    return launches()


def _compile_item(item: tuple[int, str]) -> AotRow:
    """Compile launch number `item[0]`; kernels cannot be pickled, and are the same in each process."""
    return compile_launch(_all_launches()[item[0]], item[1])


@dataclass(frozen=True)
class AotConfig:
    """Compile every kernel for GPUs that need not be present.

    Args:
        out: folder of aot.csv, which is overwritten.
    """

    out: Path = harness.RESULTS


def run(config: AotConfig) -> list[AotRow]:
    """Write aot.csv, and print the extremes of each kernel."""
    rows = table()
    harness.write(config.out / "aot.csv", rows, AotRow)
    lines = []
    for kernel, target in dict.fromkeys((row.kernel, row.target) for row in rows):
        these = [row for row in rows if (row.kernel, row.target) == (kernel, target)]
        line = {"kernel": kernel, "target": target, "compiled": str(len(these))}
        for extreme, names in ((max, ("registers", "spill_bytes", "shared_bytes")), (min, ("load_bits", "store_bits"))):
            line |= {name.replace("_", " "): str(extreme(getattr(row, name) for row in these)) for name in names}
        several = [row.instructions for row in these if row.chunks == "several"]
        line["instructions per element"] = str(max(several, default=0.0))
        lines.append(line)
    harness.show_table(f"{len(rows)} kernels, Triton {triton.__version__}", lines, left=2)
    return rows


class Code(NamedTuple):
    """Instructions of machine code, and its accesses to global memory by their width in bits."""

    instructions: int
    registers: int
    spill_bytes: int
    loads: Counter[int]
    stores: Counter[int]


def _nvidia(asm: dict[str, Any]) -> Code:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run(
                [tools / tool, *args, file.name], capture_output=True, text=True, check=True, encoding="utf-8"
            ).stdout
            for tool, args in (("cuobjdump", ["-res-usage"]), ("nvdisasm", ["-c"]))
        )
    match = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert match is not None, usage
    registers, stack, local = map(int, match.groups())
    return Code(
        len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?!NOP)", sass, re.MULTILINE)),
        registers,
        stack + local + 4 * len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        *(_widths(re.findall(rf"\b{name}((?:\.\w+)*)", sass)) for name in ("LDG", "STG")),
    )


def _widths(modifiers: Sequence[str]) -> Counter[int]:
    bits = {"64": 64, "128": 128, "U8": 8, "S8": 8, "U16": 16, "S16": 16}
    return Counter(next((bits[m] for m in text.split(".") if m in bits), 32) for text in modifiers)


def _amd(asm: dict[str, Any]) -> Code:
    text = asm["amdgcn"]

    def number(name: str) -> int:
        match = re.search(rf"\.{name}:\s+(\d+)", text)
        assert match is not None, name
        return int(match.group(1))

    widths = {"dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128, "ubyte": 8, "ushort": 16, "short": 16, "byte": 8}

    def accesses(kind: str) -> Counter[int]:
        sizes = re.findall(rf"\b(?:global|buffer)_{kind}_(\w+?)(?:_d16\w*)?\s", text)
        return Counter(widths[width] for width in sizes if width in widths)

    spilled = 4 * (number("vgpr_spill_count") + number("sgpr_spill_count")) + number("private_segment_fixed_size")
    instructions = len(re.findall(r"^\s+(?:[vs]|ds|global|buffer)_(?!nop)", text, re.MULTILINE))
    return Code(instructions, number("vgpr_count"), spilled, accesses("load"), accesses("store"))


def _width(accesses: Counter[int], operands: Sequence[torch.dtype], numbers: int, launch: Launch, target: GPUTarget) -> int:
    """Return the width of the accesses to samples; 0 for a kernel without any.

    It is the full width, 128 bits, if the number of accesses of that width is exactly that of the operands' elements, each
    accessed once. Narrower accesses are then numbers per sample, at most `numbers` of them.
    """
    if not operands:
        return 0
    expected = sum(_elements(launch, target) * dtype.itemsize // 16 for dtype in operands)
    narrow = sum(count for bits, count in accesses.items() if bits < 128)
    return 128 if accesses[128] == expected and narrow <= numbers else min(accesses, default=0)


def _elements(launch: Launch, target: GPUTarget) -> int:
    """Return the elements per thread in the code: of all blocks, or of one block if their loop is not unrolled."""
    blocks = 1 if launch.kernel.fn.__name__ in ROLLED else launch.arguments["BLOCKS"]
    elements: int = blocks << launch.arguments["LEVELS"]
    return elements // (_warps(launch, target) * target.warp_size)


def _warps(launch: Launch, target: GPUTarget) -> int:
    """Return the warps of a launch on the target, for 8 elements per thread with warps of 32 or 64 threads."""
    return max(launch.warps * 32 // target.warp_size, 1)


def _specialise(launch: Launch) -> tuple[tuple, tuple, tuple]:
    """Return (types, constants, divisible by 16) of a launch's arguments, as in the just-in-time compiler."""
    types, constants, divisible = [], [], []
    constexprs = {p.name for p in launch.kernel.params if p.is_constexpr}
    for name in launch.kernel.arg_names:
        value = launch.arguments[name]
        if name in constexprs or value is None or (isinstance(value, int) and value == 1):
            types.append((name, "constexpr"))
            constants.append((name, value))
        elif isinstance(value, Tensor):
            types.append((name, f"*{TYPES[value.dtype]}"))
            divisible.append(name)
        elif isinstance(value, float):
            types.append((name, "fp32"))
        else:
            types.append((name, "i32" if abs(value) < 2**31 else "i64"))
            if value % 16 == 0:
                divisible.append(name)
    return tuple(types), tuple(constants), tuple(divisible)


def _calls() -> Iterator[Callable[[], object]]:
    for velocity, sample in DTYPES:
        yield from _calls_of(2, ROW, velocity, sample)
    # One chunk per row, one sample, one element: other launches, in which numbers that are 1 become constants.
    for batch, length in ((2, SHORT), (1, ROW), (1, 1)):
        yield from _calls_of(batch, length, *DTYPES[0])


def _calls_of(batch: int, length: int, velocity: torch.dtype, sample: torch.dtype) -> Iterator[Callable[[], object]]:
    v, v_ref, v_uncond = (torch.zeros(batch, length, dtype=velocity) for _ in range(3))
    x, x_next = (torch.zeros(batch, length, dtype=sample) for _ in range(2))
    v_uncond.requires_grad_()  # both halves of a guided batch are written
    numbers = torch.full((batch,), 0.5)
    transition = numbers, numbers, numbers
    reduced = "density", "mean"
    for others in ((None, None, None), (v_ref, None, None), (v_ref, v_uncond, numbers)):
        stored = (numbers, numbers, numbers, 0.1, 0.1, 0.5)
        yield lambda others=others: _both(  # type: ignore[misc]
            lambda v, x, n: step_log_prob.function(*transition, x, v, n, *others, *reduced), v, x, x_next
        )
        yield lambda others=others, stored=stored: _both(  # type: ignore[misc]
            lambda v, x, n: policy_loss.function(*transition, x, v, n, *others, *stored, *reduced), v, x, x_next
        )
    keys = fold_in(key(0), torch.arange(batch))
    for guidance in ((None, None), (v_uncond, numbers)):
        yield lambda guidance=guidance: sde_step.function(*transition, x, v, *guidance, *keys, *reduced)  # type: ignore[misc]
    yield lambda: _both(velocity_error.function, v, x)
    yield lambda: _both(lambda t: nft_loss.function(t, v_ref, x, x_next, numbers, numbers, 0.1, 5.0, 1e-5)[0], v)


def _both(function: Callable[..., Any], v: Tensor, *others: Tensor) -> None:
    """Run forward and backward: once for the gradient of v, and once for all gradients."""
    for needed in {1, 1 + len(others)}:
        tensors = [t.detach().requires_grad_(i < needed) for i, t in enumerate((v, *others))]
        results = function(*tensors)
        results = [results] if isinstance(results, Tensor) else [r for r in results if isinstance(r, Tensor)]
        torch.autograd.backward(
            [r for r in results if r.requires_grad], [torch.ones_like(r) for r in results if r.requires_grad]
        )
