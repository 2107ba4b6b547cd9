"""Built-in stages, one file each. registry.py lists them."""
