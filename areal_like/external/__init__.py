"""Models behind OpenAI-compatible endpoints that others run: judges, labellers, opponents, teachers."""
