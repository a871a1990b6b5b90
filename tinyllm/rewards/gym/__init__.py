"""Verifier family `gym`: the tasks of reasoning-gym, judged by our own readers.

verifier    the family
checks      one check per data set
readers     arithmetic and propositional logic
"""
