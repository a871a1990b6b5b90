"""Verifier family `code`: programs run against tests in a sandbox."""
