"""Adversarial losses: a discriminator's logit tells generated samples from real ones, and a generator learns from it."""

from torch import Tensor
from torch.nn.functional import softplus

from fluvial.core.checks import match_tensors
from fluvial.core.types import PerSample


def generator_loss(logit: PerSample) -> PerSample:
    """Return how surely a discriminator takes generated samples for such, in nats, `[B]`.

        loss = softplus(-logit) = -log sigmoid(logit)

    Its gradient is -sigmoid(-logit), which does not vanish where the discriminator is sure (the non-saturating loss). Where
    it cannot tell, at a logit of 0, the loss is log 2.

    Args:
        logit: log-odds that a generated sample is real, `[B]`; float32 or wider is kept, others become float32.

    Raises:
        TypeError, ValueError: the logit is no floating-point tensor, or not `[B]`.

    Source: arXiv 1406.2661, as in the code of DMD2, arXiv 2405.14867.
    """
    return softplus(-_check("generator_loss", logit=logit)[0])


def discriminator_loss(logit: PerSample, logit_real: PerSample) -> PerSample:
    """Return how badly a discriminator tells generated samples from real ones, in nats, `[B]`.

        loss = softplus(logit) + softplus(-logit_real)

    It is 2 log 2 where both logits are 0. Gradients flow to both. In expectation it is least for the log-ratio of the two
    densities, logit = log p_real - log p_generated.

    Args:
        logit: log-odds that a generated sample is real, `[B]`.
        logit_real: those of a real sample, `[B]`.

    Raises:
        TypeError, ValueError: a logit is no floating-point tensor, or they are not both `[B]`.

    Source: as `generator_loss`.
    """
    logit, logit_real = _check("discriminator_loss", logit=logit, logit_real=logit_real)
    return softplus(logit) + softplus(-logit_real)


def _check(function: str, **logits: Tensor) -> tuple[Tensor, ...]:
    """Return logits in the dtype of the computation; raise ValueError unless each is `[B]`."""
    checked = match_tensors(function, **logits)
    for name, logit in logits.items():
        if logit.ndim != 1:
            raise ValueError(f"{function}: {name} has shape {list(logit.shape)}, expected [B]")
    return checked
