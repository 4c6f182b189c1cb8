"""Settings in short: a line of words that describes a run, and the single settings of a configuration."""

import ast
import math
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from helpers.objective_rows import GIVEN, TEACHER

from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.methods import HeadGan
from fluvial.engines.methods.table import METHODS
from fluvial.engines.sampling.config import ReadingConfig, RolloutConfig, SamplingConfig, ScoutedGroups
from fluvial.engines.sampling.samplers import Ode, SaSolver, Stochastic
from fluvial.engines.sampling.window import Branches, Candidates, RandomWindow, Splits

SDE = Stochastic(eta=0.5)
# Words of lines that describe a run, and what they set.
WORDS: dict[str, dict[str, Any]] = {
    **{kind: {"sampling.sampler": kind} for kind in ("ode", "cps", "ddim")},
    "dpm": {"sampling.sampler": Ode("dpmpp_2m")},
    "noisy_solver": {"sampling.sampler": SaSolver(0.4)},
    "lora": {"train": "lora"},
    "fast": {"optimizer": OptimizerConfig(lr=0.05)},
    "window": {"sampling.window": RandomWindow(2)},
    "cut": {"sampling.steps": 6, "sampling.window": RandomWindow(2, low=2, high=4)},
    "branches": {"sampling.window": Branches(1, 2), "sampling.group": 8},
    "tree": {"sampling": SamplingConfig(prompts=2, group=8, steps=6, sampler=SDE, window=Splits((0, 1, 2), high=5))},
    "states": {"sampling": SamplingConfig(prompts=2, group=4, steps=6, sampler=SDE, window=Candidates(4))},
    "reading": {"sampling": ReadingConfig(prompts=4)},
    "preferences": {"preferences": GIVEN},
    "photos": {"data.images": ("photos",)},
    "prompts": {"prompts": ("a.txt",)},
    "refilled": {"sampling.groups": "refilled"},
    "scouted": {"sampling.groups": ScoutedGroups(8), "sampling.group": 4, "train": "lora"},
    "truncated": {"correction": "truncate"},
    "taught": {"teacher": (TEACHER,), "match": "velocity_mse"},
    "opposed": {"fake_updates": 1, "gan": HeadGan()},
    "cached": {"rollout.step_cache": "first_block", "sampling.steps": 6},
    "served": {"rollout": RolloutConfig(source="http://127.0.0.1:1")},
    "graphs": {"engine.compile": "reduce-overhead", "correction": "truncate"},
    "keys": {"rollout.reuse": "keys", "correction": "truncate"},
    "merged": {"rollout.reuse": "merged", "correction": "truncate", "train": "lora"},
    "ahead": {"rollout.ahead": 1, "correction": "truncate"},
    "auto": {"engine.micro_batch": "auto"},
    "watched": {"evaluation.stop_when_gamed": 2},
}


def settings_of(line: str) -> dict[str, Any]:
    """Return the changes of a line: a method, then words or field=value, whose value is Python's or text."""
    name, *words = line.split()
    changes: dict[str, Any] = {"method": METHODS[name]()}
    for word in words:
        field, typed, value = word.partition("=")
        changes |= {field: _read(value)} if typed else WORDS[field]
    return changes


def _read(text: str) -> Any:
    try:
        return math.nan if text == "nan" else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def leaves(config: Any, prefix: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return the path and the type of each field of a dataclass that holds no dataclass."""
    types, found = get_type_hints(type(config)), []
    for field in fields(config):
        value = getattr(config, field.name)
        path = (*prefix, field.name)
        found += leaves(value, path) if is_dataclass(value) else [(path, types[field.name])]
    return found
