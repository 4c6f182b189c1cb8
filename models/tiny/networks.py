"""Settings that make diffusers' transformers and the networks beside them tiny: rules for shared names, a table of the rest.

All widths are 16 (two heads of 8), latents have 4 channels, and 16 where a pipeline packs 2 x 2 of them into a token.
"""

import inspect
import re
from typing import Any

WIDTH, HEAD, LATENT, PACKED = 16, 8, 4, 16

# Values of settings by patterns of their whole names, whatever the class.
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
CHANNELS = ("in_channels", "out_channels", "in_visual_dim", "out_visual_dim")

SD3 = {"joint_attention_dim": 2 * WIDTH, "pooled_projection_dim": 2 * WIDTH, "num_layers": 2, "pos_embed_max_size": 32}

# Further settings by class, which come before the rules.
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "UNet2DConditionModel": {
        "sample_size": 64,
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": WIDTH,
        "attention_head_dim": 2,
    },
    "AuraFlowTransformer2DModel": {},
    "ChromaTransformer2DModel": {"approximator_num_channels": 16},
    "CogView4Transformer2DModel": {"rope_axes_dim": (16, 16)},
    "CosmosTransformer3DModel": {
        "in_channels": LATENT,
        "max_size": (8, 16, 16),
        "rope_scale": (2.0, 1.0, 1.0),
        "mlp_ratio": 2,
        "attention_head_dim": 16,
    },
    "DiTTransformer2DModel": {"out_channels": 2 * LATENT, "num_layers": 3, "sample_size": 8, "num_attention_heads": 2},
    "Flux2Transformer2DModel": {"joint_attention_dim": 3 * WIDTH, "guidance_embeds": False},
    "FluxTransformer2DModel": {"guidance_embeds": True},
    "HiDreamImageTransformer2DModel": {
        "patch_size": 2,
        "in_channels": LATENT,
        "out_channels": LATENT,
        "caption_channels": [WIDTH, WIDTH],
        "text_emb_dim": 2 * WIDTH,
        "axes_dims_rope": (2, 2, 4),
        "llama_layers": [0, 1],
        "max_resolution": (32, 32),
    },
    "HunyuanImageTransformer2DModel": {
        "in_channels": LATENT,
        "out_channels": LATENT,
        "rope_axes_dim": (4, 4),
        "text_embed_2_dim": WIDTH,
    },
    "HunyuanVideo15Transformer3DModel": {
        "in_channels": 2 * LATENT + 1,
        "out_channels": LATENT,
        "text_embed_2_dim": WIDTH,
        "target_size": 16,
    },
    "LTXVideoTransformer3DModel": {"in_channels": 8, "out_channels": 8},
    "LTX2VideoTransformer3DModel": {
        "in_channels": LATENT,
        "out_channels": LATENT,
        "audio_in_channels": 4,
        "audio_out_channels": 4,
        "audio_num_attention_heads": 2,
        "audio_attention_head_dim": 4,
        "audio_cross_attention_dim": 8,
        "num_layers": 2,
    },
    "Lumina2Transformer2DModel": {"axes_dim_rope": (4, 2, 2), "axes_lens": (64, 32, 32)},
    "MotifVideoTransformer3DModel": {"in_channels": 2 * LATENT + 1, "image_embed_dim": WIDTH, "num_decoder_layers": 0},
    "MochiTransformer3DModel": {"in_channels": 12, "out_channels": None},
    "OmniGenTransformer2DModel": {
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "vocab_size": 1100,
        "rope_scaling": {"long_factor": [1.0] * 4, "short_factor": [1.0] * 4},
    },
    "PRXTransformer2DModel": {"axes_dim": [4, 4]},
    "QwenImageTransformer2DModel": {"out_channels": LATENT},
    **{f"SD3{name}": SD3 for name in ("Transformer2DModel", "ControlNetModel")},
    "SanaVideoTransformer3DModel": {"rope_max_seq_len": 32},
    "ZImageTransformer2DModel": {"axes_lens": [256, 32, 32]},
    "Ideogram4Transformer2DModel": {"llm_features_dim": 13 * WIDTH, "mrope_section": (2, 1, 1)},
    "Krea2Transformer2DModel": {"num_text_layers": 2},
    "AceStepTransformer1DModel": {"in_channels": 3 * LATENT, "audio_acoustic_hidden_dim": LATENT},
    "AceStepConditionEncoder": {
        "timbre_hidden_dim": LATENT,
        "num_lyric_encoder_hidden_layers": 1,
        "num_timbre_encoder_hidden_layers": 1,
    },
    "BriaFibo2Transformer2DModel": {
        "dim": 2 * WIDTH,
        "in_channels": LATENT,
        "cap_feat_dim": 3 * WIDTH,
        "injection_layer_ids": (0,),
        "axes_dims": (4, 6, 6),
        "perceiver_num_layers": 1,
    },
    "CosmosControlNetModel": {"model_channels": 2 * WIDTH, "n_controlnet_blocks": 1, "attention_head_dim": 16},
    "EasyAnimateTransformer3DModel": {
        "in_channels": LATENT,
        "out_channels": LATENT,
        "patch_size": 2,
        "attention_head_dim": 2 * HEAD,
        "sample_width": 8,
        "sample_height": 8,
    },
    "LTX2LatentUpsamplerModel": {"in_channels": LATENT, "mid_channels": 32, "num_blocks_per_stage": 1},
    "LongCatAudioDiTTransformer": {
        "dit_dim": WIDTH,
        "dit_depth": 1,
        "dit_heads": 2,
        "dit_text_dim": WIDTH,
        "latent_dim": LATENT,
    },
    "LTX2TextConnectors": {
        "text_proj_in_factor": 3,
        "video_connector_num_attention_heads": 2,
        "video_connector_attention_head_dim": HEAD,
        "video_connector_num_layers": 1,
        "video_connector_num_learnable_registers": 8,
        "audio_connector_num_attention_heads": 2,
        "audio_connector_attention_head_dim": HEAD,
        "audio_connector_num_layers": 1,
        "audio_connector_num_learnable_registers": 8,
    },
    "LuminaNextDiT2DModel": {"num_kv_heads": 1, "sample_size": 8},
    "NucleusMoEImageTransformer2DModel": {
        "num_layers": 2,
        "num_experts": 2,
        "moe_intermediate_dim": WIDTH,
        "capacity_factors": 2.0,
        "out_channels": LATENT,
        "dense_moe_strategy": "leave_first_block_dense",
    },
    "QwenImage21Transformer2DModel": {"axes_dims_rope": (2, 2, 4), "in_channels": LATENT, "out_channels": LATENT},
    "SanaWMTransformer3DModel": {
        "linear_head_dim": HEAD,
        "softmax_every_n": 1,
        "image_size": 32,
        "chunk_plucker_post_attn_blocks": 1,
        "chunk_plucker_channels": 2 * LATENT,
    },
    "StableAudio3DiTModel": {
        "io_channels": LATENT,
        "embed_dim": WIDTH,
        "cond_token_dim": WIDTH,
        "global_cond_dim": WIDTH,
        "local_add_cond_dim": LATENT + 1,
        "timestep_features_dim": WIDTH,
        "num_memory_tokens": 2,
    },
    "StableAudio3DurationEmbedder": {"output_dim": WIDTH, "fourier_dim": WIDTH},
    "WanAnimateTransformer3DModel": {
        "in_channels": 2 * LATENT + 4,
        "latent_channels": LATENT,
        "image_dim": WIDTH,
        "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8, "32": 8},
        "motion_encoder_size": 32,
        "motion_style_dim": WIDTH,
        "motion_dim": 2,
        "motion_encoder_dim": WIDTH,
        "face_encoder_hidden_dim": WIDTH,
        "face_encoder_num_heads": 2,
        "inject_face_latents_blocks": 1,
    },
}

# Settings of the UNet of Stable Diffusion XL, whose text encoders are side by side, and of the schedulers of all of them.
XL = {
    "cross_attention_dim": 2 * WIDTH,
    "use_linear_projection": True,
    "transformer_layers_per_block": (1, 2),
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 6 * 4 + WIDTH,
}
BETAS: dict[str, Any] = {
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "steps_offset": 1,
    "timestep_spacing": "leading",
}


def network_settings(kind: type, further: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a tiny network of a class: `further`, then the table's, then the rules'."""
    defaults = {name: entry.default for name, entry in inspect.signature(kind.__init__).parameters.items()}  # type: ignore[misc]
    known = {**TRANSFORMERS.get(kind.__name__, {}), **further}
    settings: dict[str, Any] = {
        name: value for pattern, value in RULES for name in defaults if re.fullmatch(pattern, name) is not None
    }
    for name in AXES:
        if defaults.get(name):
            count = len(defaults[name])
            settings[name] = type(defaults[name])({2: (4, 4), 3: (2, 2, 4), 4: (2, 2, 2, 2)}[count])
    for name in CHANNELS:
        if isinstance(defaults.get(name), int):
            settings[name] = PACKED if defaults[name] >= 64 else LATENT
    # What is None by default is an input that the class can do without.
    return {**{name: value for name, value in settings.items() if defaults[name] is not None}, **known}
