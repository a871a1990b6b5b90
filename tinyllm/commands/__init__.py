"""The command `tinyllm`: one module a command, cli.py chooses."""
