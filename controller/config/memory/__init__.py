"""Memory estimate: bytes that a run needs on every device and in host memory, by formula, without torch or a device."""
