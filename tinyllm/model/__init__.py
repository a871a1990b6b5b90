"""Causal language models: find, check, load, prompt, save, merge; what they need of memory."""
