"""What a run writes and says: samples, sounds, records, the line of its progress, trackers."""
