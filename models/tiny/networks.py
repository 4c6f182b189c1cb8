"""Settings that make diffusers' transformers and the networks beside them tiny: rules for shared names, a table of the rest.

All widths are 16 (two heads of 8), latents have 4 channels, and 16 where a pipeline packs 2 x 2 of them into a token.
"""

import inspect
from typing import Any

WIDTH, HEAD, LATENT, PACKED = 16, 8, 4, 16

# Values of settings by name, whatever the class.
RULES: dict[str, Any] = {
    **dict.fromkeys(
        (
            "num_layers",
            "num_single_layers",
            "num_hidden_layers",
            "n_layers",
            "num_refiner_layers",
            "n_refiner_layers",
            "num_mmdit_layers",
            "num_single_dit_layers",
            "num_text_blocks",
            "num_visual_blocks",
            "mmdit_layers",
            "depth",
            "num_layerwise_text_blocks",
            "num_refiner_text_blocks",
            "approximator_layers",
        ),
        1,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_heads",
            "num_heads",
            "n_kv_heads",
            "num_cross_attention_heads",
            "text_num_attention_heads",
            "num_routed_experts",
        ),
        2,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "text_num_key_value_heads", "num_activated_experts"), 1),
    **dict.fromkeys(
        ("attention_head_dim", "head_dim", "cross_attention_head_dim", "condition_dim", "timestep_guidance_channels"), HEAD
    ),
    **dict.fromkeys(
        (
            "hidden_size",
            "dim",
            "model_dim",
            "cross_attention_dim",
            "joint_attention_dim",
            "pooled_projection_dim",
            "caption_projection_dim",
            "caption_channels",
            "text_dim",
            "text_embed_dim",
            "text_emb_dim",
            "text_in_dim",
            "text_hidden_dim",
            "text_encoder_dim",
            "in_text_dim",
            "in_text_dim2",
            "cap_feat_dim",
            "context_in_dim",
            "time_dim",
            "time_embed_dim",
            "timestep_embed_dim",
            "time_step_dim",
            "freq_dim",
            "adaln_dim",
            "adaln_lora_dim",
            "approximator_num_channels",
            "approximator_hidden_dim",
            "image_embed_dim",
            "multiple_of",
        ),
        WIDTH,
    ),
    **dict.fromkeys(("ffn_dim", "ff_dim", "ffn_hidden_size", "intermediate_size", "text_intermediate_size"), 2 * WIDTH),
    **dict.fromkeys(("pos_embed_max_size", "sample_size", "rope_max_seq_len"), 32),
}
AXES = ("axes_dims_rope", "axes_dim_rope", "axes_dims", "rope_axes_dim", "rope_dim_list")
CHANNELS = ("in_channels", "out_channels", "in_visual_dim", "out_visual_dim")

SD3 = {"joint_attention_dim": 2 * WIDTH, "pooled_projection_dim": 2 * WIDTH, "num_layers": 2, "pos_embed_max_size": 32}

# Further settings by class, which come before the rules.
TRANSFORMERS: dict[str, dict[str, Any]] = {
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


def network_settings(kind: type, further: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a tiny network of a class: `further`, then the table's, then the rules'."""
    defaults = {name: entry.default for name, entry in inspect.signature(kind.__init__).parameters.items()}  # type: ignore[misc]
    known = {**TRANSFORMERS.get(kind.__name__, {}), **further}
    settings = {name: value for name, value in RULES.items() if name in defaults}
    for name in AXES:
        if defaults.get(name):
            count = len(defaults[name])
            settings[name] = type(defaults[name])({2: (4, 4), 3: (2, 2, 4), 4: (2, 2, 2, 2)}[count])
    for name in CHANNELS:
        if isinstance(defaults.get(name), int):
            settings[name] = PACKED if defaults[name] >= 64 else LATENT
    # What is None by default is an input that the class can do without.
    return {**{name: value for name, value in settings.items() if defaults[name] is not None}, **known}
