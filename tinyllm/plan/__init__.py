"""Memory of each device and seconds of each hop of a GRPO configuration, from measured or given rates."""
