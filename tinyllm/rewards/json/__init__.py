"""Verifier family `json`: the answer is a JSON document that the row's schema accepts.

verifier    the family: checks of the schema, and validation of the answer
reader      a strict reader of RFC 8259
formats     checks of the schema keyword `format`
"""
