"""What a GPU that is available for a short time should settle."""
