"""Verifier families that read plain text: format, arithmetic, instructions; where an answer stands in a text."""
