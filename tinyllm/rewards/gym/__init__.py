"""Verifier family `gym`: the tasks of reasoning-gym, judged by our own readers."""
