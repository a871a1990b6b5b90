"""Verifier family `json`: JSON that a schema accepts."""
