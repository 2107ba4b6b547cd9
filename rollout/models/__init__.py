"""Models that a workflow calls by name besides the policy, and roles of the policy."""
