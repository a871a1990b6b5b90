"""Sampling and verifying beside the training: a driver and its workers on Ray, and the source of steps they make."""
