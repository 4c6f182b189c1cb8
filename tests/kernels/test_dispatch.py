"""The hot path's dispatch: the functions of core, and no silent replacement."""

import pytest
import torch

from fluvial.core import gaussian
from fluvial.core.transitions import flow_sde
from fluvial.kernels import step_log_prob
from fluvial.kernels.dispatch import IMPLEMENTATIONS


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", gaussian.FORMS)
@pytest.mark.parametrize("reduction", gaussian.REDUCTIONS)
def test_it_is_the_reference(implementation: str, form: str, reduction: str) -> None:
    """Log-prob and KL, with and without a reference velocity."""
    torch.manual_seed(0)
    v, x, x_next, v_ref = torch.randn(4, 3, 2, 5)
    transition = flow_sde(torch.tensor([0.9, 0.5, 0.3]), torch.tensor([0.8, 0.3, 0.0]), eta=0.7, sigma_max=0.9)
    options = {"form": form, "reduction": reduction}
    log_prob, kl = step_log_prob(v, x, x_next, transition, v_ref=v_ref, implementation=implementation, **options)  # type: ignore[arg-type]
    assert torch.equal(log_prob, gaussian.log_prob(transition, x, v, x_next, **options))  # type: ignore[arg-type]
    assert kl is not None
    assert torch.equal(kl, gaussian.kl(transition, v, v_ref, reduction=reduction))  # type: ignore[arg-type]
    assert step_log_prob(v, x, x_next, transition)[1] is None


def test_what_does_not_exist_is_an_error() -> None:
    """Nothing is replaced silently."""
    v = torch.zeros(1, 2)
    transition = flow_sde(torch.tensor([0.9]), torch.tensor([0.8]), eta=0.7, sigma_max=0.9)
    with pytest.raises(ValueError, match="implementation is 'cuda', expected one of 'auto', 'reference'"):
        step_log_prob(v, v, v, transition, implementation="cuda")  # type: ignore[arg-type]
