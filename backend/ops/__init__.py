"""Metrics, request traces and switches for operators."""
