"""Uses of an engine by verl's workers besides updates: weights, adapters, checkpoints, offload and what is refused."""

import re
import sys
import tomllib
from abc import abstractmethod
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import real_verl, tiny_pipelines, verl_runs
from torch import Tensor

from fluvial.engines.engine.shards import local
from fluvial.engines.errors import UsageError
from fluvial.engines.extensions.verl.settings import build_lr_factor
from fluvial.engines.gathered import gather

ROOT = Path(__file__).parents[4]
TWO = {**verl_runs.LORA, "policy_state_adapters": ("default", "old")}


def weights(engine: Any, **options: Any) -> dict[str, Tensor]:
    return dict(engine.get_per_tensor_param(**options)[0])


def full(engine: Any) -> dict[str, Tensor]:
    return {name: gather(tensor).clone() for name, tensor in engine.module.named_parameters()}


def trained(made: verl_runs.Made, **more: Any) -> Any:
    """Return an engine with LoRA, its adapter `default` changed by one update."""
    engine = verl_runs.build("sd3", **TWO, **more)
    verl_runs.move(engine.module)
    verl_runs.train(engine, verl_runs.batch(made))
    engine.lr_scheduler_step()
    return engine


@pytest.fixture(scope="module")
def made() -> verl_runs.Made:
    return verl_runs.rollout("sd3")


def test_the_entry_point_registers_an_engine_for_each_model_type(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group is verl's, and what it names is what verl's registry then holds, as subclasses of verl's own class.

    verl-omni accepts a distillation teacher with strategy fsdp or fsdp2 alone (engine_workers.py): a vendor chooses ours.
    """
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["verl.plugins"]
    found = [EntryPoint(name, value, "verl.plugins").load() for name, value in group.items()]
    assert [module.BACKEND for module in found] == ["fluvial"]
    choose = base.EngineRegistry.get_engine_cls
    for kind in ("diffusion_model", "diffusion_nft_model", "diffusion_dpo_model"):
        assert issubclass(choose(kind, "fluvial"), base.BaseEngine)
    with pytest.raises(ValueError, match="No engine registered"):
        choose("diffusion_model", "fsdp2")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "fluvial")
    own = choose("diffusion_model", "fluvial")
    assert all(choose("diffusion_model", strategy) is own for strategy in ("fsdp", "fsdp2"))
    # 0.9.0, like 0.10.0.dev, has no `use_no_sync_for_gradient_accumulation`, and synchronises gradients once.
    config = verl_runs.engine_config(kind=real_verl.other_engine_config())
    assert not hasattr(config, "use_no_sync_for_gradient_accumulation")
    assert verl_runs.build("sd3", engine=config).settings.engine.grad_sync == "last"


def test_a_verl_is_refused_by_its_interface_and_not_by_its_version(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And when an engine is made, not when verl is imported, where nobody would see it.

    `verl/workers/engine/base.py` of 0.10.0.dev (commit 1dda039b) is that of 0.9.1 to the byte.
    """
    monkeypatch.setattr("fluvial.engines.extensions.verl.plugin.version", lambda name: "0.10.0.dev0")
    verl_runs.build("sd3", **verl_runs.LORA)
    monkeypatch.setattr(base.BaseEngine, "optimizer_step", lambda self, closure: None)
    monkeypatch.setattr(base.BaseEngine, "copy_adapter", lambda self, source, target: None, raising=False)
    monkeypatch.setattr(base.BaseEngine, "use_adapter", lambda self: None, raising=False)
    monkeypatch.setattr(base.BaseEngine, "warm_up", abstractmethod(lambda self: None), raising=False)
    problem = "optimizer_step has closure; use_adapter has no name; warm_up is new"
    with pytest.raises(UsageError, match=re.escape(f"verl 0.10.0.dev0 is not supported, its engines differ: {problem}")):
        verl_runs.build("sd3", **verl_runs.LORA)


def test_hooks_of_verl_omnis_adapter_choose_what_is_trained(made: verl_runs.Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """`configure_trainable_params` before sharding, and `configure_train_mode` in each pass of training."""
    modes: list[bool] = []

    class Adapter:
        @classmethod
        def peek_class(cls, architecture: str, algorithm: str) -> Any:
            return cls if (architecture, algorithm) == ("StableDiffusion3Pipeline", "flow_grpo") else None

        @classmethod
        def build_scheduler(cls, config: Any) -> Any:
            scheduler = made.model.build_scheduler()
            scheduler.set_timesteps(config.pipeline.num_inference_steps)
            return scheduler

        @classmethod
        def configure_trainable_params(cls, module: torch.nn.Module, config: Any) -> None:
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(name.startswith("transformer_blocks.1.") and config.lora_rank == 0)

        @classmethod
        def configure_train_mode(cls, module: torch.nn.Module) -> None:
            modes.append(module.training)
            module.get_submodule("pos_embed").eval()

    package = ModuleType("verl_omni")
    package.__spec__ = ModuleSpec("verl_omni", None)
    base = ModuleType("verl_omni.pipelines.model_base")
    base.__dict__["DiffusionModelBase"] = Adapter
    for name, module in (("verl_omni", package), ("verl_omni.pipelines", package), (base.__name__, base)):
        monkeypatch.setitem(sys.modules, name, module)
    engine = verl_runs.build("sd3")
    before, sent = full(engine), set(weights(engine))
    seen: list[bool] = []
    engine.module.get_submodule("pos_embed").register_forward_pre_hook(lambda part, given: seen.append(part.training))
    verl_runs.train(engine, verl_runs.batch(made))
    changed = {name for name, tensor in full(engine).items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all(name.startswith("transformer_blocks.1.") for name in changed)
    assert sent == {f"transformer.{name}" for name in made.model.build().state_dict()}
    assert modes == [True, True]
    assert seen == [False, False]
    verl_runs.infer(engine, verl_runs.batch(made))
    assert len(modes) == 2
    lora = verl_runs.build("sd3", **verl_runs.LORA)
    assert all("lora" in name for name, parameter in lora.module.named_parameters() if parameter.requires_grad)


def test_a_rollout_engine_gets_the_base_once_and_then_the_adapter(made: verl_runs.Made) -> None:
    """Names carry the prefix and no trace of PEFT; values are those of the module."""
    engine = trained(made)
    plain = {f"transformer.{name}": tensor for name, tensor in made.model.build().state_dict().items()}
    before = weights(engine)
    assert before.keys() == plain.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in plain.items())
    adapter = weights(engine, base_sync_done=True)
    layers = {f"{part}.{layer}" for part in ("attn", "attn2") for layer in ("to_q", "to_k")}
    expected = {f"transformer.transformer_blocks.0.{layer}.lora_{factor}.weight" for layer in layers for factor in "AB"}
    assert {re.sub(r"\.\d\.", ".0.", name) for name in adapter} == expected
    own = {name.replace(".default.", "."): tensor for name, tensor in full(engine).items() if ".default." in name}
    assert all(torch.equal(tensor, own[name.removeprefix("transformer.")]) for name, tensor in adapter.items())
    old = weights(engine, base_sync_done=True, adapter_name="old")
    assert old.keys() == adapter.keys()
    assert not any(torch.equal(old[name], adapter[name]) for name in old)
    assert weights(engine, base_sync_done=True, adapter_name="reference").keys() == plain.keys()
    settings = engine.get_per_tensor_param(base_sync_done=True)[1]
    assert (settings["r"], settings["lora_alpha"], settings["bias"], settings["lora_dropout"]) == (2, 4, "none", 0.0)
    assert settings["target_modules"] == ["to_k", "to_q"]
    assert {"peft_type", "task_type"} <= settings.keys()
    assert settings["peft_type"].value == "LORA"
    with pytest.raises(UsageError, match="adapter_name is 'ema', expected one of default, old"):
        engine.get_per_tensor_param(adapter_name="ema")


def test_weights_of_full_fine_tuning_and_merged_weights(made: verl_runs.Made) -> None:
    """Both are the plain module's names, in the dtype that is set, and without settings of an adapter."""
    engine = verl_runs.build("sd3", engine={"dtype": "bfloat16"})
    tensors, settings = engine.get_per_tensor_param()
    assert settings is None
    plain = made.model.build().state_dict()
    for name, tensor in tensors:
        assert torch.equal(tensor, plain[name.removeprefix("transformer.")].to(torch.bfloat16))
    merging = verl_runs.build("sd3", lora={"merge": True}, **verl_runs.LORA)
    verl_runs.move(merging.module)
    merged, settings = merging.get_per_tensor_param(base_sync_done=True)
    changed = {name for name, tensor in merged if not torch.equal(tensor, plain[name.removeprefix("transformer.")])}
    assert settings is None
    assert {name.split(".")[-2] for name in changed} == {"to_q", "to_k"}


def test_adapters_are_chosen_copied_and_averaged(made: verl_runs.Made) -> None:
    """disable_adapter is the base; `old` starts as the first policy, is copied to and follows by a moving average."""
    engine = trained(made)

    def log_probs() -> Tensor:
        return verl_runs.infer(engine, verl_runs.batch(made))["log_probs"]

    with engine.disable_adapter():
        torch.testing.assert_close(log_probs(), made.trajectory.log_prob, rtol=0, atol=1e-6)
    with engine.use_adapter("reference"):
        torch.testing.assert_close(log_probs(), made.trajectory.log_prob, rtol=0, atol=1e-6)
    policy = log_probs()
    assert not torch.allclose(policy, made.trajectory.log_prob, atol=1e-6)
    engine.copy_adapter("default", "old")
    with engine.use_adapter("old"):
        assert torch.equal(log_probs(), policy)
    before = weights(engine, base_sync_done=True)
    verl_runs.move(engine.module, seed=5)
    engine.ema_update_adapter("default", "old", 0.75)
    now, old = (weights(engine, base_sync_done=True, adapter_name=name) for name in ("default", "old"))
    for name, tensor in old.items():
        torch.testing.assert_close(tensor, 0.75 * before[name] + 0.25 * now[name])
    with pytest.raises(UsageError, match="there is no adapter teacher"):
        engine.copy_adapter("default", "teacher")
    with pytest.raises(UsageError, match="decay is 2, expected a number from 0 to 1"):
        engine.ema_update_adapter(decay=2)


def test_checkpoints_restore_to_the_bit(made: verl_runs.Made, tmp_path: Path) -> None:
    """Weights, both adapters, the optimizer and the schedule: the next update is the same."""
    contents = real_verl.part("verl.trainer.config.config").CheckpointConfig(save_contents=["model", "hf_model"])
    rate = {"lr_warmup_steps": 4}
    engine = trained(made, optimizer=rate, save=contents)
    for step in (1, 2, 3):
        engine.save_checkpoint(str(tmp_path / f"step{step}"), global_step=step, max_ckpt_to_keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step2", "step3"]
    assert (tmp_path / "step3" / "lora_adapter" / "pytorch_lora_weights.safetensors").is_file()
    again = verl_runs.build("sd3", **TWO, optimizer=rate)
    again.load_checkpoint(str(tmp_path / "step3"), del_local_after_load=False)
    for each in (engine, again):
        verl_runs.train(each, verl_runs.batch(made))
    found = full(again)
    assert all(torch.equal(tensor, found[name]) for name, tensor in full(engine).items())
    assert engine.lr_scheduler_step() == again.lr_scheduler_step() == pytest.approx(2 / 4 * 1e-3)
    again.load_checkpoint(str(tmp_path / "step3"))
    assert not (tmp_path / "step3").exists()
    again.load_checkpoint(None)
    with pytest.raises(UsageError, match="holds no checkpoint of fluvial"):
        again.load_checkpoint(str(tmp_path / "step9"))
    with pytest.raises(UsageError, match="hdfs_path is hdfs://x, expected None"):
        again.save_checkpoint(str(tmp_path / "x"), "hdfs://x")
    other = verl_runs.build("sd3")
    with pytest.raises(UsageError, match="lora"):
        other.load_checkpoint(str(tmp_path / "step2"))


def test_what_lies_on_the_host_comes_back_to_the_bit(made: verl_runs.Made) -> None:
    """Parameters and optimizer state are moved apart, and weights are sent from the host as well."""
    engine = trained(made)
    before = {**full(engine), **{name: tensor.clone() for name, tensor in engine.engine.state().items()}}
    sent = weights(engine, base_sync_done=True)
    engine.move(True, model=True, optimizer=True, grad=True)
    assert all(local(p).untyped_storage().nbytes() == 0 for p in engine.module.parameters())
    assert all(torch.equal(tensor, sent[name]) for name, tensor in weights(engine, base_sync_done=True).items())
    with pytest.raises(ValueError, match="offloaded"):
        engine.infer_batch(verl_runs.batch(made))
    engine.move(False, model=True, optimizer=False, grad=False)
    engine.infer_batch(verl_runs.batch(made))
    with pytest.raises(ValueError, match="offloaded"):
        engine.optimizer_step()
    engine.move(False, model=False, optimizer=True, grad=True)
    after = {**full(engine), **engine.engine.state()}
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    with pytest.raises(UsageError, match="gradients move with the parameters"):
        engine.to("cpu", model=False)
    for parameters in (True, False):
        settings = {"param_offload": parameters, "optimizer_offload": not parameters}
        apart = verl_runs.build("sd3", **TWO, engine=settings)
        assert (apart.is_param_offload_enabled, apart.is_optimizer_offload_enabled) == (parameters, not parameters)


@pytest.mark.parametrize("optimizer", [{}, None])
def test_an_engine_for_inference_has_no_optimizer(made: verl_runs.Made, optimizer: Any) -> None:
    """The reference of full fine-tuning and a teacher; verl-omni passes both an optimizer config and its adapters' names."""
    policies = ("default", "old")
    engine = verl_runs.build("sd3", engine={"forward_only": True}, optimizer=optimizer, policy_state_adapters=policies)
    found = verl_runs.infer(engine, verl_runs.batch(made))["log_probs"]
    torch.testing.assert_close(found, made.trajectory.log_prob, rtol=0, atol=1e-6)
    assert not any(p.requires_grad for p in engine.module.parameters())
    with pytest.raises(UsageError, match="forward_only is set, and optimizer_step needs an optimizer"):
        engine.optimizer_step()
    assert (engine.get_data_parallel_size(), engine.get_data_parallel_rank()) == (1, 0)
    assert engine.is_mp_src_rank_with_outputs()
    # A trainer reads `engine.scheduler.config` of the teacher and of the student, and wants them equal.
    schedulers = [each.scheduler.config for each in (engine, verl_runs.build("sd3"), verl_runs.build("qwen-image"))]
    assert schedulers[0] == schedulers[1] != schedulers[2]


def test_the_learning_rate_is_that_of_verls_own_schedules() -> None:
    functions = real_verl.part("verl.utils.torch_functional")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    rows: list[dict[str, Any]] = [
        {"lr_scheduler_type": "constant", "lr_warmup_steps": 3},
        {"lr_scheduler_type": "constant", "lr_warmup_steps_ratio": 0.2},
        {"lr_scheduler_type": "constant"},
        {"lr_scheduler_type": "cosine", "lr_warmup_steps": 2, "min_lr_ratio": 0.1},
        {"lr_scheduler_type": "cosine", "num_cycles": 1.5, "zero_indexed_step": False},
    ]
    for options in rows:
        config = verl_runs.optimizer_config(**options)
        warmup = config.lr_warmup_steps if config.lr_warmup_steps > 0 else int(config.lr_warmup_steps_ratio * 10)
        if config.lr_scheduler_type == "constant":
            theirs = functions.get_constant_schedule_with_warmup(optimizer, warmup)
        else:
            more = {name: getattr(config, name) for name in ("min_lr_ratio", "num_cycles", "zero_indexed_step")}
            theirs = functions.get_cosine_schedule_with_warmup(optimizer, warmup, 10, **more)
        own = build_lr_factor(config)
        for step in range(12):
            assert own(step) == pytest.approx(theirs.lr_lambdas[0](step), abs=1e-12), options


# Settings of the model, the engine and the optimizer.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "model /nowhere: ": ({"local_path": "/nowhere"}, {}, {}),
    "model mine:Dots: adapter 'mine:Dots' cannot be imported": ({"architecture": "mine:Dots"}, {}, {}),
    "transformer_2 holds no weights: ": ({"transformer_subfolder": "transformer_2"}, {}, {}),
    "engine.mixed_precision has cast": ({}, {"mixed_precision": {"cast": True}}, {}),
    "engine.mixed_precision.reduce_dtype is 'fp16', expected one of fp32": (
        {},
        {"mixed_precision": {"reduce_dtype": "fp16"}},
        {},
    ),
    "model.algo.sde_type is 'ddim', and the model predicts velocity: set sde or cps or dance_sde": (
        {"sde_type": "ddim"},
        {},
        {},
    ),
    "model.pipeline.guidance_scale is 2 and true_cfg_scale is 3": ({"scale": 2.0, "true": 3.0}, {}, {}),
    "model.algo.sde_type is 'ode', expected one of 'sde', 'cps', 'dance_sde'": ({"sde_type": "ode"}, {}, {}),
    "eta is 1.5": ({"sde_type": "cps", "noise_level": 1.5}, {}, {}),
    "model.target_modules is None, expected all-linear": ({"lora_rank": 2, "target_modules": None}, {}, {}),
    "name pos_embed.proj, a Conv2d": ({"lora_rank": 2, "target_modules": ".*proj"}, {}, {}),
    "no linear layer is left": ({"lora_rank": 2, "exclude_modules": ".*"}, {}, {}),
    "no parameter's name ends in to_z.weight": ({"lora_rank": 2, "target_parameters": ["to_z.weight"]}, {}, {}),
    "name transformer_blocks.0.attn.to_q.bias, a parameter": ({"lora_rank": 2, "target_parameters": ["to_q.bias"]}, {}, {}),
    "model.lora has rank, expected only merge": ({"lora": {"rank": 3}}, {}, {}),
    "model.lora_dtype is 'fp16', expected one of fp32": ({"lora_rank": 2, "lora_dtype": "fp16"}, {}, {}),
    "no layer's name ends in to_z": ({"lora_rank": 2, "target_modules": ["to_z"]}, {}, {}),
    "which need LoRA: set model.lora_rank": ({"policy_state_adapters": ("default", "old")}, {}, {}),
    "expected a divisor of the 1 ranks": ({}, {"ulysses_sequence_parallel_size": 2}, {}),
    "engine.mixed_precision.param_dtype is 'fp8'": ({}, {"mixed_precision": {"param_dtype": "fp8"}}, {}),
    "optim.optimizer_impl and optimizer are torch.optim.Lion, expected one of torch.optim.AdamW": (
        {},
        {},
        {"optimizer": "Lion"},
    ),
    "override_optimizer_config has amsgrad True, expected False": ({}, {}, {"override_optimizer_config": {"amsgrad": True}}),
    "override_optimizer_config has rho 1, expected only betas": ({}, {}, {"override_optimizer_config": {"rho": 1}}),
    "total_training_steps is -1": ({}, {}, {"lr_scheduler_type": "cosine", "total_training_steps": -1}),
}


def test_settings_that_have_no_meaning_here_are_one_line(
    made: verl_runs.Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also several frames of a model of images, two networks by noise level, and, on an NPU, that verl finds the engine."""

    def refused(says: str, **settings: Any) -> None:
        with pytest.raises(UsageError, match=re.escape(says)) as error:
            verl_runs.infer(verl_runs.build(settings.pop("name", "sd3"), **settings), verl_runs.batch(made))
        assert "\n" not in str(error.value)

    for says, (model, engine, optimizer) in REFUSED.items():
        refused(says, **model, engine=engine, optimizer=optimizer)
    refused("the optimizer config is missing", optimizer=None)
    refused("model.pipeline: frames is 5", frames=5)
    experts = tiny_pipelines.save(tiny_pipelines.ROWS["wan-experts"], tmp_path / "experts")
    refused("trains transformer, transformer_2: leave it out", path=experts, transformer_subfolder="transformer_2")
    npu = SimpleNamespace(device_name="npu", vendor_name="huawei")
    monkeypatch.setattr(real_verl.part("verl.utils.device"), "get_platform", lambda: npu)
    refused("verl found the device 'npu', and fluvial supports only cuda and cpu")
