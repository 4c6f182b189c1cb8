"""Settings that make diffusers' autoencoders and vocoders tiny: rules for the names that most share, a table of the rest."""

import inspect
from typing import Any

from fluvial.models.tiny.networks import LATENT

CHANNELS = 32  # of every block; a multiple of the 32 groups that some have built in

AUTOENCODERS: dict[str, dict[str, Any]] = {
    "AutoencoderOobleck": {
        "encoder_hidden_size": 2 * LATENT,  # mean and scale
        "downsampling_ratios": [2, 4],
        "channel_multiples": [1, 2],
        "decoder_channels": 4,
        "decoder_input_channels": LATENT,
        "sampling_rate": 400,
    },
    "AutoencoderSAME": {
        "patch_size": 4,
        "encoder_channels": 8,
        "encoder_c_mults": (1,),
        "encoder_strides": (2,),
        "encoder_transformer_depths": (1,),
        "latent_dim": LATENT,
        "dim_heads": 4,
        "sampling_rate": 400,
    },
    "LongCatAudioDiTVae": {
        "channels": 8,
        "c_mults": [1, 1],
        "strides": [2, 2],
        "latent_dim": LATENT,
        "encoder_latent_dim": 2 * LATENT,
        "downsampling_ratio": 4,
        "sample_rate": 400,
    },
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


# Settings where a pipeline has the factor between the sizes of images and latents built in.
FACTOR_16 = {"dim_mult": [1] * 5, "temperal_downsample": [False] * 4, "scale_factor_spatial": 16}
BUILT_IN: dict[str, dict[str, Any]] = {"BriaFiboPipeline": FACTOR_16, "BriaFiboEditPipeline": FACTOR_16}


def autoencoder_settings(kind: type, pipeline: str) -> dict[str, Any]:
    """Return the settings of a pipeline's tiny autoencoder of a class: those of tables, else by rules for their names."""
    defaults = {name: entry.default for name, entry in inspect.signature(kind.__init__).parameters.items()}  # type: ignore[misc]
    by_rule = {name: _setting(name, default) for name, default in defaults.items()}
    known = AUTOENCODERS.get(kind.__name__, {name: value for name, value in by_rule.items() if value is not None})
    return {**known, **BUILT_IN.get(pipeline, {})}


def _setting(name: str, default: Any) -> Any:
    """Return the tiny value of a setting; None where the default stays."""
    if default is None or default is inspect.Parameter.empty:
        return None
    if name.endswith("block_out_channels"):
        return type(default)([CHANNELS] * len(default))
    if name.endswith("layers_per_block"):
        return 1 if isinstance(default, int) else type(default)([1] * len(default))
    if name in ("latents_mean", "latents_std"):
        return [1.2, 0.8, 1.6, 0.9] if name == "latents_std" else [-0.2, 0.1, 0.4, -0.1]
    fixed = {
        **dict.fromkeys(("latent_channels", "z_dim", "latent_dim", "base_dim", "decoder_base_dim"), LATENT),
        "norm_num_groups": 4,
        "num_res_blocks": 1,
    }
    return fixed.get(name)
