"""Transfer of policy versions from the trainer to the engines."""
