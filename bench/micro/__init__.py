"""Single parts, each measured by itself."""
