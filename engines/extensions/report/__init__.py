"""Images, plots and progress of a run."""
