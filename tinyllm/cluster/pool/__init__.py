"""Groups sampled and verified by workers of their own while the trainer trains: see driver.py first."""
