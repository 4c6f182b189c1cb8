"""Diffusion-DPO: fits the preferred of two samples better than the rejected one."""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fluvial.core.dpo import DpoInfo, dpo_loss
from fluvial.engines.methods.pairing import Pairing, pair_errors
from fluvial.engines.run.declared import Networks, Start
from fluvial.engines.sampling.items import Pairs


@dataclass(frozen=True)
class Dpo(Pairing, name="dpo"):
    """Diffusion-DPO: fit the preferred of two samples better than the rejected one (arXiv 2311.12908, 2501.13918).

        loss = -log sigmoid(-beta / 2 ((err_win - err_win_ref) - lose_weight (err_lose - err_lose_ref)))

    Online, a pair is the best and the worst sample of a group. Offline, pairs are read from a folder. `pairing.py` has the
    training loop.

    Args:
        beta: Inverse temperature of the preference, without a unit. It includes the number of steps of the bound, so
            thousands are usual.
        lose_weight: Weight of the rejected sample in the margin. Below 1 a run diverges less easily, because the policy
            gains less from getting worse at rejected samples.
        ref_guidance: Guidance scale of the reference; None uses the update's.
    """

    bounds: ClassVar = {"beta": (1e-12, math.inf), "lose_weight": (0, 1e6), "ref_guidance": (0, math.inf)}
    beta: float = 2000.0
    lose_weight: float = 1.0
    ref_guidance: float | None = None

    def networks(self) -> Networks:
        """Declare the policy that training starts from: the margin is relative to it."""
        return {"ref": Start(self.ref_guidance)}

    def loss(self, v: Tensor, rows: Pairs) -> tuple[Tensor, DpoInfo]:
        """Return `dpo.dpo_loss`; rows are pairs of the preferred and the rejected sample, `[P, 2, *event]`."""
        err_win, err_lose = pair_errors(v, rows)
        err_win_ref, err_lose_ref = pair_errors(rows.predictions["ref"], rows)
        return dpo_loss(err_win, err_lose, err_win_ref, err_lose_ref, beta=self.beta, lose_weight=self.lose_weight)
