"""Maps the configuration to processes; the only package here that imports rollout, trainer and services."""
