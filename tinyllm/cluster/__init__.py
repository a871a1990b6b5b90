"""Sampling on servers: the rollout client, the proof of what a server runs, and the ways to give it new weights."""
