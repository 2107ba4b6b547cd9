"""Factors on the loss of a token: importance weights and masks, each in a file of its own."""
