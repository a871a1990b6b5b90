"""Tasks: where prompts and gold answers come from. load() makes the frozen prompts of a run; list_tasks() names
every task."""

from tinyllm.tasks.load import TaskData, list_tasks, load

__all__ = ["TaskData", "list_tasks", "load"]
