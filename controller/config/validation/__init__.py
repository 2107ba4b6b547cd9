"""Checks of a configuration that concern more than one field, by subject."""
