"""Advice on speculation for servers that others run: how many tokens to speculate at which load."""


class AdviceError(Exception):
    """A reason why there is no advice, with its cure. Its text never quotes a request."""
