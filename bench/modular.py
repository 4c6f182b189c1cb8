"""Seconds of a modular pipeline's velocity and its gradients, beside those of its network."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import optree
import torch
from torch import Tensor

from fluvial.bench import harness
from fluvial.core.random import key, normal
from fluvial.engines.errors import UsageError
from fluvial.models.flops import FlopCounter

# Settings of the random network, which make its share of the time large, and the pixels of a side.
NETWORKS: dict[str, tuple[dict[str, Any], int]] = {
    "Flux3": ({"num_attention_heads": 32, "num_layers": 2, "num_single_layers": 2}, 64),
    "MiniMaxH3": ({"num_attention_heads": 32, "hidden_size": 256, "num_layers": 4, "ffn_dim": 1024}, 32),
}
PROMPTS = ["a red fox", "two cats in the rain, at night, under a lamp"]


@dataclass(frozen=True)
class ModularConfig:
    """Time a modular pipeline's velocity by its blocks, with gradients, beside its network with the same inputs.

    Args:
        names: classes of pipelines, without the ending ModularPipeline.
        runs: number of timed runs of each.
    """

    names: tuple[str, ...] = tuple(NETWORKS)
    runs: int = 15

    def __post_init__(self) -> None:
        if unknown := [name for name in self.names if name not in NETWORKS]:
            raise UsageError(f"names: there is no {unknown[0]!r}, expected some of {', '.join(NETWORKS)}")


def run(config: ModularConfig) -> list[dict[str, str]]:
    """Print a Markdown table with a row per pipeline."""
    with TemporaryDirectory() as folder:
        rows = [_measure(name, Path(folder, name), config.runs) for name in config.names]
    print(harness.format_markdown(rows))
    return rows


def _measure(name: str, folder: Path, runs: int) -> dict[str, str]:
    """Return the row of a pipeline: two samples at two noise levels, all weights trained, float32."""
    import diffusers

    from fluvial.models.modular.any_modular import AnyModular
    from fluvial.models.pipelines.folder import read_settings
    from fluvial.models.tiny.modular import find_call, save

    larger, side = NETWORKS[name]
    save(f"{name}ModularPipeline", folder)
    settings = read_settings(folder / "transformer" / "config.json")
    kind = getattr(diffusers, settings["_class_name"])
    kind.from_config({**settings, **larger}).save_pretrained(folder / "transformer")
    asked = find_call(f"{name}ModularPipeline")
    size: dict[str, Any] = {"height": side, "width": side, "frames": asked.frames, "steps": 3, "scale": asked.scale}
    model = AnyModular(folder, **size, negative=asked.negative, call=asked.call, example=PROMPTS[0]).adapt_to(PROMPTS)
    module, cond, calls = model.build(), model.encode(PROMPTS[:1] * 2), list[Any]()
    x, levels = normal(key(0), (2, *model.known.shape)), model.known.levels[:2]

    def keep(_: Any, *called: Any) -> None:
        calls.append(optree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, called))

    def run_blocks() -> None:
        model.predict(module, x, levels, cond).square().sum().backward()

    def run_network() -> None:
        outputs = [out for args, kwargs in calls for out in module(*args, **kwargs) if isinstance(out, Tensor)]
        torch.stack([out.square().sum() for out in outputs]).sum().backward()

    with module.register_forward_pre_hook(keep, with_kwargs=True):
        run_blocks()
    operations = list[int]()
    for call in (run_blocks, run_network):
        with FlopCounter() as counter:
            call()
        operations.append(counter.model)
    seconds = harness.alternate(runs, {"blocks": run_blocks, "network": run_network}, warmup=0)
    ratios = sorted(one / other for one, other in zip(*seconds.values(), strict=True))
    spread = f"{median(ratios):.3f} ({ratios[runs // 5]:.3f} to {ratios[-1 - runs // 5]:.3f})"
    return {
        "pipeline": name,
        "passes": str(len(calls)),
        "seconds per pass": f"{median(seconds['network']) / len(calls):.2f}",
        "operations, blocks / network": f"{operations[0] / operations[1]:.3f}",
        "seconds, blocks / network": spread,
    }
