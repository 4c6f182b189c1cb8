"""Log of a run: samples, sounds, records, the line of its progress, trackers."""
