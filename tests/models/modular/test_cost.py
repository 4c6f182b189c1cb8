"""CPU seconds of a modular pipeline's velocity and its gradients, beside those of its network alone, in turn."""

import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import diffusers
import optree
import pytest
import torch
from helpers import tiny_modular
from helpers.tiny_modular import opened, prompts
from torch import Tensor

from fluvial.core.random import key, normal
from fluvial.models.pipelines.folder import read_settings

RUNS, MOST = 15, 1.05
LARGER: dict[str, dict[str, Any]] = {  # so that the network takes nearly all of the time
    "Flux3": {"num_attention_heads": 32, "num_layers": 2, "num_single_layers": 2},
    "MiniMaxH3": {"num_attention_heads": 32, "hidden_size": 256, "num_layers": 4, "ffn_dim": 1024},
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of diffusers' own parts
@pytest.mark.parametrize("name", LARGER)
def test_the_blocks_cost_little_beside_the_network(name: str, tmp_path: Path) -> None:
    """The network is given the inputs of its own calls again; two samples at two noise levels, no adapters."""
    folder = tiny_modular.folder_of(name, tmp_path / name)
    settings = read_settings(folder / "transformer" / "config.json")
    kind = getattr(diffusers, settings["_class_name"])
    kind.from_config({**settings, **LARGER[name]}).save_pretrained(folder / "transformer")
    model = opened(name, folder, **({"height": 64, "width": 64} if name == "Flux3" else {}))
    module, cond = model.build(), model.encode(prompts(name)[:1] * 2)
    x, levels, given = normal(key(0), (2, *model.known.shape)), model.known.levels[:2], list[Any]()

    def keep(_: Any, args: Any, kwargs: Any) -> None:
        given.append(
            optree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        )

    def bare() -> Tensor:
        outputs = [output for args, kwargs in given for output in module(*args, **kwargs) if isinstance(output, Tensor)]
        return torch.stack([output.square().sum() for output in outputs]).sum()

    predict = partial(model.predict, module, x, levels, cond)
    with module.register_forward_pre_hook(keep, with_kwargs=True):
        predict()
    seconds: dict[str, list[float]] = {"blocks": [], "network": []}
    for run in range(RUNS + 1):  # the first is the warm-up
        for each in [*seconds][:: 1 if run % 2 else -1]:
            start = time.process_time()
            (predict().square().sum() if each == "blocks" else bare()).backward()
            seconds[each].append(time.process_time() - start)
    ratios = sorted(one / other for one, other in list(zip(*seconds.values(), strict=True))[1:])
    said = f"{len(given)} passes of {median(seconds['network']) / len(given):.2f} s of CPU"
    print(f"{name}: {said}, ratio {median(ratios):.3f} ({ratios[RUNS // 5]:.3f} to {ratios[-RUNS // 5]:.3f})")
    least, other = (min(each[1:]) for each in seconds.values())  # other programs only add to them
    assert least <= MOST * other
