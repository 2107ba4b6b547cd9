"""The transfers that come with this program, one descriptor each."""
