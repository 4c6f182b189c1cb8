"""Records, images, sounds, progress and trackers of a run."""
