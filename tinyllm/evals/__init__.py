"""Evaluation: a frozen suite, one or several models, accuracy with intervals, paired comparisons, a record of it all.

config.py what can be set, suite.py the prompts and the verifier, server.py a model behind HTTP,
overlap.py training prompts in the suite, measure.py the numbers, run.py from one to the other, view.py table and plot,
command.py the command line.
"""
