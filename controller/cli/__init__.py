"""Command line: arguments, the commands that start something, and the two generated pages."""
