"""Rollout source of a run, built from its configuration."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from torch import nn

from fluvial.engines import plugins
from fluvial.engines.data.sizes import Size
from fluvial.engines.engine.world import World
from fluvial.engines.sampling.config import ReadingConfig, RolloutConfig
from fluvial.engines.sampling.source import Behaviour, Copy, InProcess, RolloutSource
from fluvial.models import DiffusionModel
from fluvial.models.fixed_adapters import merge_adapters
from fluvial.models.lora_layer import Product


class OpenSource(Protocol):
    """Opens an out-of-process source, see `build_source`: an entry point of `fluvial.sources`, named by its scheme."""

    def __call__(
        self,
        rollout: RolloutConfig,
        sampling: ReadingConfig,
        model: DiffusionModel,
        behaviour: Behaviour,
        world: World,
        *,
        adapter: Callable[[int], str],
        product: Product,
        sizes: Mapping[tuple[int, ...], tuple[Size, int]],
        copy: Copy | None,
    ) -> RolloutSource: ...


def build_source(
    rollout: RolloutConfig,
    sampling: ReadingConfig,
    model: DiffusionModel,
    behaviour: Behaviour,
    world: World,
    *,
    resume: bool = False,
    adapter: Callable[[int], str] = lambda version: "default",
    product: Product = "auto",
    sizes: Mapping[tuple[int, ...], tuple[Size, int]] | None = None,
    copy: Copy | None = None,
) -> RolloutSource:
    """Return the rollout source: this process, or the plugin for the scheme of `rollout.source`.

    Args:
        behaviour: opens the network that generates the rollouts.
        resume: whether the run is resumed, so that `rollout.store` may already contain rollouts.
        adapter: function from a number of updates to the name of the adapter that generates the rollouts.
        product: how adapted layers multiply their input.
        sizes: size in pixels and number of frames per sample shape, if the model has several.
        copy: network whose weights are pushed, if rollouts are generated ahead of the updates.

    Raises:
        UsageError: the source, or the folder of `rollout.store`, is unusable.
        RunError: no server responds.
    """
    source: RolloutSource = InProcess(model, partial(_open_merged, behaviour) if rollout.reuse == "merged" else behaviour)
    if rollout.source:
        # Imported lazily, because the HTTP packages are slow to import.
        open_source: OpenSource = plugins.load(rollout.scheme, "sources", field="rollout.source")
        source = open_source(
            rollout, sampling, model, behaviour, world, adapter=adapter, product=product, sizes=sizes or {}, copy=copy
        )
    if rollout.store is None:
        return source
    stored: RolloutSource = plugins.load("stored", "extensions")(source, rollout.store, world, resume=resume)
    return stored


@contextmanager
def _open_merged(behaviour: Behaviour) -> Iterator[nn.Module]:
    """Open the network that generates the rollouts with its adapters merged."""
    with behaviour() as module, merge_adapters(module):
        yield module
