"""Maps the configuration to processes; the only code here that imports rollout, trainer and services."""
