"""Loss and advantages."""
