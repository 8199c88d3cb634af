"""Headrace runs language models larger than memory by streaming their weights from disk."""

__version__ = "0.1.0"
