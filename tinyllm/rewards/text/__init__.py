"""Verifier families that read plain text in linear time, and where an answer stands in a text.

extract     Region: a rule that finds the answer
numbers     the grammar of numbers
format, arithmetic    families: the answer is the gold text; a number, tuple or time
instructions, constraints, languages    family: constraints in the style of IFEval
"""
