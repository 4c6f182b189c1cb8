"""Adversarial losses of a discriminator, which tells generated samples from real ones, and of its generator."""

from torch import Tensor
from torch.nn.functional import softplus

from fluvial.core.checks import match_tensors
from fluvial.core.types import PerSample


def generator_loss(logit: PerSample) -> PerSample:
    """Return the non-saturating loss of a generator, in nats, `[B]`.

        loss = softplus(-logit) = -log sigmoid(logit)

    Its gradient, -sigmoid(-logit), does not vanish where the discriminator is confident. At a logit of 0, where it cannot
    tell, the loss is log 2.

    Args:
        logit: log-odds that a generated sample is real, `[B]`; computed in float32, or in float64 if it is.

    Raises:
        TypeError, ValueError: the logit is not a floating-point tensor, or not `[B]`.

    Source: arXiv 1406.2661, as in the code of DMD2, arXiv 2405.14867.
    """
    return softplus(-_check("generator_loss", logit=logit)[0])


def discriminator_loss(logit: PerSample, logit_real: PerSample) -> PerSample:
    """Return the logistic loss of a discriminator, in nats, `[B]`.

        loss = softplus(logit) + softplus(-logit_real)

    It is 2 log 2 where both logits are 0. Gradients flow to both. Its expectation is minimised by the log-ratio of the two
    densities, logit = log p_real - log p_generated.

    Args:
        logit: log-odds that a generated sample is real, `[B]`.
        logit_real: log-odds that a real sample is real, `[B]`.

    Raises:
        TypeError, ValueError: a logit is not a floating-point tensor, or they are not both `[B]`.

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
