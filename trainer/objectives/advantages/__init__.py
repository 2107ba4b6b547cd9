"""Functions that compute advantages from rewards, one per file. They are listed in trainer/objectives/registry.py."""
