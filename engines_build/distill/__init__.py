"""Drafts distilled from a target, and the texts that they are trained on."""
