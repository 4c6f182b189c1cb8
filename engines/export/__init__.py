"""Exports of weights and adapters in the formats of diffusers and ComfyUI, each with a model card."""
