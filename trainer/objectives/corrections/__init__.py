"""Factors on the loss of a token: importance weights and masks, one per file."""
