"""Bytes that a run takes on every device and in host memory, by formula: no torch, no device is asked."""
