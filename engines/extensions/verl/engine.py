"""Engine for verl's workers: verl's `BaseEngine` interface over fluvial's engine.

This module does not import verl; `plugin` combines its class with verl's.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fluvial.engines.engine.config import DTYPES
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.module import ShardedModule
from fluvial.engines.engine.shards import local
from fluvial.engines.engine.world import World
from fluvial.engines.errors import UsageError, convert_errors
from fluvial.engines.export.model_folder import export, list_base_tensors, write_lora
from fluvial.engines.extensions.verl.adapters import add_adapters
from fluvial.engines.extensions.verl.algorithms import Algorithm
from fluvial.engines.extensions.verl.batch import BatchFields
from fluvial.engines.extensions.verl.denoiser import Denoiser
from fluvial.engines.extensions.verl.passes import BatchPasses, LossFunction
from fluvial.engines.extensions.verl.settings import Settings, build_lr_factor, read_settings
from fluvial.engines.gathered import gather, gather_weights
from fluvial.engines.offload import HostOffload
from fluvial.engines.run.checkpoint import checkpoint
from fluvial.models.device import find_default_device, is_accelerator, use_deterministic_algorithms
from fluvial.models.lora import blend_adapter, copy_adapter, use_adapter

REFERENCE = "reference"  # verl-omni's name of the base model without adapters
PARAMETERS, OPTIMIZER, GRADIENTS = "parameters", "optimizer", "gradients"


class VerlEngine:
    """Diffusion model with the interface of verl's engines.

    verl's process group must be initialised. Every rank must call every method.

    Args:
        model_config, engine_config, optimizer_config, checkpoint_config: see `settings.read_settings`.

    Raises:
        UsageError: a field of a config is not supported.
    """

    algorithm: ClassVar[Algorithm]
    # verl's context that moves an engine between host and device, and its function that gathers metrics.
    context: ClassVar[Callable[..., AbstractContextManager[None]]]
    append: ClassVar[Callable[[dict[str, Any], dict[str, Any]], None]]
    # Returns verl-omni's adapter for a model config, or None. Its hooks choose the trained parameters.
    hooks: ClassVar[Callable[[Any], Any]]

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        world = _join_world()
        self.settings: Settings = read_settings(
            model_config, engine_config, optimizer_config, checkpoint_config, ranks=world.size
        )
        self.algorithm.check(self.settings)
        self.world, self.mode = world.group_ranks(self.settings.engine.context_parallel), None
        self._group = dist.group.WORLD
        if self.world.sequence > 1:
            mesh = self.world.new_mesh((self.world.data_size, self.world.sequence), ("data", "sequence"))
            self._group = mesh["data"].get_group()
        self.sharded: ShardedModule | None = None
        self.engine: Engine | None = None
        self.rounds = 0  # number of calls of `lr_scheduler_step`
        self._saved: list[Path] = []  # folders of this engine's checkpoints
        self._on_host: set[str] = set()  # offloaded parts

    def initialize(self) -> None:
        """Build the network, its adapters, the optimizer and the schedule, sharded over the ranks."""
        settings = self.settings
        hooks = type(self).hooks(self.model_config)
        scheduler = None if hooks is None else hooks.build_scheduler(self.model_config)
        self.denoiser = Denoiser(settings, self.world.device, scheduler)
        model = self.denoiser.model
        module = model.build(empty=model.weights is not None)
        if settings.lora is not None:
            options: dict[str, Any] = {"adapters": settings.adapters, "dtype": settings.adapter_dtype, "seed": settings.seed}
            with convert_errors(UsageError, ValueError, says="model"):
                add_adapters(module, settings.lora, settings.targets, **options)
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(DTYPES[settings.buffers])
        if hooks is not None and settings.lora is None:
            hooks.configure_trainable_params(module, self.model_config)
        self._configure: Callable[[nn.Module], None] = (lambda module: None) if hooks is None else hooks.configure_train_mode
        blocks = model.blocks(module)
        if settings.optimizer is None:
            module.requires_grad_(False)
            self.sharded = ShardedModule(module, blocks, self.world, settings.engine, weights=model.weights)
        else:
            self.engine = Engine(
                module, blocks, settings.optimizer, self.world, sharding=settings.engine, weights=model.weights
            )
            self.sharded = self.engine.sharded
            factor, self.rounds = build_lr_factor(self.optimizer_config), 0
            self.engine.lr_factor = lambda updates: factor(self.rounds)  # verl's schedule counts rounds, not updates
        self._gradients, self._on_host = HostOffload(self.world.device), set()
        self.to("cpu", settings.offloads_parameters, settings.offloads_optimizer, settings.offloads_parameters)

    @property
    def module(self) -> nn.Module:
        """The sharded network."""
        return self._require_sharded().module

    @property
    def scheduler(self) -> Any:
        """diffusers' scheduler of the pipeline; verl-omni compares the `config` of teacher and student."""
        return self.denoiser.scheduler

    @property
    def is_param_offload_enabled(self) -> bool:
        """Whether the parameters are on the host between phases."""
        return self.settings.offloads_parameters

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        """Whether the optimizer state is on the host between phases."""
        return self.settings.offloads_optimizer

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Return whether this rank's outputs are collected, which is true for the first of the ranks that share a sample."""
        return self.world.rank % self.world.sequence == 0

    def get_data_parallel_size(self) -> int:
        """Return the number of data-parallel ranks; ranks that share samples count as one."""
        return self.world.data_size

    def get_data_parallel_rank(self) -> int:
        """Return the data-parallel index of this rank."""
        return self.world.data_rank

    def get_data_parallel_group(self) -> Any:
        """Return the data-parallel process group of this rank."""
        return self._group

    @contextmanager
    def train_mode(self, **options: Any) -> Iterator[None]:
        """Keep the engine on the device in the context; gradients are cleared at its end."""
        with type(self).context(self, "train", **options):
            try:
                yield
            finally:
                self.optimizer_zero_grad()

    def eval_mode(self, **options: Any) -> AbstractContextManager[None]:
        """Return a context in which the parameters are on the device."""
        return type(self).context(self, "eval", **options)

    def optimizer_zero_grad(self) -> None:
        """Clear the gradients."""
        if self.engine is not None:
            self.engine.optimizer.zero_grad()

    def forward_backward_batch(
        self, data: Any, loss_function: LossFunction | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Return the outputs of a batch, its losses and metrics; unless `forward_only`, also add the gradients of the loss.

        Args:
            data: TensorDict of B samples in verl-omni's field names. `micro_batch_size_per_gpu` is the number of items
                (pairs of sample and step) per forward pass.
            loss_function: function of (model_output, data, dp_group), which returns a loss divided by
                `data["gradient_accumulation_steps"]`, and metrics. It may be None with `forward_only`.
            forward_only: skip the backward pass; the network is in evaluation mode.

        Raises:
            UsageError: a field is missing or has a wrong shape, or the loss function's result has another form.
        """
        if loss_function is None and not forward_only:
            raise UsageError("loss_function is None, expected a function, or forward_only")
        fields = BatchFields(data)
        denoiser = self.denoiser.fit(fields)
        size = fields.read_plain("micro_batch_size_per_gpu", self.settings.micro_batches[forward_only])
        if size is None:
            raise UsageError("micro_batch_size_per_gpu is not set, neither in the batch nor in the engine config")
        passes = BatchPasses(
            self.algorithm.read_batch(denoiser, fields, loss_function is not None),
            self.algorithm,
            denoiser,
            self.world,
            micro_batch=int(size),
            loss_function=loss_function,
            group=self._group,
            append=type(self).append,
        )
        with use_deterministic_algorithms(self.settings.engine.deterministic):
            if forward_only:
                return passes.infer(self._require_sharded())
            return passes.train(self._require_engine("a backward pass"), self._configure)

    def optimizer_step(self) -> float:
        """Take an optimizer step, unless the gradient is not finite, and return its norm before clipping."""
        return self._require_engine("optimizer_step").step().grad_norm

    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one round, and return the learning rate of the next updates."""
        engine = self._require_engine("lr_scheduler_step")
        self.rounds += 1
        return engine.config.lr * engine.lr_factor(engine.updates)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move parameters, optimizer state and gradients to the host or to the engine's device.

        Args:
            device: "cpu", or the type of the engine's device. No effect if the engine computes on the CPU.
            model, optimizer, grad: parts to move.
        """
        if grad and not model:
            raise UsageError("to(grad=True, model=False): gradients move with the parameters, set both")
        if (here := self.world.device.type) != "cpu":
            if device not in ("cpu", here):
                raise UsageError(f"to({device!r}): expected 'cpu' or {here!r}")
            self.move(device == "cpu", model=model, optimizer=optimizer, grad=grad)

    def move(self, to_host: bool, *, model: bool, optimizer: bool, grad: bool) -> None:
        """Move parameters, optimizer state or gradients to the host or back, except those that are there already."""
        sharded, engine = self._require_sharded(), self.engine
        parts = {PARAMETERS: model, OPTIMIZER: optimizer and engine is not None, GRADIENTS: grad and engine is not None}
        for part, is_wanted in parts.items():
            if not is_wanted or (part in self._on_host) == to_host:
                continue
            if part == PARAMETERS:
                (sharded.offload if to_host else sharded.onload)()
            elif part == GRADIENTS and to_host:
                self._gradients.offload(local(p.grad).detach() for p in self.module.parameters() if p.grad is not None)
            elif part == GRADIENTS:
                self._gradients.onload()
            elif engine is not None:
                if to_host:
                    engine.offload(parameters=False)
                else:
                    engine.host.onload()
            (self._on_host.add if to_host else self._on_host.discard)(part)

    @contextmanager
    def _onload(self, *, optimizer: bool = False) -> Iterator[None]:
        """Keep the parameters, and optionally the optimizer state, on the device in the context."""
        before = set(self._on_host)
        self.move(False, model=True, optimizer=optimizer, grad=False)
        try:
            yield
        finally:
            self.move(True, model=PARAMETERS in before, optimizer=OPTIMIZER in before, grad=False)

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, adapter_name: str | None = None, **options: Any
    ) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """Return the weights for a rollout engine, (name, full tensor) one at a time, and the adapter's PEFT config.

        Without LoRA, or with merged adapters, these are all weights and None. With LoRA they are the base weights until
        `base_sync_done`, and then only the adapter, in float32. Every rank must consume the whole iterator. Base weights are
        on the device of the parameters. Adapters and merged weights are on the CPU, so that they stay valid when the
        parameters are moved to the host.

        Args:
            layered_summon: no effect, because tensors are always gathered one at a time.
            base_sync_done: whether the rollout engine has the base weights.
            adapter_name: adapter to send, by default `default`; `reference` is the base model.
            options: arguments of other engines.
        """
        settings, module = self.settings, self.module
        adapter = None if settings.lora is None else (adapter_name or "default")
        if adapter not in (None, REFERENCE, *settings.adapters):
            raise UsageError(f"adapter_name is {adapter!r}, expected one of {', '.join(settings.adapters)}")
        adapter = None if adapter == REFERENCE else adapter
        dtype, full_name = DTYPES[settings.sent], self.denoiser.add_network_prefix

        def iterate_tensors() -> Iterator[tuple[str, Tensor]]:
            with self._onload():
                if adapter is not None and (settings.merge or base_sync_done):
                    cast = dtype if settings.merge else None
                    for name, tensor in gather_weights(module, adapter=adapter, merge=settings.merge, dtype=cast):
                        yield full_name(name), tensor
                    return
                for name, tensor in list_base_tensors(module).items():
                    cast = dtype if tensor.is_floating_point() else tensor.dtype
                    yield full_name(name), gather(tensor).to(cast, copy=True)

        if adapter is None or settings.merge:
            return iterate_tensors(), None
        configs: Any = module.peft_config
        peft: dict[str, Any] = configs[adapter].to_dict()
        return iterate_tensors(), {**peft, "target_modules": sorted(peft["target_modules"])}

    def use_adapter(self, name: str) -> AbstractContextManager[None]:
        """Return a context with one adapter active; `reference` is the base model. UsageError if it does not exist."""
        if name == REFERENCE:
            return self.disable_adapter()
        self._check_adapters(name)
        return use_adapter(self.module, name)

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Return a context without adapters, for the base model."""
        return use_adapter(self.module, None)

    def copy_adapter(self, source: str = "default", target: str = "old") -> None:
        """Copy an adapter's weights: target <- source."""
        self._check_adapters(source, target)
        with self._onload():
            copy_adapter(self.module, source, target)

    def ema_update_adapter(self, source: str = "default", target: str = "old", decay: float = 0.0) -> None:
        """Average an adapter with another: target <- decay target + (1 - decay) source."""
        self._check_adapters(source, target)
        if not 0 <= decay <= 1:
            raise UsageError(f"decay is {decay}, expected a number from 0 to 1")
        with self._onload():
            blend_adapter(self.module, source, target, decay)

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **options: Any,
    ) -> None:
        """Write weights, adapters, optimizer state and schedule to a folder, which becomes visible once it is complete.

        With `hf_model` in `checkpoint.save_contents` the folder also holds the weights in diffusers' format: `lora_adapter`,
        or `huggingface` for full fine-tuning.

        Args:
            local_path: folder of this checkpoint.
            hdfs_path: must be None, because fluvial does not copy checkpoints.
            global_step: verl's step, which names the checkpoint within the folder.
            max_ckpt_to_keep: number of this engine's checkpoints to keep; None keeps all.
            options: arguments of other engines.
        """
        engine, settings, world, path = self._require_engine("save_checkpoint"), self.settings, self.world, Path(local_path)
        _check_remote(hdfs_path)
        meta, fingerprint = {**engine.counters(), "rounds": self.rounds}, settings.fingerprint()
        with self._onload(optimizer=True):
            checkpoint.save(path, engine.state(), meta, update=global_step, fingerprint=fingerprint, world=world, keep=1)
            if settings.export and settings.lora is not None:
                write_lora(engine.module, path / "lora_adapter", world=world)
            elif settings.export:
                export(engine.module, path / "huggingface", dtype=DTYPES[settings.sent], world=world)
        self._saved = [*(old for old in self._saved if old != path), path]
        while max_ckpt_to_keep and len(self._saved) > max_ckpt_to_keep:
            self._remove(self._saved.pop(0))

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = True, **options: Any
    ) -> None:
        """Restore a checkpoint to the bit, on any number of ranks.

        Args:
            local_path: folder that `save_checkpoint` wrote; None loads nothing.
            hdfs_path: must be None.
            del_local_after_load: whether to remove the folder afterwards.
            options: arguments of other engines.

        Raises:
            UsageError: the folder holds no checkpoint.
            RunError: the checkpoint is damaged or of another model.
        """
        if local_path is None:
            return
        engine, world, path = self._require_engine("load_checkpoint"), self.world, Path(local_path)
        _check_remote(hdfs_path)
        with self._onload(optimizer=True):
            with world.agreed():
                checkpoints = checkpoint.list_checkpoints(path, recover=False)
                if not checkpoints:
                    raise UsageError(f"{path} holds no checkpoint of fluvial")
            state = engine.state()
            meta = checkpoint.load(checkpoints[-1], state, fingerprint=self.settings.fingerprint(), world=world)
            engine.restore(state, meta)
        self.rounds = int(meta["rounds"])
        world.gather_items(None)  # every rank has read it
        if del_local_after_load:
            self._remove(path)

    def _remove(self, path: Path) -> None:
        if self.world.is_main:
            shutil.rmtree(path, ignore_errors=True)

    def _check_adapters(self, *names: str) -> None:
        for name in names:
            if self.settings.lora is None or name not in self.settings.adapters:
                raise UsageError(
                    f"there is no adapter {name}: set model.lora_rank, and add it to model.policy_state_adapters "
                    f"({', '.join(self.settings.adapters)})"
                )

    def _require_sharded(self) -> ShardedModule:
        if self.sharded is None:
            raise UsageError("the engine is not built: call initialize() first")
        return self.sharded

    def _require_engine(self, what: str) -> Engine:
        self._require_sharded()
        if self.engine is None:
            raise UsageError(f"engine.forward_only is set, and {what} needs an optimizer")
        return self.engine


def _check_remote(path: str | None) -> None:
    if path is not None:
        raise UsageError(f"hdfs_path is {path}, expected None: checkpoints are written to and read from local_path")


def _join_world() -> World:
    """Return the world of verl's process group, on the current GPU or the CPU; UsageError if it is not initialised."""
    if not dist.is_initialized():
        raise UsageError("there is no process group: call torch.distributed.init_process_group first")
    device = find_default_device()
    if is_accelerator(device):
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    size = dist.get_world_size()
    return World(dist.get_rank(), size, device, init_device_mesh(device.type, (size,), mesh_dim_names=("shard",)))
