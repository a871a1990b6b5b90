"""Verifier family `math`: answers compared by value."""
