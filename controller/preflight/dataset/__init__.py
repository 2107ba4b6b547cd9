"""Checks and cleans files of rows in one streaming pass, and describes them: `areal-like data`.

A stage (port.py) decides whether a row is removed, cleaning.py runs all stages over a file, output.py writes the new
set, card.py describes one. Built-in stages are in stages/, one file each.
"""
