"""Batches for training: rows, packing and distribution over ranks."""
