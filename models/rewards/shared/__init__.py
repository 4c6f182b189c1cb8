"""What several reward models are made of: preprocessing, loading of weights, towers, heads, and the score of texts."""
