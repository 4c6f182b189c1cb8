"""The source of a run, by its configuration."""

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
    """Opens a source that is not in process, see `build_source`: the entry points of `fluvial.sources`, by scheme."""

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
    """Return what makes the samples of a run: this process, or what is declared for the scheme of `rollout.source`.

    Args:
        behaviour: opens the network that makes the rollouts.
        resume: whether the run goes on, so that `rollout.store` may hold its rollouts.
        adapter: function of a number of updates that returns the name of the adapter that makes the rollouts.
        product: how adapted layers multiply their input.
        sizes: size in pixels and number of frames by the shape of a sample, where the model has several.
        copy: network whose weights are pushed, where rollouts are made ahead of the updates.

    Raises:
        UsageError: the source, or the folder of `rollout.store`, cannot be used.
        RunError: no server answers.
    """
    source: RolloutSource = InProcess(model, partial(_merged, behaviour) if rollout.reuse == "merged" else behaviour)
    if rollout.source:
        # Imported by runs that need it alone, because HTTP's packages take a while.
        open_source: OpenSource = plugins.load(rollout.scheme, "sources", field="rollout.source")
        source = open_source(
            rollout, sampling, model, behaviour, world, adapter=adapter, product=product, sizes=sizes or {}, copy=copy
        )
    if rollout.store is None:
        return source
    stored: RolloutSource = plugins.load("stored", "extensions")(source, rollout.store, world, resume=resume)
    return stored


@contextmanager
def _merged(behaviour: Behaviour) -> Iterator[nn.Module]:
    """Open the network that makes the rollouts with its adapters merged."""
    with behaviour() as module, merge_adapters(module):
        yield module
