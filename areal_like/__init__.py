"""Ground floor of areal_like: contracts, wire format, channels, pure rules. Imports no torch, no ray, no sglang."""

__version__ = "0.1.0"
