"""Spindle against other stacks, with the same weights and prompts."""
