"""Agents: programs of the user's, in any language, that reach the policy by an OpenAI-compatible address."""
