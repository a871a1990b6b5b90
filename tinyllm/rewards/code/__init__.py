"""Verifier family `code`: programs run against tests in a sandbox.

verifier    the family: a row's tests, the submission's code, what its values must be
condition   conditions on a result, evaluated without Python's eval
sandbox     a fresh sandbox for each run (sandbox_guest: what runs in it; sandbox_limits, sandbox_seccomp: limits)
"""
