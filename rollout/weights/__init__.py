"""Transfer of policy versions to the engines."""
