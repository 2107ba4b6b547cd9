"""Models that a workflow calls by name in addition to the policy, and roles of the policy."""
