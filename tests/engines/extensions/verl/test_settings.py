"""verl's configs: what becomes of each field of its own dataclasses, and settings against verl's and PEFT's own code."""

import copy
import re
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import real_verl, tiny_pipelines, verl_omni_configs, verl_runs
from helpers.marks import long
from torch import nn

from fluvial.engines.engine.config import EngineConfig
from fluvial.engines.engine.world import World
from fluvial.engines.errors import UsageError
from fluvial.engines.extensions import verl
from fluvial.engines.extensions.verl.adapters import Targets, find_layers
from fluvial.engines.extensions.verl.fields import ELSEWHERE, HONOURED, check_unread, get_default
from fluvial.engines.extensions.verl.settings import build_lr_factor, read_settings
from fluvial.engines.gathered import gather
from fluvial.engines.methods.grpo import Grpo
from fluvial.models.lora import find_lora_layers

PAGE = Path(verl.__file__).parent / "fields.md"
REFUSED = "refused unless it has its default"


def list_configs() -> dict[str, list[Any]]:
    """Return the counterpart's dataclasses by part: of verl 0.9.1 and 0.9.0, and verl-omni's."""
    engine = real_verl.part("verl.workers.config.engine").FSDPEngineConfig
    return {
        **{part: [kind] for part, kind in verl_omni_configs.load().items()},
        "engine": [engine, real_verl.other_engine_config()],
        "optim": [real_verl.part("verl.workers.config.optimizer").FSDPOptimizerConfig],
        "checkpoint": [real_verl.part("verl.trainer.config.config").CheckpointConfig],
    }


def list_fields() -> Iterator[tuple[str, Field[Any], str]]:
    """Yield each field with its part and what becomes of it."""
    for part, kinds in list_configs().items():
        found = {field.name: field for kind in reversed(kinds) for field in fields(kind) if field.name[0] != "_"}
        for name, field in found.items():
            fate = "honoured" if name in HONOURED[part] else ELSEWHERE[part].get(name, REFUSED)
            yield part, field, fate


def show(default: Any) -> str:
    return type(default).__name__ if is_dataclass(default) else f"{default!r}"


class Spy:
    """A config that notes which of its fields are read."""

    def __init__(self, config: Any, **parts: "Spy") -> None:
        self.config, self.parts, self.read = config, parts, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return self.parts.get(name) or getattr(self.config, name)


def test_the_page_of_fields_has_every_field_of_the_counterparts_configs() -> None:
    """No cell is empty and no row is of a field that they have not; a failure shows what a new version added."""
    rows = [f"| `{part}.{field.name}` | `{show(get_default(field))}` | {fate} |" for part, field, fate in list_fields()]
    assert [line for line in PAGE.read_text().splitlines() if line.startswith("| `")] == rows
    known = {(part, field.name) for part, field, _ in list_fields()}
    for table in (HONOURED, ELSEWHERE):
        assert {(part, name) for part, names in table.items() for name in names} <= known
    assert not [name for part in HONOURED for name in HONOURED[part] if name in ELSEWHERE[part]]


def test_the_honoured_fields_are_those_that_are_read() -> None:
    """And no others, over a run with LoRA and one without."""
    seen: dict[str, set[str]] = {part: set() for part in HONOURED}
    for model in ({}, verl_runs.LORA):
        config = verl_runs.model_config("sd3", **model)
        parts = {"model.pipeline": Spy(config.pipeline), "model.algo": Spy(config.algo)}
        parts["model"] = Spy(config, pipeline=parts["model.pipeline"], algo=parts["model.algo"])
        parts["engine"], parts["optim"] = Spy(verl_runs.engine_config()), Spy(verl_runs.optimizer_config())
        parts["checkpoint"] = Spy(list_configs()["checkpoint"][0]())
        read_settings(parts["model"], parts["engine"], parts["optim"], parts["checkpoint"], ranks=1)
        config.local_path = None
        parts["model"].path  # noqa: B018  read where there is no local one
        for kind in ("constant", "cosine"):
            parts["optim"].config.lr_scheduler_type = kind
            build_lr_factor(parts["optim"])(1)
        for part, spy in parts.items():
            seen[part] |= spy.read - {"__dataclass_fields__"}
    assert seen == {part: {*names} for part, names in HONOURED.items()}


def test_every_other_field_is_refused_in_one_line() -> None:
    """Also one that a new version adds, whose default passes."""
    for part, field, fate in list_fields():
        if fate != REFUSED:
            continue
        default = get_default(field)
        other = {"enable": True} if field.name == "qat" else {"mode": "R2"} if field.name == "router_replay" else not default
        config = copy.copy(next(kind for kind in list_configs()[part] if field.name in {f.name for f in fields(kind)})())
        check_unread(part, config)
        object.__setattr__(config, field.name, other)
        with pytest.raises(UsageError, match=rf"^{re.escape(f'{part}.{field.name} is ')}.* leave it at .*$"):
            check_unread(part, config)
    newer: Any = make_dataclass("Newer", [("novel", int, 0)], bases=(verl_omni_configs.DiffusionPipelineConfig,))
    check_unread("model.pipeline", newer())
    with pytest.raises(UsageError, match=r"model\.pipeline\.novel is 1, which fluvial does not support: leave it at 0"):
        check_unread("model.pipeline", newer(novel=1))


LORAS: list[dict[str, Any]] = [
    {},
    {"exclude_modules": r".*\.(ff|norm1)\..*|proj_out"},
    {"target_modules": r"transformer_blocks\.1\.attn\.to_(q|k)"},
    {"target_modules": ["to_q", "to_v"], "exclude_modules": r"transformer_blocks\.0\..*"},
    {"target_modules": ["to_q"], "target_parameters": ["attn.to_v.weight", "proj_out.weight"]},
]


@pytest.mark.parametrize("given", [long(given) if number in (0, 3) else given for number, given in enumerate(LORAS)])
def test_adapted_layers_are_pefts(given: dict[str, Any]) -> None:
    """`add_adapter` of diffusers with the settings that verl-omni makes (`lora_adapter_mixin.py`) adapts the same layers."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import BaseTunerLayer

    engine = verl_runs.build("sd3", lora_rank=2, **given)
    theirs: Any = tiny_pipelines.opened("sd3", verl_runs.folder("sd3")).build()
    settings = {"target_modules": "all-linear", "target_parameters": None, "exclude_modules": None, **given}
    theirs.add_adapter(LoraConfig(r=2, bias="none", **settings))
    expected = {name for name, layer in theirs.named_modules() if isinstance(layer, BaseTunerLayer)}
    assert {*find_lora_layers(engine.module)} == expected


def test_a_layer_that_cannot_be_told_apart_is_one_line() -> None:
    """Adapters go by the ends of names: b.a cannot be left out if a is adapted."""
    module = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.ModuleDict({"a": nn.Linear(1, 1)})})
    with pytest.raises(UsageError, match=r"exclude_modules excludes b\.a, whose name ends with a: exclude both"):
        find_layers(module, Targets("all-linear", "b.a"))
    assert find_layers(module, Targets("all-linear", "a")) == ("b.a",)


OPTIMIZERS: list[dict[str, Any]] = [
    {"weight_decay": 0.1, "betas": (0.5, 0.6)},
    {"override_optimizer_config": {"lr": 3e-3, "betas": [0.5, 0.6], "eps": 1e-6, "weight_decay": 0.3, "fused": True}},
]


@pytest.mark.parametrize("given", [long(OPTIMIZERS[0]), OPTIMIZERS[1]])
def test_a_step_is_that_of_the_optimizer_that_verl_builds(given: dict[str, Any]) -> None:
    build = real_verl.part("verl.workers.config.optimizer").build_optimizer
    config = verl_runs.optimizer_config(**given)
    engine = verl_runs.build("sd3", optimizer=given)
    own = {name: nn.Parameter(p.detach().clone()) for name, p in engine.module.named_parameters()}
    optimizer = build(own.values(), config)
    data = verl_runs.batch(verl_runs.rollout("sd3"))
    for _ in range(2):
        with engine.train_mode():
            engine.forward_backward_batch(data, verl_runs.flow_grpo())
            for name, p in engine.module.named_parameters():
                own[name].grad = None if p.grad is None else p.grad.clone()
            engine.optimizer_step()
        optimizer.step()
    for name, p in engine.module.named_parameters():
        torch.testing.assert_close(p.detach(), own[name].detach(), rtol=0, atol=1e-6)


def test_dtypes_of_adapters_buffers_and_the_computation(world: World) -> None:
    """bfloat16 adapters are trained as such, buffers have their dtype, and float16 scales the loss as our engine does."""
    made = verl_runs.rollout("sd3")
    data = verl_runs.batch(made)
    mixed = {"param_dtype": "fp16", "buffer_dtype": "bf16"}
    half = verl_runs.build("sd3", engine={"mixed_precision": mixed}, optimizer=verl_runs.NEAR)
    assert {buffer.dtype for buffer in half.module.buffers()} == {torch.bfloat16}
    assert half.engine.scale > 1
    own = verl_runs.Own(made, world, sharding=EngineConfig(compute="float16"), buffers=torch.bfloat16)
    own.update(verl_runs.items(made), made.cond, Grpo(clip_low=verl_runs.CLIP, clip_high=verl_runs.CLIP))
    verl_runs.train(half, data)
    own.check_equal(half)
    lora = verl_runs.build("sd3", **verl_runs.LORA, lora_dtype="bf16", policy_state_adapters=("default", "old"))
    held = {name: p for name, p in lora.module.named_parameters() if p.requires_grad}
    assert {p.dtype for p in held.values()} == {torch.bfloat16}
    before = {name: gather(p.detach()).clone() for name, p in held.items()}
    verl_runs.train(lora, data)
    assert any(not torch.equal(gather(p.detach()), before[name]) for name, p in held.items())
    lora.copy_adapter()
    lora.ema_update_adapter(decay=0.5)
    masters = verl_runs.build("sd3", engine={"model_dtype": "bf16"})
    assert {p.dtype for p in masters.module.parameters()} == {torch.bfloat16}
