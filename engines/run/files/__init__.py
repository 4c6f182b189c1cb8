"""Files of settings: reading one over a recipe, writing what differs, and complete examples."""
