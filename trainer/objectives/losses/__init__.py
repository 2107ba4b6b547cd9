"""Losses per token, one per file. They are listed in trainer/objectives/registry.py."""
