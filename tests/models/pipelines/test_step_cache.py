"""The first-block cache: passes that are left out are counted, exact predictions keep their bits, formulas hold."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.marks import Folders
from helpers.refusals import refuses
from helpers.tiny_pipelines import ROWS, STEPS, each_row, opened
from torch import Tensor, nn
from torch.testing import assert_close

from fluvial.core.random import fold_in, key, normal
from fluvial.engines.data.records import as_prompts
from fluvial.engines.sampling.generate import Guidance, Requests, Sampling, generate
from fluvial.engines.sampling.solvers import solve
from fluvial.engines.streams import Stream
from fluvial.models.guidance import predict_halves, scale_at
from fluvial.models.handwriting import BASE, Handwriting
from fluvial.models.step_cache import FirstBlockCache, GuidanceCache, NoCache, StepCache, StepCacheChoice

BLOCKS = 4
UNETS = ("sd1", "sd2-v", "sdxl")  # the shapes of their blocks differ


class Block(nn.Module):
    def __init__(self, *, last: bool) -> None:
        super().__init__()
        self.linear, self.last, self.calls = nn.Linear(3, 3), last, 0

    def forward(self, text: Tensor, image: Tensor) -> tuple[Tensor | None, Tensor]:
        self.calls += 1
        image = image + torch.tanh(self.linear(image)) * text.mean()
        return None if self.last else text + 1, image


class Net(nn.Module):
    def __init__(self, blocks: list[nn.Module] | None = None) -> None:
        super().__init__()
        self.parts = nn.ModuleList(blocks or [Block(last=n == BLOCKS - 1) for n in range(BLOCKS)])

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        return list(self.parts)

    def forward(self, x: Tensor) -> Tensor:
        text = torch.ones(len(x), 2, 3)
        for part in self.parts:
            text, x = part(text, x)
        return x

    @property
    def calls(self) -> list[int]:
        return [int(part.calls) for part in self.parts]  # type: ignore[arg-type]


def of(net: Net, threshold: float) -> StepCache:
    return StepCache(net, net, threshold)  # type: ignore[arg-type]


@torch.no_grad()
def test_a_pass_that_hardly_changed_adds_what_the_blocks_added_before() -> None:
    """y = h + (y_k - h_k), with k the last pass that was computed whole; one sample that changed is enough."""
    torch.manual_seed(0)
    net, x = Net(), torch.randn(2, 5, 3)
    cache, near, far = of(net, 0.05), x + 1e-3, x.clone()
    far[1] += 1
    with cache.prediction(exact=False):
        whole = net(x)
    assert net.calls == [1, 1, 1, 1]
    with cache.prediction(exact=False):
        found = net(near)
    assert net.calls == [2, 1, 1, 1]
    head = [net.parts[0](torch.ones(2, 2, 3), at)[1] for at in (x, near)]
    assert_close(found, head[1] + whole - head[0])
    assert not torch.equal(found, whole)
    with cache.prediction(exact=False):
        assert torch.equal(net(far), Net.forward(net, far))
    assert not any("forward" in part.__dict__ for part in net.modules())


@torch.no_grad()
@pytest.mark.parametrize("order", range(4))
def test_a_series_is_that_of_diffusers_own_cache(order: int) -> None:
    """What the blocks add is continued as TaylorSeer does, from passes at any distance that were computed whole."""
    from diffusers.hooks.taylorseer_cache import TaylorSeerState

    torch.manual_seed(0)
    net = Net().double()
    cache, other = StepCache(net, net, 1e6, order), TaylorSeerState(torch.float64, order)  # type: ignore[arg-type]
    for step, exact in enumerate((True, False, True, True, False, False, True, False)):
        x, other.current_step = torch.randn(2, 5, 3, dtype=torch.float64), step
        with cache.prediction(exact=exact):
            end = net(x)
        added = end - net.parts[0](torch.ones(2, 2, 3), x)[1]
        if exact:
            other.update((added,))
        else:
            assert_close(added, other.predict()[0])


@torch.no_grad()
def test_exact_predictions_and_their_passes_are_whole() -> None:
    """Exact ones keep their bits and are what later ones start from; several passes of a prediction are told apart."""
    net, x = Net(), torch.randn(2, 5, 3)
    cache, other = of(net, 0.5), 3 * torch.randn(2, 5, 3)
    with cache.prediction(exact=True):
        first = net(x), net(other)
    with cache.prediction(exact=True):
        again = net(x), net(other)
    assert net.calls == [4] * BLOCKS
    with cache.prediction(exact=False):
        reused = net(x), net(other)
    assert net.calls == [6, 4, 4, 4]
    for a, b, c in zip(first, again, reused, strict=True):
        assert torch.equal(a, b)
        assert_close(c, a, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_other_batches_and_failures() -> None:
    """A batch of another size is computed; a prediction that failed leaves nothing behind."""
    net, x = Net(), torch.randn(2, 5, 3)
    cache = of(net, 0.5)
    with cache.prediction(exact=False):
        net(x)
    with cache.prediction(exact=False):
        net(x[:1])
    assert net.calls == [2, 2, 2, 2]
    with pytest.raises(TypeError), cache.prediction(exact=False):
        net(None)
    assert not any("forward" in part.__dict__ for part in net.modules())


def test_what_cannot_be_left_out_is_refused() -> None:
    net = Net()
    with pytest.raises(ValueError, match="gradients are enabled"), of(net, 0.5).prediction(exact=False):
        pass
    shrinking = Net([Block(last=False), nn.Identity()])
    shrinking.parts[1].forward = lambda text, x: (text, x[:, :2])
    cache = of(shrinking, 0.5)
    with torch.no_grad(), pytest.raises(ValueError, match=r"set rollout.step_cache to none"), cache.prediction(exact=False):
        shrinking(torch.randn(2, 5, 3))


class Counted:
    """A model that counts the rows of its predictions, and the calls of its blocks."""

    def __init__(self, model: Any, module: nn.Module) -> None:
        self.model, self.rows, self.calls = model, 0, 0
        for block in model.blocks(module):
            inner = next(part for part in block.modules() if isinstance(part, nn.Linear))
            inner.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def predict(self, module: nn.Module, x: Tensor, *inputs: Any, **options: Any) -> Tensor:
        self.rows += len(x)
        return self.model.predict(module, x, *inputs, **options)


@each_row
def test_rollouts_leave_out_blocks(name: str, folders: Folders) -> None:
    row = ROWS[name]
    opened_model = opened(name, folders(name))
    module = opened_model.build().eval()
    model: Any = Counted(opened_model, module)
    shape, prompts = model.latent_shape(*row.sizes[0]), (row.prompts[0], row.prompts[1])
    sampling = Sampling(shape, model.schedule(STEPS, shape))
    requests = Requests(as_prompts(prompts), range(2), key(3))

    def made(cache: StepCacheChoice, guidance: Guidance, **changes: Any) -> tuple[Tensor, int]:
        model.calls = 0
        chunks = generate(
            model, module, requests, replace(sampling, guidance=guidance, step_cache=cache, **changes), micro_batch=2
        )
        return torch.cat([chunk.trajectory.final for chunk in chunks]), model.calls

    if name in UNETS:
        refuses(r"set rollout.step_cache to none or guidance", made, FirstBlockCache(1e6), Guidance())
    for guidance in (Guidance(3.0), Guidance(3.0, forwards="two")):
        if guidance.forwards == "two" and name not in UNETS[1:]:
            model.rows = 0
            found, _ = made(GuidanceCache(STEPS), guidance, reuse="outside_blocks")
            assert model.rows == 2 * 2 + 2 * (STEPS - 1)  # both halves of two samples, and then one of each step
            kept = take_over(model, module, requests, replace(sampling, guidance=guidance))
            assert_close(found, kept, rtol=1e-4, atol=1e-4)
        if name in UNETS:
            continue
        expected, whole = made(NoCache(), guidance)
        exact, same = made(FirstBlockCache(1e-12), guidance)
        found, fewer = made(FirstBlockCache(1e6), guidance)
        assert torch.equal(exact, expected)
        assert same == whole
        assert fewer < whole
        assert torch.isfinite(found).all()


@torch.no_grad()
def take_over(model: Any, module: nn.Module, requests: Requests, sampling: Sampling) -> Tensor:
    """Return samples whose steps all take the difference of the halves of the first one: v_i - d + g d."""
    cond, differences = sampling.guidance.encode(model, requests.prompts), list[Tensor]()
    x = normal(fold_in(fold_in(requests.key, torch.arange(2)), Stream.INITIAL), (2, *sampling.shape))

    def velocity(x: Tensor, level: Tensor, step: int) -> Tensor:
        timestep = sampling.schedule.timesteps[step].expand(2)
        options: Any = {"timestep": timestep, "forwards": sampling.guidance.forwards}
        v, v_uncond = predict_halves(model, module, x, level, cond, **options)
        differences.append(v - v_uncond)
        return model.guide(v, v - differences[0], scale_at(model, cond, level, timestep))

    return solve("euler", velocity, x, sampling.schedule, prediction=model.prediction)


@pytest.mark.long
def test_images_of_a_kept_difference_are_near_those_of_whole_steps() -> None:
    """Mean |difference| of pixels at scale 4.5: below a quarter of that to unguided images, and falling with the steps."""
    model = Handwriting(BASE)
    module, requests = model.build().eval(), Requests(as_prompts([f"{i * 3711:04d}" for i in range(3)]), range(3), key(3))

    def images(steps: int, scale: float, cache: StepCacheChoice) -> Tensor:
        shape = model.latent_shape()
        sampling = Sampling(shape, model.schedule(steps, shape), guidance=Guidance(scale), step_cache=cache)
        (chunk,) = generate(model, module, requests, sampling, micro_batch=3)
        return chunk.images

    far = []
    for steps in (10, 20):
        whole = images(steps, 4.5, NoCache())
        unguided, kept = images(steps, 1.0, NoCache()), images(steps, 4.5, GuidanceCache())
        far.append((kept - whole).abs().mean().item())
        assert 0 < 4 * far[-1] < (unguided - whole).abs().mean()
    assert 1.5 * far[1] < far[0]
