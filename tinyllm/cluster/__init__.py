"""More than one process: sampling on servers (client, publishing, canary), and ranks that train together (FSDP2)."""
