"""``spindle serve``: run the packaged tritonserver with our models and keep it running."""
