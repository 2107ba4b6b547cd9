"""Recorded steps of a run again, with the trainer's own code."""
