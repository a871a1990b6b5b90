"""Verifier families that read plain text in linear time, and the rules that find an answer in a text.

extract     Region: a rule that finds the answer
numbers     the grammar of numbers
format      family: the answer is the gold text
arithmetic  family: the answer is a number, tuple or time
instructions, constraints, languages    family: constraints in the style of IFEval
"""
