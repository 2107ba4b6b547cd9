"""The trained model: loading, packed forward passes, log-probs."""
