"""The configuration of a run: its types, loading it from YAML and overrides, and what is derived from it."""
