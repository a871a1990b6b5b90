"""Verifier family `json`: JSON that a schema accepts.

verifier    the family: the schema's own faults, and validation of the answer
reader      strict RFC 8259
formats     what the schema keyword `format` checks
"""
