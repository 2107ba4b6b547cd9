"""Rewards to advantages, each in a file of its own. registry.py lists them."""
