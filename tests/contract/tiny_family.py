"""The chat template of the shipped tiny family."""


def as_message(text):
    """The text before the answer to one message."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
