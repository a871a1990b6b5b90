"""Verifier family `math`: answers compared by value.

verifier    the family, its settings, and when math-verify is asked
tokens, reader    text -> tree
compare     equality of whole answers, by kind
value       equality of expressions: exact, or at fixed points
"""
