"""Training from files, without rollouts: supervised steps, preferences, reward models."""
