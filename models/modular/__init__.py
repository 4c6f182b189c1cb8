"""Models of diffusers' Modular Pipelines, whose denoiser block is called apart."""
