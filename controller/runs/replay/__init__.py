"""`areal-like replay` and `areal-like capsule`: recorded steps of a run again, compared bit for bit with the record."""
