"""The public Python API, which `areal_like` re-exports lazily; see docs/api/python.md."""
