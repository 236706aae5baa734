"""The policy inside another engine's loop: vLLM's, TensorRT-LLM's. ``adapter`` is what they share;
each host's own names are in its own module, which nothing else imports.
"""
