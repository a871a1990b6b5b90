"""The run directory: hashes, durable files, manifest, rollouts (Parquet), checkpoints, the comparison of two runs."""
