"""Settings of tiny networks and autoencoders of diffusers: rules by the settings' names, and a table of exceptions."""

import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

WIDTH, HEAD, LATENT, PACKED = 16, 8, 4, 16
CHANNELS = 32  # channels of every block of an autoencoder; a multiple of the 32 groups that some have fixed

# Values of settings of any class by patterns of their whole names.
RULES = (
    (r"depth|mmdit_layers|approximator_layers|(n|num)_((single|hidden|refiner|mmdit|single_dit)_)?layers", 1),
    (r"num_(text|visual|layerwise_text|refiner_text)_blocks|(text_)?num_(key_value|kv)_heads|num_activated_experts", 1),
    (r"(n|n_kv|num|(text_)?num_attention|num_cross_attention)_heads|num_routed_experts", 2),
    (r"((cross_)?attention_)?head_dim|condition_dim|timestep_guidance_channels", HEAD),
    (r"hidden_size|multiple_of|(model_)?dim|(caption|approximator_num)_channels|approximator_hidden_dim", WIDTH),
    (r"(cross_attention|joint_attention|(pooled|caption)_projection|cap_feat|context_in|freq|image_embed)_dim", WIDTH),
    (r"in_text_dim2?|text_((embed|emb|in|hidden|encoder)_)?dim|time(step)?_((embed|step)_)?dim|adaln_(lora_)?dim", WIDTH),
    (r"ff_dim|ffn_(dim|hidden_size)|(text_)?intermediate_size", 2 * WIDTH),
    (r"pos_embed_max_size|sample_size|rope_max_seq_len", 32),
)
AXES = ("axes_dims_rope", "axes_dim_rope", "axes_dims", "rope_axes_dim", "rope_dim_list")
IN_OUT = ("in_channels", "out_channels", "in_visual_dim", "out_visual_dim")


@cache
def read_table() -> dict[str, Any]:
    """Return the tables of settings.yaml."""
    text = Path(__file__).with_name("settings.yaml").read_text(encoding="utf-8")
    table: dict[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return table


def look_up(pipeline: str, name: str, default: Any) -> Any:
    """Return an entry of a pipeline in the table, or a default."""
    return read_table()["pipelines"].get(pipeline, {}).get(name, default)


def _read_defaults(kind: type) -> dict[str, Any]:
    """Return the defaults of the settings of a class."""
    return {name: entry.default for name, entry in inspect.signature(kind.__init__).parameters.items()}  # type: ignore[misc]


def choose_network_settings(kind: type, further: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a tiny network of a class, in this precedence: `further`, the table's, the rules'."""
    defaults = _read_defaults(kind)
    settings: dict[str, Any] = {
        name: value for pattern, value in RULES for name in defaults if re.fullmatch(pattern, name) is not None
    }
    for name in AXES:
        if defaults.get(name):
            settings[name] = type(defaults[name])({2: (4, 4), 3: (2, 2, 4), 4: (2, 2, 2, 2)}[len(defaults[name])])
    for name in IN_OUT:
        if isinstance(defaults.get(name), int):
            settings[name] = PACKED if defaults[name] >= 64 else LATENT
    # A default of None marks an optional input.
    by_rule = {name: value for name, value in settings.items() if defaults[name] is not None}
    return {**by_rule, **read_table()["networks"].get(kind.__name__, {}), **further}


def choose_vae_settings(kind: type, pipeline: str) -> dict[str, Any]:
    """Return the settings of a pipeline's tiny autoencoder of a class: the table's, or those of rules by their names."""
    known = read_table()["autoencoders"].get(kind.__name__)
    if known is None:
        by_rule = {name: _shrink_setting(name, default) for name, default in _read_defaults(kind).items()}
        known = {name: value for name, value in by_rule.items() if value is not None}
    return {**known, **look_up(pipeline, "autoencoder", {})}


def _shrink_setting(name: str, default: Any) -> Any:
    """Return the tiny value of an autoencoder's setting; None to keep the default."""
    if default is None or default is inspect.Parameter.empty:
        return None
    if name.endswith("block_out_channels"):
        return type(default)([CHANNELS] * len(default))
    if name.endswith("layers_per_block"):
        return 1 if isinstance(default, int) else type(default)([1] * len(default))
    if name in ("latents_mean", "latents_std"):
        return [1.2, 0.8, 1.6, 0.9] if name == "latents_std" else [-0.2, 0.1, 0.4, -0.1]
    latents = dict.fromkeys(("latent_channels", "z_dim", "latent_dim", "base_dim", "decoder_base_dim"), LATENT)
    return {**latents, "norm_num_groups": 4, "num_res_blocks": 1}.get(name)
