"""``spindle serve``: run the packaged tritonserver with this project's models and keep it running."""
