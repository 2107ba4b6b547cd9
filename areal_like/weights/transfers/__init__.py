"""The built-in weight transfers, one descriptor each."""
