"""What a configuration of GRPO takes: memory of each device, seconds of each hop, from measured or given rates."""
