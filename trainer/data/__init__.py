"""Rows: where they come from, how they are drawn, and how long answers are."""
