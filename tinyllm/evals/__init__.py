"""Evaluation: a frozen suite, one or several models, accuracy with intervals, paired comparisons, and their record.

config    the options
suite     prompts and verifier
overlap, training   training prompts that stand in the suite
measure, summary    the numbers, and eval.json
run       evaluate(): from a suite and models to the record and the numbers
view      tables and plot
"""
