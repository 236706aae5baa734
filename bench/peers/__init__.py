"""Spindle beside other stacks, with the same weights and prompts."""
