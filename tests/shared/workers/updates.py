"""Counts the updates of a tiny transformer and compares their gradients, for test_update.py."""

from functools import partial
from typing import Any

from fluvial.bench.counting import Collectives, HostReads
from fluvial.bench.update.cases import SIZES, UpdateCase, build_engine, build_published, make_rollout, update_engine
from fluvial.bench.update.measure import count_update, measure_gradient_distance
from fluvial.engines.engine.engine import EngineConfig
from fluvial.engines.engine.world import World

SAMPLES = 5
SHARDINGS: dict[str, dict[str, Any]] = {
    "keep": {},
    "reshard": {"comm": "reshard"},
    "every": {"grad_sync": "every"},
    "checkpointed": {"checkpointing": "block"},
}
GUIDANCE: dict[str, dict[str, Any]] = {"off": {}, "one": {"forwards": "one"}, "two": {"forwards": "two"}}
# Recorded steps, and micro-batches that their pairs are divided into.
SHAPES = [(2, 1), (4, 2), (6, 3)]


def case(steps: int, *, guidance: bool = True, train: Any = "full") -> UpdateCase:
    return UpdateCase(SIZES["tiny"], train, steps, guidance, samples=SAMPLES, micro_batch=SAMPLES)


def counts(world: World) -> list[dict[str, Any]]:
    """Return the collectives and host reads of an update, by the way of communicating, guidance, steps and micro-batches."""
    found: list[dict[str, Any]] = []
    sampler = build_engine(case(2), world, EngineConfig())
    rollouts = {
        (guided, steps): make_rollout(sampler, case(steps, guidance=guided), world)
        for guided in (False, True)
        for steps in {steps for steps, _ in SHAPES}
    }
    for sharding, options in SHARDINGS.items():
        engine = build_engine(case(2), world, EngineConfig(**options))
        for guidance, forwards in GUIDANCE.items():
            if sharding == "checkpointed" and guidance != "two":  # where a block's forward pass runs four times
                continue
            for steps, n in SHAPES:
                rollout = rollouts[guidance != "off", steps]
                with Collectives() as collectives, HostReads() as reads:
                    update_engine(engine, rollout, micro_batch=SAMPLES * steps // n, **forwards)
                found.append(
                    {
                        "sharding": sharding,
                        "guidance": guidance,
                        "steps": steps,
                        "n": n,
                        "gathers": collectives.all_gathers,
                        "scatters": collectives.reduce_scatters,
                        "others": collectives.others,
                        "reads": dict(reads.counts),
                    }
                )
    return found


def gradients(world: World) -> dict[str, float]:
    """Return how far an update's gradient is from the baseline's, and that of other ways from the default's, relatively."""
    distances = {}
    two, half = {"forwards": "two"}, {"gradient": "conditional"}
    ways = {  # and the one that each is compared with
        "two": (two, "default"),
        "conditional": (half, "default"),
        "conditional in two": (two | half, "conditional"),
    }
    for train, guidance in (("full", True), ("full", False), ("lora", True)):
        chosen = case(4, guidance=guidance, train=train)
        keep, published = build_engine(chosen, world, EngineConfig(replicas=1)), build_published(chosen, world)
        rollout = make_rollout(keep, chosen, world)
        update_engine(keep, rollout, micro_batch=10)
        published.update(rollout.stored, micro_batch=SAMPLES)
        name = f"{train}, {'guidance' if guidance else 'no guidance'}"
        distances[f"{name}, baseline"] = measure_gradient_distance(keep, published, world)
        engines = {"default": keep}
        for way, (options, other) in ways.items() if guidance else ():
            engines[way] = build_engine(chosen, world, EngineConfig(replicas=1))
            update_engine(engines[way], rollout, micro_batch=10, **options)  # type: ignore[arg-type]
            distances[f"{name}, {way}"] = measure_gradient_distance(engines[way], engines[other], world)
    return distances


def peaks(world: World) -> dict[int, int]:
    """Return the peak bytes of an update at two numbers of recorded steps, with micro-batches of one size."""
    engine = build_engine(case(2), world, EngineConfig())
    update_engine(engine, make_rollout(engine, case(2), world), micro_batch=SAMPLES)  # makes the optimizer's state
    found = {}
    for steps in (2, 10):
        rollout = make_rollout(engine, case(steps), world)
        update = partial(update_engine, engine, rollout, micro_batch=SAMPLES)
        found[steps] = count_update(update, engine, rollout)["peak_bytes"]
    return found


def measure(world: World) -> dict[str, Any]:
    result = {"counts": counts(world), "gradients": gradients(world), "peaks": peaks(world)}
    return result
