"""Engines behind HTTP: the rollout client, dialects of servers, publishing weights to them, the canary."""
