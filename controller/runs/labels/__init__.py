"""Rows whose label is likely wrong: `areal-like data labels` and `areal-like data relabel`."""
