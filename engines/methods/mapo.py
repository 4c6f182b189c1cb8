"""MaPO: fits the preferred sample, and makes it likelier than the rejected one, without a reference."""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fluvial.core.dpo import MapoInfo, mapo_loss
from fluvial.engines.methods.pairing import Pairing, pair_errors
from fluvial.engines.sampling.items import Pairs


@dataclass(frozen=True)
class Mapo(Pairing, name="mapo"):
    """MaPO: fit the preferred sample, and make it likelier than the rejected one, without a reference (arXiv 2406.06424).

    Online, a pair is the best and the worst sample of a group. Offline, pairs are read from a folder.

    Args:
        beta: Weight of the preference beside the error on the preferred sample; 0 is supervised fine-tuning on it.
        temperature: Factor of the difference of the two likelihoods.
        snr: Signal-to-noise constant c of an error's likelihood c e / (exp(c e) - 1). The published value is for models
            that predict epsilon; none is published for flows.
    """

    bounds: ClassVar = {"beta": (0, math.inf), "temperature": (1e-12, math.inf), "snr": (1e-12, math.inf)}
    beta: float = 0.1
    temperature: float = 1000.0
    snr: float = 0.5

    def loss(self, v: Tensor, rows: Pairs) -> tuple[Tensor, MapoInfo]:
        """Return `dpo.mapo_loss`; rows are pairs of the preferred and the rejected sample, `[P, 2, *event]`."""
        return mapo_loss(*pair_errors(v, rows), beta=self.beta, temperature=self.temperature, snr=self.snr)
