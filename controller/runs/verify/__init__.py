"""Checks a run against what it recorded: `areal-like verify`, `areal-like blame`, `areal-like samples --life`."""
