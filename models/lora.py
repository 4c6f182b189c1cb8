"""Adapters through PEFT: LoRA, DoRA or LoKr on the linear layers of any module, switched, copied, averaged and merged."""

import math
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fluvial.core import ema
from fluvial.core.checks import RANK, FieldError, check_fields
from fluvial.models.lora_layer import PARTS, Product, lighten, merge_weight
from fluvial.models.quantised import QuantisedLinear

HEADS = "fluvial_heads"  # module of a network that holds heads on its features, beside the network's weights
# Linear layers of the joint attention of MM-DiTs, by diffusers' names.
JOINT_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


Init = Literal["default", "gaussian"]


@dataclass(frozen=True)
class Factored:
    """Form of an adapter with low-rank factors A and B.

    Args:
        init: Distribution of A, see the forms.
    """

    init: Init = "default"

    def __post_init__(self) -> None:
        check_fields(self, "lora.form")

    def to_peft_config(self, config: "LoraConfig", targets: Sequence[str]) -> Any:
        """Return PEFT's settings of the factors."""
        import peft  # as in add_lora

        return peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            target_modules=list(targets),
            lora_dropout=0.0,
            bias="none",
            init_lora_weights=True if self.init == "default" else "gaussian",
        )


@dataclass(frozen=True)
class LowRank(Factored):
    """LoRA (arXiv 2106.09685): W + s B A, with s = alpha / rank.

    Args:
        init: Distribution of A: default (Kaiming uniform, as in PEFT) or gaussian (standard deviation 1 / rank, as in the
            training scripts of diffusers and Flow-GRPO). B starts at 0.
        product: How a layer multiplies its input: factors (x W^T + s (x A^T) B^T, as PEFT does), merged, which computes
            W + s B A in each forward pass, or auto, which merges if that takes no more operations, because four samples
            have at least 2 in out / (in + out) tokens. The two agree to rounding. In a lower precision than float32 all
            take the factors. Compiled blocks merge layers up to about four ranks wide only.
    """

    kind: ClassVar[str] = "lora"
    product: Product = "auto"


@dataclass(frozen=True)
class Dora(Factored):
    """DoRA (arXiv 2402.09353): rows of W + s B A with a trained length, which `add_lora` adds.

    Args:
        init: Distribution of A, as for lora. B starts at 0, and the lengths start at those of the rows of W.
    """

    kind: ClassVar[str] = "dora"


@dataclass(frozen=True)
class Lokr:
    """LoKr (arXiv 2309.14859): W + s w1 (x) w2, a Kronecker product whose second factor has the rank.

    Args:
        factor: Rows and columns of w1, if they divide those of W; None takes the divisors next to the root. w2 is not
            factored if that would not take fewer numbers.
    """

    kind: ClassVar[str] = "lokr"
    factor: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, "lora.form", factor=(1, math.inf))

    def to_peft_config(self, config: "LoraConfig", targets: Sequence[str]) -> Any:
        """Return PEFT's settings of an adapter."""
        import peft  # as in add_lora

        factor = -1 if self.factor is None else self.factor
        alpha: Any = config.alpha  # PEFT says int, and takes any number
        return peft.LoKrConfig(r=config.rank, alpha=alpha, target_modules=list(targets), decompose_factor=factor)


Form = LowRank | Dora | Lokr


@dataclass(frozen=True)
class LoraConfig:
    """Adapter of linear layers, which is trained while W is frozen.

    Args:
        rank: Rank of the factors.
        alpha: Scale of the adapter; its output is multiplied by alpha / rank.
        targets: Suffixes of the names of the adapted linear layers, such as to_q; None takes the model's own.
        form: Form of the adapter: lora (low-rank factors), dora (with trained lengths of the rows of the sum), or lokr
            (a Kronecker product, of fewer numbers).
        weights: File or folder of an adapter to continue from, with keys of diffusers, PEFT, kohya/ComfyUI or LyCORIS. Form,
            rank, alpha and layers are read from it, and nothing is drawn. It is the reference policy, too.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] | None = None
    form: Form = LowRank()
    weights: Path | None = None

    def __post_init__(self) -> None:
        check_fields(self, rank=RANK, alpha=(1e-45, 1e6))
        if self.targets == ():
            raise ValueError("lora.targets is empty, expected at least one name")
        if self.weights is not None and self.targets is not None:
            raise FieldError("lora.targets", "has no effect with lora.weights, which has layers of its own; remove it")

    @property
    def scale(self) -> float:
        """Factor of the adapter's output, alpha / rank."""
        return self.alpha / self.rank

    @property
    def product(self) -> Product:
        """Product of an adapted layer; forms other than lora never merge."""
        return self.form.product if isinstance(self.form, LowRank) else "factors"


def add_lora(
    module: nn.Module,
    config: LoraConfig,
    targets: Sequence[str],
    *,
    adapters: Sequence[str] = ("default",),
    trained: Collection[str] = (),
    further: Mapping[str, LoraConfig] = MappingProxyType({}),
    seed: int = 0,
) -> None:
    """Freeze `module` and add adapters to its linear layers, in place; `default` is trained and active.

    One factor starts at 0, so the module's output does not change. The others are drawn from `seed`, with the same values on
    any device. The other adapters start equal to `default`. If the weights are on the meta device, adapters are on the CPU.

    Args:
        module: network to adapt.
        config: form, rank, scale and targets.
        targets: suffixes of the names of the layers, used if `config.targets` is None.
        adapters: names of the adapters; `default` is the first.
        trained: names of adapters that are trained beside `default`; the others are frozen.
        further: settings of frozen adapters with other rank and alpha on the same layers, by name; lora and dora can be
            combined.
        seed: seed of A.

    Raises:
        ValueError: a target matches no layer or a layer that is not linear, or the first adapter is not `default`.
    """
    import peft  # imported here because it takes seconds

    targets = targets if config.targets is None else config.targets
    _check_targets(module, targets)
    if not adapters or adapters[0] != "default" or len(set(adapters)) < len(adapters):
        raise ValueError(f"adapters are {tuple(adapters)}, expected default first and then other names")
    module.requires_grad_(False)
    with torch.random.fork_rng(devices=[]), _replace_weights(module), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")  # several adapters are intended
        torch.manual_seed(seed)
        for name in adapters:
            peft.inject_adapter_in_model(config.form.to_peft_config(config, targets), module, adapter_name=name)
        for name, other in further.items():
            peft.inject_adapter_in_model(other.form.to_peft_config(other, targets), module, adapter_name=name)
    lengths = [*(adapters if isinstance(config.form, Dora) else ())]
    lengths += [name for name, further_config in further.items() if isinstance(further_config.form, Dora)]
    for layer in find_lora_layers(module).values():
        _add_lengths(layer, lengths)
        layer.set_adapter("default")  # freezes the others
        lighten(layer, product=config.product)
    for name in adapters[1:]:
        copy_adapter(module, "default", name)
    for name in trained:
        for parameter in find_adapter_parameters(module, name).values():
            parameter.requires_grad_(True)


@contextmanager
def use_adapter(module: nn.Module, name: str | None) -> Iterator[None]:
    """Activate one adapter inside the context, or none, so that the module is the reference policy, as before LoRA.

    The set of trained parameters does not change. Contexts may be nested. With activation checkpointing, the backward pass
    must end inside the context of its forward pass, because it computes the activations again.

    Raises ValueError if the module has no adapter of that name.
    """
    layers = list(find_lora_layers(module).values()) if name is None else list(_find_layers_with(module, name).values())
    before = [(layer._active_adapter, layer._disable_adapters) for layer in layers]
    try:
        for layer in layers:  # PEFT's own switch would change requires_grad
            layer._disable_adapters = name is None
            if name is not None:
                layer._active_adapter = [name]
        yield
    finally:
        for layer, (active, disabled) in zip(layers, before, strict=True):
            layer._active_adapter, layer._disable_adapters = active, disabled


def find_adapter_parameters(module: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """Return the parameters of an adapter by short names, without the adapter's name, which all adapters share.

    In a sharded module these are the shards. Parameters that FSDP holds gathered are freed, so that the next forward pass
    sees writes to the shards. Raises ValueError if the module has no adapter of that name.
    """
    parameters = module.state_dict(keep_vars=True)  # its hooks free what is gathered
    return {short: parameters[full] for short, full in map_adapter_names(module, name).items()}


def map_adapter_names(module: nn.Module, name: str) -> dict[str, str]:
    """Return the full names of an adapter's parameters, by their short names without the adapter's name.

    PEFT and diffusers use the short names in files: `block.to_q.lora_A.weight` for `block.to_q.lora_A.old.weight`. Raises
    ValueError if the module has no adapter of that name.
    """
    return {
        f"{path}.{part}{ending}": f"{path}.{part}.{name}{ending}"
        for path, layer in _find_layers_with(module, name).items()
        for part, ending in _list_parts(layer, name).items()
    }


def _list_parts(layer: Any, adapter: str) -> dict[str, str]:
    """Return the parts of an adapter in a layer, each with the ending of its parameter's name."""
    parts = {part: getattr(layer, part, {}) for part in PARTS}
    return {part: ".weight" if isinstance(value, nn.ModuleDict) else "" for part, value in parts.items() if adapter in value}


def read_form(module: nn.Module) -> Form:
    """Return the form of a module's adapters, with the default `init` and `product`; ValueError without adapters."""
    layer = next(iter(_find_layers_with(module, "default").values()))
    if not hasattr(layer, "lora_A"):
        configs: Any = module.peft_config
        factor = configs["default"].decompose_factor
        return Lokr(None if factor == -1 else factor)
    return Dora() if "default" in layer.lora_magnitude_vector else LowRank()


def describe_lora(module: nn.Module) -> dict[str, Any] | None:
    """Return rank, alpha, form and layers of the adapter `default` as values for JSON; None without an adapter."""
    layers = find_lora_layers(module)
    if not layers:
        return None
    first, form = next(iter(layers.values())), read_form(module)
    alpha = first.lora_alpha if hasattr(first, "lora_alpha") else first.alpha
    record = {"kind": form.kind} | ({"factor": form.factor} if isinstance(form, Lokr) else {})
    return {"rank": first.r["default"], "alpha": float(alpha["default"]), "form": record, "layers": sorted(layers)}


def restore_lora(settings: dict[str, Any]) -> LoraConfig:
    """Return the settings of an adapter from its `describe_lora`, without its layers."""
    record = dict(settings.get("form", {"kind": "lora"}))
    variant: Any = {form.kind: form for form in (LowRank, Dora, Lokr)}[record.pop("kind")]
    return LoraConfig(rank=settings["rank"], alpha=settings["alpha"], form=variant(**record))


def copy_adapter(module: nn.Module, source: str, into: str) -> None:
    """Copy one adapter to another, in place: into <- source. Each rank copies its own shards.

    Raises ValueError if the module has no adapter of one of the names.
    """
    values, targets = _find_shards(module, source), _find_shards(module, into)
    for name, target in targets.items():
        target.copy_(values[name])


def blend_adapter(module: nn.Module, source: str, into: str, decay: float) -> None:
    """Average one adapter with another, in place: into <- decay into + (1 - decay) source.

    The old policy of DiffusionNFT (arXiv 2509.16117) follows the trained one in this way. Each rank blends its own shards.

    Raises:
        ValueError: the module has no adapter of one of the names, or the decay is not in [0, 1].
    """
    targets = _find_shards(module, into)
    sources = {name: tensor.to(targets[name].dtype) for name, tensor in _find_shards(module, source).items()}
    for name, blended in ema.update(targets, sources, decay).items():
        targets[name].copy_(blended)


def merge_lora(module: nn.Module, adapter: str = "default") -> None:
    """Merge an adapter into the weights and remove all adapters, in place; ValueError if no adapter has that name.

    A quantised layer becomes a linear layer, because its codes could not hold the sum.
    """
    parameters, names = dict(module.named_parameters()), map_adapter_names(module, adapter)
    for name, layer in _find_layers_with(module, adapter).items():
        base: Any = layer.base_layer
        base = base.to_linear() if isinstance(base, QuantisedLinear) else base
        endings = _list_parts(layer, adapter)
        parts = {part: parameters[names[f"{name}.{part}{end}"]].detach() for part, end in endings.items()}
        base.weight.data = merge_weight(base.weight.data, parts, layer.scaling[adapter])
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, base)
    del module.peft_config


def map_adapter_parts(module: nn.Module, adapter: str) -> dict[str, dict[str, str]]:
    """Return the short names of an adapter's parameters by layer and part; ValueError if no adapter has that name."""
    return {
        name: {part: f"{name}.{part}{ending}" for part, ending in _list_parts(layer, adapter).items()}
        for name, layer in _find_layers_with(module, adapter).items()
    }


def is_adapter(name: str) -> bool:
    """Return whether a parameter's name belongs to an adapter, trained or not, or to a head, which the base lacks."""
    return ".lora_" in name or ".lokr_" in name or name.startswith(f"{HEADS}.")


def find_lora_layers(module: nn.Module) -> dict[str, Any]:
    """Return the adapted layers by name, each a LoraLayer or LoKrLayer of PEFT around the linear layer."""
    if "peft" not in sys.modules:  # then no layer is adapted, and the import would take seconds
        return {}
    from peft.tuners.lokr import LoKrLayer
    from peft.tuners.lora import LoraLayer

    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer | LoKrLayer)}


def find_attention_layers(network: nn.Module) -> tuple[str, ...]:
    """Return the names of the linear layers inside attention modules, each from the attention's own name on."""
    attention = [(name, part) for name, part in network.named_modules() if "attention" in type(part).__name__.lower()]
    named = (
        f"{outer.rpartition('.')[2]}.{name}".removeprefix(".")
        for outer, part in attention
        for name, layer in part.named_modules()
        if isinstance(layer, nn.Linear)
    )
    return tuple(dict.fromkeys(named))


def find_linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers by their names without adapters; PEFT wraps an adapted layer in one of its own."""
    return {
        name.removesuffix(".base_layer"): layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and ".lora_" not in name
    }


def _find_layers_with(module: nn.Module, adapter: str) -> dict[str, Any]:
    """Return the adapted layers by name; ValueError if they do not have that adapter."""
    layers = find_lora_layers(module)
    names = list(next(iter(layers.values())).scaling) if layers else []  # all layers have the same adapters
    if adapter not in names:
        raise ValueError(f"there is no adapter {adapter}: the module has {', '.join(names) or 'none'}")
    return layers


def _add_lengths(layer: Any, adapters: Sequence[str]) -> None:
    """Add the lengths of a DoRA layer's rows, stored as the difference to the lengths of W's rows, initially 0.

    A difference keeps its digits in bfloat16, and needs no values of W, which may not have been read yet.
    """
    for name in adapters:
        like, lengths = layer.lora_B[name].weight, nn.Module()
        lengths.weight = nn.Parameter(like.new_zeros(layer.out_features))
        layer.lora_magnitude_vector[name] = lengths


def _find_shards(module: nn.Module, adapter: str) -> dict[str, Tensor]:
    """Return this rank's shards of an adapter, detached, for writing in place."""
    from torch.distributed.tensor import DTensor  # imported here because it takes seconds

    return {
        name: (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()
        for name, parameter in find_adapter_parameters(module, adapter).items()
    }


def _check_targets(module: nn.Module, targets: Sequence[str]) -> None:
    for target in targets:
        targeted = {name: layer for name, layer in module.named_modules() if f".{name}".endswith(f".{target}")}
        if not targeted:
            raise ValueError(f"lora.targets: no layer's name ends in {target}")
        for name, layer in targeted.items():
            if not isinstance(layer, nn.Linear):
                raise ValueError(f"lora.targets: {target} names {name}, a {type(layer).__name__}, expected a linear layer")


@contextmanager
def _replace_weights(module: nn.Module) -> Iterator[None]:
    """Replace each weight that is on the meta device, or sharded, by an expanded scalar inside the context.

    PEFT moves a new adapter to the device of its layer, and would lose the adapter's values on the meta device. It treats
    a sharded weight as tensor-parallel unless the mesh is called fsdp, and then adapts only a rank's rows.
    """
    from torch.distributed.tensor import DTensor  # imported here because it takes seconds

    replaced = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if parameter.is_meta or isinstance(parameter, DTensor)
    ]
    try:
        for owner, name, parameter in replaced:
            device = "cpu" if parameter.is_meta else parameter.device
            number = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
            setattr(owner, name, nn.Parameter(number, requires_grad=False))
        yield
    finally:
        for owner, name, parameter in replaced:
            setattr(owner, name, parameter)
