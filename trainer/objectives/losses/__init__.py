"""Losses per token, each in a file of its own. registry.py lists them."""
