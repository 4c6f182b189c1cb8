"""The source of a run, by its configuration."""

from collections.abc import Callable, Mapping
from pathlib import Path

from fluvial.engines.data.sizes import Size
from fluvial.engines.engine.world import World
from fluvial.engines.extensions.remote.stored import Replayed, Storing
from fluvial.engines.sampling.config import REPLAYED, RolloutConfig
from fluvial.engines.sampling.in_process import InProcess
from fluvial.engines.sampling.sampler_copy import Copy
from fluvial.engines.sampling.source import Behaviour, RolloutSource
from fluvial.models import DiffusionModel
from fluvial.models.lora_layer import Product


def build_source(
    rollout: RolloutConfig,
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
    """Return what makes the samples of a run.

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
    if rollout.source.startswith(REPLAYED):
        return Replayed(Path(rollout.source.removeprefix(REPLAYED)), model)
    source: RolloutSource = InProcess(model, behaviour)
    if rollout.is_served:
        # Imported by runs with servers alone, because HTTP's packages take a while.
        from fluvial.engines.extensions.remote.remote import Remote
        from fluvial.engines.extensions.remote.weight_sync import WeightSync

        asked = rollout.servers
        sync = WeightSync(
            world if copy is None else copy.world,
            folder=asked.weights_folder,
            method=asked.weights,
            verify=asked.weights_verify,
            product=product,
        )
        try:
            source = Remote(rollout, model, behaviour=behaviour, adapter=adapter, world=world, sizes=sizes or {}, sync=sync)
        except BaseException:
            sync.close()
            raise
    return source if rollout.store is None else Storing(source, rollout.store, world, resume=resume)
