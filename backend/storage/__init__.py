"""Files: the cache folder, what a model is made of, latency tables."""
