"""The folder of a run: its files, where it is registered, and which host owns it."""
