"""Policy versions on their way from the trainer to the engines."""
