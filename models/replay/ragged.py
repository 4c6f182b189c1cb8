"""Prompts of unlike lengths: inputs that all samples of a prompt share, and that other prompts have others of.

Such an input, e.g. the positions of the text's tokens, has no row per sample. It becomes one row, and each pair of a sample
and a step then has its own forward pass, as the rows of unlike lengths have (`RecordedModel.ragged`).
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from fluvial.models.protocol import Cond
from fluvial.models.replay.capture import equal
from fluvial.models.replay.recipe import Call, Fixed, Row, Shared, StepRecipe

Sites = frozenset[tuple[int, int, int]]  # recipe, call and leaf of inputs


def unlike(left: Sequence[StepRecipe], right: Sequence[StepRecipe]) -> Sites:
    """Return which tensors that all samples of a prompt share differ between the runs of two prompts."""
    if len(left) != len(right):
        return frozenset()
    return frozenset(
        (recipe, call, leaf)
        for recipe, both in enumerate(zip(left, right, strict=True))
        for call, (one, other) in enumerate(zip(both[0].calls, both[1].calls, strict=False))
        for leaf, (mine, theirs) in enumerate(zip(one.leaves, other.leaves, strict=False))
        if isinstance(mine, Fixed) and isinstance(mine.value, Tensor) and isinstance(theirs, Fixed)
        if isinstance(theirs.value, Tensor) and not equal(mine, theirs)
    )


def with_rows(recipes: Sequence[StepRecipe], cond: Cond, sites: Sites) -> tuple[tuple[StepRecipe, ...], Cond]:
    """Return recipes and the inputs with one row per sample, to which the shared inputs at some sites are added.

    Args:
        recipes: recipes of a run on one prompt.
        cond: rows by recipe, each `[1, repeats, ...]`.
        sites: inputs that become rows `[1, 1, ...]`.
    """
    changed, added = list[StepRecipe](), list[tuple[Tensor, ...]]()
    for number, (recipe, rows) in enumerate(zip(recipes, cond, strict=True)):
        values, calls, kept = iter(rows), list[Call](), list[Tensor]()
        for place, call in enumerate(recipe.calls):
            leaves = list(call.leaves)
            for at, leaf in enumerate(call.leaves):
                if (number, place, at) in sites and isinstance(leaf, Fixed) and isinstance(leaf.value, Tensor):
                    leaves[at] = Shared()
                    kept.append(leaf.value[None, None])
                elif isinstance(leaf, Row):
                    kept.append(next(values))
            calls.append(call._replace(leaves=tuple(leaves)))
        changed.append(replace(recipe, calls=tuple(calls)))
        added.append(tuple(kept))
    return tuple(changed), tuple(added)
