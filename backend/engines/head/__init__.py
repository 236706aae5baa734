"""A draft that reads the target: a small recurrent network on the target's hidden states."""
