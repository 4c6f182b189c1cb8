"""How a pipeline of diffusers makes a step's velocity of its transformer, found out by watching it do so."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fluvial.models.protocol import Cond

SCALES = ("guidance_scale", "true_cfg_scale")  # what diffusers' pipelines call the scale of classifier-free guidance


class Latent(NamedTuple):
    """An input that is the sample: cast, and repeated along the batch for guidance."""

    dtype: torch.dtype
    repeats: int


class Row(NamedTuple):
    """An input with a row a sample, repeated along the batch for guidance."""

    repeats: int
    each_step: bool  # whether it differs from step to step


class Fixed(NamedTuple):
    """An input that all samples and steps share, tensor or not."""

    value: Any


Leaf = Latent | Row | Fixed


class Call(NamedTuple):
    """One call of the transformer: where its inputs come from, as leaves of the pytree (args, kwargs)."""

    tree: Any  # an optree.PyTreeSpec
    leaves: tuple[Leaf, ...]
    dtype: torch.dtype  # of what it returns

    @property
    def repeats(self) -> int:
        """How many times the batch is in one call."""
        return next(leaf.repeats for leaf in self.leaves if isinstance(leaf, Latent))


class Combination(NamedTuple):
    """What a step's velocity is made of: one part, or two with classifier-free guidance c + g (c - u) or u + g (c - u).

    A part is what the transformer returns for one copy of the batch; the parts of all calls are counted.
    """

    cond: int | None = None  # which of two parts is c; None: there is one part
    scale: float = 1.0  # g
    from_cond: bool = False  # it starts from c, as Z-Image's does
    keep_norm: bool = False  # it is given the norm of c over the last dimension, as Lumina 2's is
    first_half: bool = False  # of the channels: the others are a learned variance
    negative: bool = False  # the model predicts x0 - eps
    dtype: torch.dtype | None = None  # the parts are cast to it first

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the velocity of the parts, each `[B, ...]`."""
        if self.dtype is not None:
            parts = [part.to(self.dtype) for part in parts]
        v = parts[0]
        if self.cond is not None:
            c, u = parts[self.cond], parts[1 - self.cond]
            v = (c if self.from_cond else u) + self.scale * (c - u)
            if self.keep_norm:
                v = v * (torch.norm(c, dim=-1, keepdim=True) / torch.norm(v, dim=-1, keepdim=True))
        if self.first_half:
            v = v.chunk(2, dim=1)[0]
        return -v if self.negative else v


@dataclass(frozen=True)
class StepRecipe:
    """How the velocity of some recorded steps comes about; steps that are made alike share one."""

    calls: tuple[Call, ...]
    combination: Combination
    positions: tuple[int, ...]  # of the steps, among the recorded ones

    def predict(self, module: nn.Module, x: Tensor, rows: Sequence[Tensor], place: Tensor) -> Tensor:
        """Return the velocity of P pairs.

        Args:
            module: the transformer.
            x: `[P, *event]`.
            rows: the inputs with a row a sample, `[P, repeats, ...]`; those that differ by step, `[P, S, repeats, ...]`.
            place: `[P]` int64, which of the S steps.
        """
        values, pairs, parts = iter(rows), torch.arange(len(x), device=x.device), []
        for call in self.calls:
            leaves = []
            for leaf in call.leaves:
                if isinstance(leaf, Latent):
                    leaves.append(x.to(leaf.dtype).repeat(leaf.repeats, *[1] * (x.ndim - 1)))
                elif isinstance(leaf, Row):
                    value = next(values)
                    leaves.append((value[pairs, place] if leaf.each_step else value).transpose(0, 1).flatten(0, 1))
                else:
                    leaves.append(leaf.value.to(x.device) if isinstance(leaf.value, Tensor) else leaf.value)
            args, kwargs = optree.tree_unflatten(call.tree, leaves)
            parts.extend(_output(module(*args, **kwargs)).chunk(call.repeats))
        return self.combination(parts)


class _Steps(NamedTuple):
    """Steps that are made alike, as they are recorded."""

    calls: list[Call]
    combinations: list[Combination]  # that gave the velocity of all of them
    positions: list[int]
    rows: list[list[Tensor]]  # of each step; the same objects where they are equal


class Capture:
    """Hold what a transformer is given and returns within a step, until the scheduler is told the velocity.

    Args:
        pipe: the pipeline.
        component: the part of it that is watched.
        asked: what the pipeline is called with.

    Raises:
        ValueError: it cannot be called so.
    """

    def __init__(self, pipe: Any, component: str, asked: dict[str, Any]) -> None:
        self.pipeline, self.component, self.scales = type(pipe).__name__, component, _scales(pipe, asked)
        self._inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._outputs: list[Any] = []
        self._groups: list[_Steps] = []
        self._recorded = 0

    @contextmanager
    def watching(self, pipe: Any, scheduler: Any) -> Iterator[None]:
        """Let a pipeline step with another scheduler and its transformer be watched, for a while."""
        own, module = pipe.scheduler, pipe.components[self.component]
        handles = [
            module.register_forward_pre_hook(self._before, with_kwargs=True), module.register_forward_hook(self._after),
        ]  # fmt: skip
        pipe.scheduler = scheduler
        try:
            yield
        finally:
            pipe.scheduler = own
            for handle in handles:
                handle.remove()

    def step(self, step: int, x: Tensor, v: Tensor, recorded: bool) -> None:
        """Understand the calls of a step, or raise ValueError."""
        inputs, outputs = self._inputs, self._outputs
        self._inputs, self._outputs = [], []
        if not recorded:
            return
        if not inputs:
            raise self._refusal(step, f"the {self.component} is not called")
        calls: list[Call] = []
        rows: list[Tensor] = []
        parts: list[Tensor] = []
        for given, output in zip(inputs, outputs, strict=True):
            leaves, tree = optree.tree_flatten(given)
            repeats = next((count for leaf in leaves if (count := _copies(leaf, x))), None)
            if repeats is None:
                raise self._refusal(step, f"the {self.component} is called without the sample, as the scheduler has it")
            kinds: list[Leaf] = []
            for leaf in leaves:
                if count := _copies(leaf, x):
                    kinds.append(Latent(leaf.dtype, count))
                elif isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) in (repeats * len(x), len(x)):
                    kinds.append(Row(len(leaf) // len(x), False))
                    rows.append(leaf.detach().unflatten(0, (-1, len(x))).transpose(0, 1))
                else:
                    kinds.append(Fixed(leaf.detach().clone() if isinstance(leaf, Tensor) else leaf))
            returned = _output(output)
            if not isinstance(returned, Tensor) or len(returned) != repeats * len(x):
                raise self._refusal(step, f"the {self.component} returns something else than a tensor of as many samples")
            calls.append(Call(tree, tuple(kinds), returned.dtype))
            parts.extend(returned.chunk(repeats))
        combinations = [combination for combination in _combinations(parts, v, self.scales) if _same(combination(parts), v)]
        if not combinations:
            scales = " or ".join(f"{scale:g}" for scale in self.scales) or "none"
            raise self._refusal(
                step,
                f"its velocity is no known combination of {len(parts)} outputs of the {self.component} (guidance {scales})",
            )
        self._add(calls, rows, combinations)

    def ways(self) -> tuple[tuple[StepRecipe, ...], Cond]:
        """Return how the velocities came about, and the inputs with a row a sample."""
        ways, cond = [], []
        for group in self._groups:
            if len(group.combinations) > 1:
                raise self._refusal(
                    None,
                    "its velocity is several combinations of the outputs at once; use prompts other than the negative one",
                )
            each_step = [any(row is not first for row in others) for first, *others in zip(*group.rows, strict=True)]
            flags = iter(each_step)
            calls = []
            for call in group.calls:
                leaves = (leaf._replace(each_step=next(flags)) if isinstance(leaf, Row) else leaf for leaf in call.leaves)
                calls.append(call._replace(leaves=tuple(leaves)))
            ways.append(StepRecipe(tuple(calls), group.combinations[0], tuple(group.positions)))
            columns = zip(zip(*group.rows, strict=True), each_step, strict=True)
            cond.append(tuple(torch.stack(column, dim=1) if differs else column[0] for column, differs in columns))
        return tuple(ways), tuple(cond)

    def _add(self, calls: list[Call], rows: list[Tensor], combinations: list[Combination]) -> None:
        """Put a step to those that are made alike, keeping tensors that are equal once."""
        position, self._recorded = self._recorded, self._recorded + 1
        for at, group in enumerate(self._groups):
            both = [known for known in group.combinations if known in combinations]
            if both and _alike(group.calls, calls) and [_kind(row) for row in group.rows[0]] == [_kind(row) for row in rows]:
                kept = [
                    first if torch.equal(first, row) else row.clone() for first, row in zip(group.rows[0], rows, strict=True)
                ]
                group.positions.append(position)
                group.rows.append(kept)
                self._groups[at] = group._replace(combinations=both)
                return
        self._groups.append(_Steps(calls, combinations, [position], [[row.clone() for row in rows]]))

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the inputs; the transformer may go on to change the containers, so they are copied."""
        self._inputs.append(optree.tree_map(lambda leaf: leaf, (args, kwargs)))

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Take the output."""
        self._outputs.append(output)

    def _refusal(self, step: int | None, reason: str) -> ValueError:
        where = "" if step is None else f" at step {step}"
        return ValueError(f"{self.pipeline} cannot be trained without an adapter:{where} {reason}")


def same_steps(left: Sequence[StepRecipe], right: Sequence[StepRecipe]) -> bool:
    """Return whether two runs of a pipeline make their velocities alike, but for the inputs with a row a sample."""
    return len(left) == len(right) and all(
        one.positions == other.positions and one.combination == other.combination and _alike(one.calls, other.calls)
        for one, other in zip(left, right, strict=True)
    )


def _combinations(parts: Sequence[Tensor], v: Tensor, scales: Sequence[float]) -> Iterator[Combination]:
    """Yield the combinations that could make v of the parts, the plain ones first."""
    if len(parts) > 2 or any(part.shape != parts[0].shape for part in parts):
        return
    dtype = None if parts[0].dtype == v.dtype else v.dtype
    half = parts[0].shape[1:] == (2 * v.shape[1], *v.shape[2:])
    for negative in (False, True):
        made = partial(Combination, first_half=half, negative=negative, dtype=dtype)
        if len(parts) == 1:
            yield made()
            continue
        for scale, cond, from_cond, keep_norm in product(scales, (1, 0), (False, True), (False, True)):
            yield made(cond=cond, scale=scale, from_cond=from_cond, keep_norm=keep_norm)


def _copies(leaf: Any, x: Tensor) -> int:
    """Return how many times the leaf is the sample, one after the other along the batch; 0 if it is something else."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.shape[1:] != x.shape[1:] or leaf.ndim != x.ndim:
        return 0
    count, rest = divmod(len(leaf), len(x))
    if rest or not count:
        return 0
    return count if torch.equal(leaf, x.to(leaf.dtype).repeat(count, *[1] * (x.ndim - 1))) else 0


def _output(output: Any) -> Any:
    """Return the first of what a transformer returns, as a tuple or as diffusers' output."""
    return output if isinstance(output, Tensor) else output[0]


def _same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _alike(left: Sequence[Call], right: Sequence[Call]) -> bool:
    """Whether two steps call the transformer alike, but for what is the sample or has a row a sample."""
    return len(left) == len(right) and all(
        one.tree == other.tree and one.dtype == other.dtype and all(map(_equal, one.leaves, other.leaves))
        for one, other in zip(left, right, strict=True)
    )


def _equal(left: Leaf, right: Leaf) -> bool:
    if not isinstance(left, Fixed) or not isinstance(right, Fixed):
        return left == right
    one, other = left.value, right.value
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and _same(one, other)
    return one is other or (type(one) is type(other) and isinstance(one, int | float | str) and one == other)


def _scales(pipe: Any, asked: dict[str, Any]) -> list[float]:
    """Return the scales of guidance that a pipeline is called with, its defaults included."""
    try:
        bound = inspect.signature(pipe.__call__).bind(**asked)
    except TypeError as error:
        raise ValueError(f"{type(pipe).__name__} cannot be called so: {error}") from error
    bound.apply_defaults()
    given = (bound.arguments.get(name) for name in SCALES)
    return list(dict.fromkeys(float(scale) for scale in given if isinstance(scale, int | float)))
