"""Published EAGLE-3 heads: drafts of one decoder layer that read the target's hidden states."""
