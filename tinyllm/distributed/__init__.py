"""Ranks that train together: who they are, FSDP2 shards, their shared run directory."""
