"""Checks of the machine, the model and the user's code before a run starts."""
