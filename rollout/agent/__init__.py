"""Agents: users' programs that call the policy at an address with the APIs of OpenAI and Anthropic."""
