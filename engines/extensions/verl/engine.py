"""The engine of verl's workers: what verl's `BaseEngine` asks for, over fluvial's own engine.

Nothing here imports verl: `plugin` joins these classes with verl's.
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
from fluvial.engines.extensions.verl.batch import Fields
from fluvial.engines.extensions.verl.denoiser import Denoiser
from fluvial.engines.extensions.verl.passes import BatchPasses, LossFunction
from fluvial.engines.extensions.verl.settings import Settings, lr_factor, read_settings
from fluvial.engines.gathered import gather, gather_weights
from fluvial.engines.offload import HostOffload
from fluvial.engines.run.checkpoint import checkpoint
from fluvial.models.device import default_device, deterministic, is_accelerator
from fluvial.models.lora import blend_adapter, copy_adapter, use_adapter

REFERENCE = "reference"  # verl-omni's name of the base model without adapters
PARAMETERS, OPTIMIZER, GRADIENTS = "parameters", "optimizer", "gradients"


class VerlEngine:
    """A diffusion model in training, as verl's workers drive it.

    verl's process group must be open. Every rank calls every method.

    Args:
        model_config, engine_config, optimizer_config, checkpoint_config: see `settings.read_settings`.

    Raises:
        UsageError: a field of a config is not supported.
    """

    algorithm: ClassVar[Algorithm]
    # Of verl: the context that moves an engine between host and device, and the function that gathers metrics.
    context: ClassVar[Callable[..., AbstractContextManager[None]]]
    append: ClassVar[Callable[[dict[str, Any], dict[str, Any]], None]]
    hooks: ClassVar[
        Callable[[Any], Any]
    ]  # verl-omni's adapter for a model config, or None; its hooks choose what is trained

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
        self._saved: list[Path] = []  # folders of the checkpoints that this engine wrote
        self._away: set[str] = set()  # what lies on the host

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
            factor, self.rounds = lr_factor(self.optimizer_config), 0
            self.engine.lr_factor = lambda updates: factor(self.rounds)  # verl counts its rounds, not updates
        self._gradients, self._away = HostOffload(self.world.device), set()
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
        """Whether the parameters lie on the host between the phases."""
        return self.settings.offloads_parameters

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        """Whether the optimizer state lies on the host between the phases."""
        return self.settings.offloads_optimizer

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Return whether this rank's outputs are collected: the first of those that share a sample."""
        return self.world.rank % self.world.sequence == 0

    def get_data_parallel_size(self) -> int:
        """Return the number of ranks, or of groups of ranks that share samples."""
        return self.world.data_size

    def get_data_parallel_rank(self) -> int:
        """Return the index of this rank, or of its group."""
        return self.world.data_rank

    def get_data_parallel_group(self) -> Any:
        """Return the process group of the ranks that have other samples than this one."""
        return self._group

    @contextmanager
    def train_mode(self, **options: Any) -> Iterator[None]:
        """Hold the engine on the device inside the context; gradients are cleared at its end."""
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
                `data["gradient_accumulation_steps"]`, and metrics. It may be None if `forward_only`.
            forward_only: whether no gradient is computed. The network is then in evaluation mode.

        Raises:
            UsageError: a field is missing or has a wrong shape, or the loss function returns something else.
        """
        if loss_function is None and not forward_only:
            raise UsageError("loss_function is None, expected a function, or forward_only")
        fields = Fields(data)
        denoiser = self.denoiser.fit(fields)
        size = fields.plain("micro_batch_size_per_gpu", self.settings.micro_batches[forward_only])
        if size is None:
            raise UsageError("micro_batch_size_per_gpu is not set, neither in the batch nor in the engine config")
        passes = BatchPasses(
            self.algorithm.batch(denoiser, fields, loss_function is not None),
            self.algorithm,
            denoiser,
            self.world,
            micro_batch=int(size),
            loss_function=loss_function,
            group=self._group,
            append=type(self).append,
        )
        with deterministic(self.settings.engine.deterministic):
            if forward_only:
                return passes.infer(self._require_sharded())
            return passes.train(self._require_engine("a backward pass"), self._configure)

    def optimizer_step(self) -> float:
        """Take an optimizer step, unless the gradient is not finite, and return its norm before clipping."""
        return self._require_engine("optimizer_step").step().grad_norm

    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one, and return the learning rate of the next updates."""
        engine = self._require_engine("lr_scheduler_step")
        self.rounds += 1
        return engine.config.lr * engine.lr_factor(engine.updates)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move parameters, optimizer state and gradients to the host or to the engine's device.

        Args:
            device: "cpu", or the type of the engine's device. An engine that computes on the CPU stays where it is.
            model, optimizer, grad: what is moved.
        """
        if grad and not model:
            raise UsageError("to(grad=True, model=False): gradients move with the parameters, set both")
        if (here := self.world.device.type) != "cpu":
            if device not in ("cpu", here):
                raise UsageError(f"to({device!r}): expected 'cpu' or {here!r}")
            self.move(device == "cpu", model=model, optimizer=optimizer, grad=grad)

    def move(self, away: bool, *, model: bool, optimizer: bool, grad: bool) -> None:
        """Move parameters, optimizer state or gradients to the host (`away`) or back; what is there already stays."""
        sharded, engine = self._require_sharded(), self.engine
        parts = {PARAMETERS: model, OPTIMIZER: optimizer and engine is not None, GRADIENTS: grad and engine is not None}
        for part, wanted in parts.items():
            if not wanted or (part in self._away) == away:
                continue
            if part == PARAMETERS:
                (sharded.offload if away else sharded.onload)()
            elif part == GRADIENTS and away:
                self._gradients.offload(local(p.grad).detach() for p in self.module.parameters() if p.grad is not None)
            elif part == GRADIENTS:
                self._gradients.onload()
            elif engine is not None:
                if away:
                    engine.offload(parameters=False)
                else:
                    engine.host.onload()
            (self._away.add if away else self._away.discard)(part)

    @contextmanager
    def _onload(self, *, optimizer: bool = False) -> Iterator[None]:
        """Hold the parameters, and the optimizer state, on the device inside the context."""
        away = set(self._away)
        self.move(False, model=True, optimizer=optimizer, grad=False)
        try:
            yield
        finally:
            self.move(True, model=PARAMETERS in away, optimizer=OPTIMIZER in away, grad=False)

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, adapter_name: str | None = None, **options: Any
    ) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """Return the weights for a rollout engine, (name, full tensor) one at a time, and the settings of the adapter.

        Without LoRA, or if adapters are merged, these are all weights and None. With LoRA they are the base weights until
        `base_sync_done`, and from then on the adapter alone, in float32. Every rank must take all of them. Base weights are
        on the device of the parameters; adapters and merged weights are on the CPU, so that they stay valid while the
        parameters are moved to the host.

        Args:
            layered_summon: no effect: at most one tensor is gathered at a time in any case.
            base_sync_done: whether the rollout engine has the base weights.
            adapter_name: adapter to send, by default `default`; `reference` is the base model.
            options: what other engines take.
        """
        settings, module = self.settings, self.module
        adapter = None if settings.lora is None else (adapter_name or "default")
        if adapter not in (None, REFERENCE, *settings.adapters):
            raise UsageError(f"adapter_name is {adapter!r}, expected one of {', '.join(settings.adapters)}")
        adapter = None if adapter == REFERENCE else adapter
        dtype, full_name = DTYPES[settings.sent], self.denoiser.network_name

        def tensors() -> Iterator[tuple[str, Tensor]]:
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
            return tensors(), None
        configs: Any = module.peft_config
        peft: dict[str, Any] = configs[adapter].to_dict()
        return tensors(), {**peft, "target_modules": sorted(peft["target_modules"])}

    def use_adapter(self, name: str) -> AbstractContextManager[None]:
        """Return a context with one adapter active; `reference` is the base model. UsageError if there is none."""
        if name == REFERENCE:
            return self.disable_adapter()
        self._check_adapters(name)
        return use_adapter(self.module, name)

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Return a context without adapters, in which the network is the base model."""
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
        """Write weights, adapters, optimizer state and schedule to a folder; it appears when it is whole.

        With `hf_model` among `checkpoint.save_contents` the folder also holds the weights as diffusers reads them:
        `lora_adapter`, or `huggingface` for full fine-tuning.

        Args:
            local_path: folder of this checkpoint.
            hdfs_path: None, because fluvial copies nothing.
            global_step: verl's step, which names the checkpoint within the folder.
            max_ckpt_to_keep: number of this engine's checkpoints to keep; None keeps all.
            options: what other engines take.
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
            hdfs_path: None, as for `save_checkpoint`.
            del_local_after_load: whether the folder is removed afterwards.
            options: what other engines take.

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
    """Return the world of the process group that verl's worker has opened, on the current GPU or the CPU.

    Raises:
        UsageError: there is no process group.
    """
    if not dist.is_initialized():
        raise UsageError("there is no process group: call torch.distributed.init_process_group first")
    device = default_device()
    if is_accelerator(device):
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    size = dist.get_world_size()
    return World(dist.get_rank(), size, device, init_device_mesh(device.type, (size,), mesh_dim_names=("shard",)))
