"""How a rollout makes its samples."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.gaussian import Form, Reduction
from fluvial.core.transitions import Sampler
from fluvial.engines.rollout.after import AfterWindow
from fluvial.engines.rollout.generate import Guidance, deterministic_step
from fluvial.engines.rollout.samplers import SamplerRule, sampler_name, sampler_rule
from fluvial.engines.rollout.serving import ServersConfig
from fluvial.engines.rollout.solvers import Solver
from fluvial.engines.rollout.window import WindowDraw, WindowMoves
from fluvial.models import Prediction

REPLAYED = "replayed:"  # first letters of a source of stored rollouts


@dataclass(frozen=True)
class RolloutConfig:
    """How samples are made, and which of their steps are recorded for objectives that train on steps.

    Args:
        prompts: Number of prompts per rollout.
        group: Number of samples per prompt; each is compared with the others of its group.
        shared_noise: The samples of a group start from the same noise (DanceGRPO, arXiv 2505.07818), so that only the noise
            of their steps tells them apart.
        share_prefix: Compute the steps before the window once per group: its samples start from the same noise, and take
            the same deterministic steps until the window begins (as in BranchGRPO, arXiv 2509.06040).
        branches: Number of samples that differ in the noise of a single window, and are compared with each other
            (TempFlow-GRPO, arXiv 2508.04324): a group consists of trunks, each with an initial noise of its own and
            `branches` samples at every place of the window. None compares a sample with all others of its group.
        steps: Number of steps of the schedule, in training and in evaluation.
        sampler: Name of the sampler: flow_sde (Flow-GRPO, arXiv 2505.05470), dance_sde (DanceGRPO, 2505.07818), cps
            (Flow-CPS, 2509.05952), ddim (DDPO, 2305.13301, for models that predict epsilon), wan_sde (Flow-GRPO for Wan,
            with eta 1), ode (no noise; DDIM with eta 0 for models that predict epsilon), or a function as module:name.
        eta: Scale of the sampler's noise, without a unit; 0 with ode unless the solver is sa_solver, else above 0.
        solver: Solver of the ODE: euler, dpmpp_2m (DPM-Solver++ 2M, arXiv 2211.01095), unipc (UniPC, 2302.04867) or
            sa_solver (SA-Solver, 2309.05019, which takes noise of scale eta at levels from 0.3 to 0.9, as in AWM's code).
        window: Number of contiguous stochastic steps, placed at random and trained on; the other steps are ODE steps
            (Flow-GRPO-Fast; MixGRPO, arXiv 2507.21802). None makes every step of the range stochastic.
        contiguous: Whether the stochastic steps of a window are contiguous. If not, they are drawn one by one from the range
            of the window (Flow-Factory, UniRL).
        window_draw: How often the place of the window is drawn: per rollout (the same for all samples), call (for the
            `micro_batch` samples that are generated together, as in Flow-GRPO-Fast's code), sample
            (verl-omni) or run (once per group, and kept for the whole run; an older Flow-GRPO-Fast draws it once per GPU).
        moves: How the window moves as training goes on, instead of being placed at random.
        after: How the deterministic steps after the window are taken.
        window_low: Index of the first step that the window may cover.
        window_high: Index after the last step that the window may cover; None is the end of the schedule.
        fraction: Fraction of the recorded steps that is trained on; their number is rounded down, and at least 1.
        pick: Which of the recorded steps those are: random (drawn per sample and rollout, as in DanceGRPO) or first (the
            noisiest, as in Flow-GRPO, whose last step takes noise and is not trained on).
        form: Form of the log-probability: density, no_const (without its constant) or unscaled (negative squared error).
        reduction: Reduction of the log-probability over pixels: mean (nats per dimension, the unit of the clip range) or
            sum (nats).
        guidance: Classifier-free guidance of every step, the same in rollout, update and evaluation.
        reuse_prompt: Compute layers that see the prompt alone (projections of its embedding, keys and values of
            cross-attention) once per rollout instead of at every step; the bits stay, and their results take memory.
        step_cache: Let deterministic steps leave out the blocks after the first where the output of that one has changed by
            less than this fraction since an earlier step (first-block cache, after TeaCache, arXiv 2411.19108); about 0.1.
            Stochastic steps, which are trained on, are computed whole. Samples then depend on those they are generated with.
            0 computes every block.
        autocast: Compute the rollout in bfloat16 where torch's autocast does; its numbers then differ from the update's.
        source: Where samples are made: empty (in the trainer's process), the addresses of servers with commas between them
            (http://HOST:PORT,http://HOST:PORT, each `fluvial serve` or each sglang's diffusion server), or replayed:FOLDER
            (they are read from a folder of stored rollouts, of a run with the same seed, prompts and sampling).
        servers: How these servers are asked.
        store: Folder that every rollout is written to, for replayed:FOLDER: images, recorded steps, log-probabilities, and
            the version of the weights; None writes none.
    """

    prompts: int = 8
    group: int = 16
    shared_noise: bool = False
    share_prefix: bool = False
    branches: int | None = None
    steps: int = 10
    sampler: Any = "flow_sde"  # a name, a function or a SamplerRule: see `rollout.samplers`
    eta: float = 0.8
    solver: Solver = "euler"
    window: int | None = None
    contiguous: bool = True
    window_draw: WindowDraw = "rollout"
    moves: WindowMoves = field(default_factory=WindowMoves)
    after: AfterWindow = field(default_factory=AfterWindow)
    window_low: int = 0
    window_high: int | None = None
    fraction: float = 1.0
    pick: Literal["random", "first"] = "random"
    form: Form = "density"
    reduction: Reduction = "mean"
    guidance: Guidance = field(default_factory=Guidance)
    reuse_prompt: bool = True
    step_cache: float = 0.0
    autocast: bool = False
    source: str = ""
    servers: ServersConfig = field(default_factory=ServersConfig)
    store: Path | None = None

    def __post_init__(self) -> None:
        count = (1, 2**31)
        check_fields(
            self,
            prompts=count,
            group=count,
            branches=(2, 2**31),
            steps=count,
            eta=(0, math.inf),
            fraction=(1e-6, 1),
            step_cache=(0, 1),
        )
        rule, name = self.rule, self.sampler_name
        if self.is_deterministic and self.eta > 0 and self.solver != "sa_solver":
            raise ValueError(f"rollout.eta is {self.eta:g}, and {name} takes no noise: use eta 0, or another sampler")
        if not self.is_deterministic and self.eta == 0:
            raise ValueError(
                f"rollout.eta is 0, so every step of {name} is deterministic and has no density: use eta > 0, or sampler "
                "ode for an objective that needs no density"
            )
        if self.eta > rule.max_eta and self.solver != "sa_solver":
            raise ValueError(f"rollout.eta is {self.eta}, expected at most {rule.max_eta:g} for {name}")
        if self.solver != "euler" and self.sampler != "ode":
            raise ValueError(
                f"rollout.solver is {self.solver}, which solves the ODE, and rollout.sampler is {name}: use sampler ode"
            )
        if self.shared_noise and self.is_deterministic and not self.eta and self.group > 1:
            raise ValueError(
                f"rollout.shared_noise is set, and {name} takes no noise, so all samples of a group would be the same: use "
                "another sampler"
            )
        self._check_prefix()
        if not self.contiguous and self.window is None:
            raise ValueError(
                "rollout.contiguous is False, and rollout.window is None: set the number of stochastic steps as window"
            )
        self._check_draw()
        low, high = self.window_range
        if not 0 <= low < high <= self.steps or not 1 <= self.window_size <= high - low:
            raise ValueError(
                f"rollout.window: a window of {self.window_size} steps does not fit steps {low} to {high} of {self.steps}: "
                "expected 0 <= window_low < window_high <= steps, and 1 <= window <= window_high - window_low"
            )
        self._check_branches()
        self._check_source()
        if self.step_cache and (self.is_deterministic or self.window_size == self.steps):
            raise ValueError(
                "rollout.step_cache is set, which is for the deterministic steps beside a window, and there are none: set "
                "rollout.window and a sampler that takes noise, or rollout.step_cache 0"
            )
        if self.after != AfterWindow() and (self.is_deterministic or self.windows_differ):
            raise ValueError(
                "rollout.after is set, and samples have no window, or windows of their own: use a sampler that takes "
                "noise, and one window per rollout"
            )

    def _check_draw(self) -> None:
        """Raise ValueError where the window's draw or its moves do nothing."""
        moves = self.moves.every > 0
        for name, given in (("window_draw", self.window_draw != "rollout"), ("moves", moves)):
            if given and self.window is None:
                raise ValueError(f"rollout.{name} is set, and rollout.window is None: set the number of stochastic steps")
            if given and self.window_range[1] - self.window_low == self.window:
                raise ValueError(
                    f"rollout.{name} is set, and rollout.window covers its whole range, so that it has one place: leave it"
                )
        if moves and (self.window_draw != "rollout" or not self.contiguous):
            raise ValueError(
                "rollout.moves is set, so that the window is not drawn: leave rollout.window_draw and contiguous as they are"
            )

    def _check_branches(self) -> None:
        """Raise ValueError unless a group is divided into trunks of branches at every place of the window."""
        if self.branches is None:
            return
        if self.window is None or self.is_deterministic:
            raise ValueError(
                "rollout.branches is set, and samples have no window in which they differ: set rollout.window, and a "
                "sampler that takes noise"
            )
        drawn = self.window_draw != "rollout" or not self.contiguous or self.moves.every > 0
        if drawn or self.shared_noise or self.share_prefix:
            raise ValueError(
                "rollout.branches is set, which places the windows and shares the initial noise of a trunk: leave "
                "rollout.window_draw, contiguous, moves, shared_noise and share_prefix as they are"
            )
        if self.group % self.trunk:
            raise ValueError(
                f"rollout.group is {self.group}, expected a multiple of {self.trunk}: rollout.branches = {self.branches} "
                f"samples at each of the {self.trunk // self.branches} places of the window"
            )

    def _check_source(self) -> None:
        """Raise ValueError unless samples can come from the source, and be stored."""
        replayed = self.source.startswith(REPLAYED) and self.source != REPLAYED
        if self.source and not replayed and not self.is_served:
            raise ValueError(
                f"rollout.source is {self.source!r}, expected addresses of servers with commas between them "
                f"(http://HOST:PORT), {REPLAYED}FOLDER, or nothing to make samples in the trainer's process"
            )
        if self.servers != ServersConfig() and not self.is_served:
            raise ValueError("rollout.servers is set, and rollout.source names no servers: leave it as it is")
        if self.source.startswith(REPLAYED) and self.store is not None:
            raise ValueError(
                f"rollout.store is set, and rollout.source is {self.source}, whose rollouts are stored already: leave "
                "rollout.store"
            )

    def _check_prefix(self) -> None:
        """Raise ValueError if there is no prefix that a group could share."""
        if not self.share_prefix:
            return
        if self.is_deterministic:
            raise ValueError(
                f"rollout.share_prefix is set, and {self.sampler_name} takes no noise, so all samples of a group would be "
                "the same: use another sampler"
            )
        if self.window_low < 1:
            raise ValueError(
                "rollout.share_prefix is set, and the stochastic steps may begin at step 0, before which there is nothing "
                "to share: set rollout.window_low to 1 or more"
            )
        if self.group < 2:
            raise ValueError("rollout.share_prefix is set, and rollout.group is 1: use groups of 2 samples or more")

    @cached_property
    def rule(self) -> SamplerRule:
        """What a run must know of the sampler."""
        return sampler_rule(self.sampler)

    @property
    def sampler_name(self) -> str:
        """The sampler's name, in messages and records."""
        return sampler_name(self.sampler)

    @property
    def is_served(self) -> bool:
        """Whether servers make the samples."""
        urls = self.source.split(",")
        return all(url.startswith(("http://", "https://")) for url in urls)

    @property
    def is_deterministic(self) -> bool:
        """Whether the sampler takes no noise."""
        return self.rule.max_eta == 0

    @property
    def window_range(self) -> tuple[int, int]:
        """The first step that a window may cover, and the one after the last."""
        return self.window_low, self.steps if self.window_high is None else self.window_high

    @property
    def window_size(self) -> int:
        """Number of steps of a window."""
        low, high = self.window_range
        return high - low if self.window is None else self.window

    @property
    def may_be_last_alone(self) -> bool:
        """Whether a window may be the last step of the schedule and nothing else."""
        return self.window_size == 1 and self.window_range[1] == self.steps

    @property
    def trunk(self) -> int:
        """Number of consecutive samples that start from the same noise, where any do."""
        if self.branches is None:
            return self.group
        low, high = self.window_range
        return self.branches * (high - low - self.window_size + 1)

    @property
    def compared(self) -> int:
        """Number of consecutive samples that are compared with each other."""
        return self.branches or self.group

    @property
    def windows_differ(self) -> bool:
        """Whether the samples of a rollout may have different windows."""
        return self.window_draw != "rollout" or self.branches is not None

    @property
    def batch(self) -> int:
        """Number of samples per rollout."""
        return self.prompts * self.group

    def trained_of(self, recorded: int) -> int:
        """Return how many of a number of recorded steps are trained on."""
        return max(math.floor(self.fraction * recorded + 1e-9), 1)  # 0.6 x 15 is 8.999... in floating point

    def bound_sampler(self, levels: Tensor, prediction: Prediction = "velocity") -> Sampler:
        """Return the sampler with its hyper-parameters bound.

        Args:
            levels: T+1 noise levels of the schedule.
            prediction: what the model predicts.
        """
        if self.sampler == "ode":
            return deterministic_step(prediction)
        return self.rule.bind(self.eta, levels)
