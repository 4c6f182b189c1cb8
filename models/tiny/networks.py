"""Settings that make diffusers' transformers and VAEs tiny: rules for the names that most share, and a table of the rest.

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
        "axes_dims_rope": (4, 4),
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
    "MochiTransformer3DModel": {"in_channels": 12, "out_channels": None},
    "OmniGenTransformer2DModel": {
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "vocab_size": 1100,
        "rope_scaling": {"long_factor": [1.0] * 4, "short_factor": [1.0] * 4},
    },
    "PRXTransformer2DModel": {"axes_dim": [4, 4]},
    "QwenImageTransformer2DModel": {"out_channels": LATENT},
    "SD3Transformer2DModel": {},
    "SanaVideoTransformer3DModel": {"rope_max_seq_len": 32},
    "ZImageTransformer2DModel": {"axes_lens": [256, 32, 32]},
    "Krea2Transformer2DModel": {"num_text_layers": 2},
}

VAES: dict[str, dict[str, Any]] = {
    "AutoencoderKLWan": {
        "base_dim": 4,
        "z_dim": 4,
        "dim_mult": [1, 2],
        "num_res_blocks": 1,
        "temperal_downsample": [True],
        "latents_mean": [-0.7, 0.1, 0.4, -0.2],
        "latents_std": [2.8, 1.4, 0.8, 2.0],
        "scale_factor_temporal": 2,
        "scale_factor_spatial": 2,
    },
    "AutoencoderKLQwenImage": {
        "base_dim": 4,
        "z_dim": 4,
        "dim_mult": [1, 2],
        "num_res_blocks": 1,
        "temperal_downsample": [False],
        "latents_mean": [-0.7, 0.1, 0.4, 0.9],
        "latents_std": [2.8, 1.4, 0.6, 1.9],
    },
    "AutoencoderKLFlux2": {
        "block_out_channels": (4, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "latent_channels": 4,
        "norm_num_groups": 2,
        "layers_per_block": 1,
    },
    "AutoencoderKLLTXVideo": {
        "latent_channels": 8,
        "block_out_channels": (8,) * 4,
        "decoder_block_out_channels": (8,) * 4,
        "layers_per_block": (1,) * 5,
        "decoder_layers_per_block": (1,) * 5,
        "spatio_temporal_scaling": (True, True, False, False),
        "decoder_spatio_temporal_scaling": (True, True, False, False),
        "patch_size": 1,
    },
    "AutoencoderKLLTX2Video": {
        "latent_channels": 4,
        "block_out_channels": (8,),
        "decoder_block_out_channels": (8,),
        "down_block_types": ("LTX2VideoDownBlock3D",),
        "layers_per_block": (1,),
        "decoder_layers_per_block": (1, 1),
        "spatio_temporal_scaling": (True,),
        "decoder_spatio_temporal_scaling": (True,),
        "decoder_inject_noise": (False, False),
        "downsample_type": ("spatial",),
        "upsample_type": ("spatiotemporal",),
        "upsample_residual": (False,),
        "upsample_factor": (1,),
        "patch_size": 1,
    },
    "AutoencoderKLLTX2Audio": {
        "base_channels": 4,
        "ch_mult": (1,),
        "num_res_blocks": 1,
        "resolution": 32,
        "latent_channels": 2,
        "mel_bins": 8,
    },
    "AutoencoderKLHunyuanVideo": {
        "latent_channels": 4,
        "block_out_channels": (8,) * 4,
        "layers_per_block": 1,
        "norm_num_groups": 4,
    },
    "AutoencoderKLHunyuanVideo15": {
        "latent_channels": 4,
        "block_out_channels": (16, 16),
        "layers_per_block": 1,
        "spatial_compression_ratio": 4,
        "temporal_compression_ratio": 2,
        "downsample_match_channel": False,
        "upsample_match_channel": False,
    },
    "AutoencoderKLHunyuanImage": {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 4,
        "block_out_channels": (32, 64, 64, 64),
        "layers_per_block": 1,
        "spatial_compression_ratio": 8,
        "sample_size": 32,
        "scaling_factor": 0.75,
    },
    "AutoencoderKLMochi": {
        "encoder_block_out_channels": (32,) * 4,
        "decoder_block_out_channels": (32,) * 4,
        "layers_per_block": (1,) * 5,
    },
    "AutoencoderDC": {
        "latent_channels": 4,
        "attention_head_dim": 2,
        "scaling_factor": 0.5,
        **{
            f"{side}_{name}": value
            for side in ("encoder", "decoder")
            for name, value in [
                ("block_types", ("ResBlock", "ResBlock")),
                ("block_out_channels", (4, 8)),
                ("qkv_multiscales", ((), ())),
                ("layers_per_block", (1, 1)),
            ]
        },
    },
    "LTX2Vocoder": {
        "in_channels": 16,
        "hidden_channels": 32,
        "upsample_kernel_sizes": [4, 4],
        "upsample_factors": [2, 2],
        "resnet_kernel_sizes": [3],
        "resnet_dilations": [[1, 3, 5]],
        "output_sampling_rate": 16000,
    },
}


def transformer_settings(kind: type, further: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a tiny transformer of a class: `further`, then the table's, then the rules'."""
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
