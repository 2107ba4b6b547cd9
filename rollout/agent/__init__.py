"""Agents: programs of the user's, that reach the policy by an address with OpenAI's and Anthropic's APIs."""
