"""Exponential moving average of parameters, over any pytree of tensors."""

import optree
import torch
from optree import PyTree
from torch import Tensor

from fluvial.core.checks import check_number


def init(params: PyTree[Tensor]) -> PyTree[Tensor]:
    """Return the moving average after one set of parameters: a copy of the parameters, without gradient."""
    return optree.tree_map(lambda tensor: tensor.detach().clone(), params)


def update(ema: PyTree[Tensor], params: PyTree[Tensor], decay: float) -> PyTree[Tensor]:
    """Return decay * ema + (1 - decay) * params, leaf by leaf, with decay in [0, 1]."""
    check_number("ema.update", "decay", decay, low=0, high=1)
    return optree.tree_map(lambda average, tensor: torch.lerp(tensor.detach(), average, decay), ema, params)


def warm_up_decay(decay: float, updates: int) -> float:
    """Return min(decay, (1 + n) / (10 + n)) after n updates, so that the initial parameters are forgotten quickly.

    Source: the warm-up of TensorFlow's and diffusers' moving averages.
    """
    return min(decay, (1 + updates) / (10 + updates))
