"""Parts that reward models share: preprocessing, loading of weights, towers, heads, and the score of texts."""
