"""Checkpoints, exports, and conversions between them."""
