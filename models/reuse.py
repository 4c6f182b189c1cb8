"""What the passes of a chunk, on its way through a schedule, take over from earlier ones: one context per step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

from torch import nn

from fluvial.models.fixed_adapters import FixedAdapters
from fluvial.models.guidance import KeptDifference, guidance_halves
from fluvial.models.prompt_layers import PromptLayers
from fluvial.models.protocol import DiffusionModel
from fluvial.models.step_cache import FirstBlockCache, GuidanceCache, StepCache, StepCacheChoice

Reuse = Literal["all", "outside_blocks", "none"]


class PassReuse:
    """The caches of a chunk.

    Args:
        model, module: adapter and network, whose weights do not change as long as the object lives.
        layers: layers that see the prompt alone whose results are kept: all, those outside of the repeated blocks, or none.
            With all, merged weights are kept, too.
        cache: what deterministic steps take over.
        guided: whether the passes have guidance.
    """

    def __init__(
        self, model: DiffusionModel, module: nn.Module, *, layers: Reuse, cache: StepCacheChoice, guided: bool
    ) -> None:
        self._adapters = FixedAdapters(module) if layers == "all" else None
        self._blocks = StepCache(model, module, cache.threshold) if isinstance(cache, FirstBlockCache) else None
        self._kept = KeptDifference(cache.every) if isinstance(cache, GuidanceCache) and guided else None
        # By whether a step computes one half of guidance, which gives the layers other inputs than both do.
        kinds = 0 if layers == "none" else 1 if self._kept is None else 2
        self._layers = [PromptLayers(model, module, in_blocks=layers == "all") for _ in range(kinds)]

    @contextmanager
    def step(self, *, exact: bool) -> Iterator[Callable[..., Any]]:
        """Let the passes of a step reuse what is kept, and return the function of both halves of guidance.

        Args:
            exact: compute the step in full, without `cache`.
        """
        kept, near = self._kept, self._kept is not None and self._kept.is_near(exact=exact)
        with (
            nullcontext() if self._adapters is None else self._adapters.prediction(),
            self._layers[near].prediction() if self._layers else nullcontext(),
            nullcontext() if self._blocks is None else self._blocks.prediction(exact=exact),
        ):
            yield guidance_halves if kept is None else kept.reuse if near else kept.compute
