"""Original, non-diffusers names of tensors, as ComfyUI and kohya's trainers read them: of networks and of adapters."""
