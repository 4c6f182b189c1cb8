"""What a person sees of a run: images, plots, progress."""
