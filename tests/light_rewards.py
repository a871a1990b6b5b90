"""Reward functions in a module that imports nothing heavy, for worker processes."""


def many_digits(completions, **_):
    """The share of digits in a completion, so that most groups have members that differ."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def few_digits(completions, **_):
    return [-x for x in many_digits(completions)]
