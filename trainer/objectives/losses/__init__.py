"""Losses per token, one per file. They are listed in registry.py."""
