"""Losses, corrections and advantages compared on identical data, by staleness (docs/decisions/0111)."""
