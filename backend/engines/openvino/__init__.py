"""Targets and drafts on CPUs with OpenVINO's kernels: paged attention over our own block tables."""
