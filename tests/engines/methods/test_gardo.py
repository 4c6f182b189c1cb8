"""GARDO in a run: whose KL counts, when the policy becomes the reference, and what a checkpoint holds."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers.spied_runs import FAST, STEPS, Spied
from helpers.tables import normals
from torch import Tensor
from torch.testing import assert_close

from fluvial.core.gardo import diverse_advantages, doubt_gate, rank_doubt
from fluvial.core.transitions import flow_sde
from fluvial.engines.engine.world import World
from fluvial.engines.methods import Doubt, Gardo, StepKLConfig

NEVER: dict[str, Any] = {"reset_kl": 1e9, "reset_after": 10**6}
TWO = ("brightness", "contrast")


FILLED = torch.empty(8, 3)


def red(images: Tensor, prompts: list[str]) -> Tensor:
    """Return the first pixels of each image, in one buffer for all calls."""
    return FILLED[: len(images)].copy_(images.flatten(1)[:, :3])


def run(folder: Path, one: World, method: Any, **changes: Any) -> Spied:
    changes = {"sampling": STEPS, "rewards": TWO, "train": "lora", "optimizer": FAST, "engine.micro_batch": 8, **changes}
    return Spied(tiny.config(folder, method=method, **changes), one)


@pytest.mark.long
@pytest.mark.parametrize("features", ["thumbnails", "test_gardo:red"])
def test_the_chosen_samples_share_the_kl(one: World, tmp_path: Path, features: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mean is that of the chosen; the first reward alone makes the advantages, which are larger for distant samples."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    gardo = Gardo(gate=Doubt(share=0.2, most=0.5), features=features, kl=StepKLConfig(2.0), **NEVER)
    spied = run(tmp_path, one, gardo, **{"engine.micro_batch": 4})
    record, items = spied.rollout(), spied.updates[0].items
    images = tiny.Tiny().decode(spied.trajectories[0].final)
    drawn, group = red(images, []) if features != "thumbnails" else images.flatten(1), torch.arange(8) // 4
    expected = diverse_advantages(spied.scores[:, 0], drawn, group)
    torch.testing.assert_close(items.signal[:8], expected.clamp(-5, 5))
    gate = doubt_gate(rank_doubt(spied.scores[:, 0], spied.scores[:, 1:]), share=0.2)
    assert 0 < float(gate.sum()) < 8
    torch.testing.assert_close(items.context[:8], gate / gate.mean())
    assert record["gate"]["share"] == pytest.approx(float(gate.mean()))


def test_a_reward_of_negative_weight_is_climbed_downwards(one: World, tmp_path: Path) -> None:
    """Of the weight the sign alone counts."""
    spied = run(tmp_path, one, Gardo(gate=Doubt(share=0.2, most=0.5), **NEVER), rewards=("brightness=-3", "contrast"))
    spied.rollout()
    features = tiny.Tiny().decode(spied.trajectories[0].final).flatten(1)
    expected = diverse_advantages(-spied.scores[:, 0], features, torch.arange(8) // 4)
    torch.testing.assert_close(spied.updates[0].items.signal[:8], expected.clamp(-5, 5))


@pytest.mark.long
@pytest.mark.parametrize(
    ("limits", "resets"),
    [({"reset_after": 2, "reset_kl": 1e9}, [False, False, True, False]), ({"reset_kl": 0.0}, [False, True, False, True])],
)
def test_when_the_policy_becomes_the_reference(
    one: World, tmp_path: Path, limits: dict[str, Any], resets: list[bool]
) -> None:
    """After so many batches, or where the KL of an update was above the limit; then the next KL is 0."""
    spied = run(tmp_path, one, Gardo(**limits), updates=5)
    ages = []
    for _ in range(4):
        spied.rollout()
        ages.append(spied.trainer.run.state["age"][0])
    spied.rollout()
    assert [age == 0 for age in ages] == resets
    assert [info.mean["kl_ref"] == 0 for info in spied.infos[1:]] == resets


def test_the_kl_that_is_compared_with_the_limit_is_that_of_the_loss() -> None:
    """Both are over the rate r = eta sqrt(s / (1 - s)), as in tinnerhrhe/GARDO (scripts/train_sd3_grpo_gardo.py)."""
    x, v, v_ref, x_next = normals(3, 4, 2, 3, 5)
    s, s_next, share = (torch.tensor(pair).double() for pair in ([0.8, 0.4], [0.7, 0.25], [0.0, 2.0]))
    step, rate = flow_sde(s, s_next, eta=0.7, sigma_max=0.9), 0.7 * (s / (1 - s)).sqrt()
    assert_close(step.std, rate * (s - s_next).sqrt())
    rows: Any = SimpleNamespace(transition=step, x=x, x_next=x_next, dt=s_next - s, context=share)
    rows.predictions, rows.log_prob_old, rows.signal = {"ref": v_ref}, torch.zeros(2).double(), torch.zeros(2).double()
    loss, info = Gardo(kl=StepKLConfig(3.0)).loss(v, rows)
    want = share * ((step.b.view(-1, 1, 1) * (v - v_ref)) ** 2).mean((1, 2)) / (2 * rate**2)
    assert_close(info.kl_ref, want)
    assert_close(loss, 3 * want)


def test_the_share_follows_the_doubt_of_the_last_batches() -> None:
    """Up where it is larger than all of these, down where it is smaller, within bounds."""
    gate, state = Doubt(share=0.1, window=2, most=0.115), dict[str, list[float]]()
    far, near = (torch.tensor([[3.0, 2.0, 1.0], other]).T for other in ([1.0, 2.0, 3.0], [2.0, 3.0, 1.0]))
    shares = []
    for scores in (near, far, far, near, near, near):
        gate.choose(state, scores)
        shares.append(state["share"][0])
    assert shares == pytest.approx([0.1, 0.11, 0.11, 0.099, 0.099, 0.099])
    assert len(state["doubt"]) == 2
    gate.choose(state, far)
    gate.choose({**state, "doubt": [0.0]}, far)
    assert gate.choose({"share": [0.11], "doubt": [0.0]}, far).tolist() == [1, 0, 0]
    bounded = {"share": [0.11], "doubt": [0.0]}
    gate.choose(bounded, far)
    assert bounded["share"] == [0.115]


@pytest.mark.long
def test_an_update_that_fails_leaves_the_state_before_it(one: World, tmp_path: Path) -> None:
    """Which is what a checkpoint that is written then holds."""
    spied = run(tmp_path, one, Gardo(gate=Doubt()), updates=2)
    spied.rollout()
    known = {name: [*values] for name, values in spied.trainer.run.state.items()}

    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("out of memory")

    spied.trainer.engine.update = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        spied.rollout()
    assert spied.trainer.run.state["doubt"] != known["doubt"]
    assert spied.trainer.finished[1].state == known
