"""The frozen suite: tasks with prompts and verifier, under one hash; and the smallest difference that it can show.

A task's prompts are the held-out side of a generated task, or all rows of a file. The id of a prompt
is the hash of its row, the same for every model and tokenizer, so two models are compared prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tinyllm import rewards, stats, tasks
from tinyllm.config.sections import DataConfig, GRPOConfig, RewardConfig
from tinyllm.errors import ConfigError, DataError, nearest
from tinyllm.evals.config import SuiteConfig
from tinyllm.model import models
from tinyllm.record.hashing import hash_json
from tinyllm.records import Prompt
from tinyllm.tasks.files import COLUMNS
from tinyllm.tasks.recipes import RECIPES

NO_LIMIT = 2**31
DISCORDANCES = (0.1, 0.2, 0.3, 0.5)
"""Shares of prompts on which two models differ, for `plan`."""


class PlainTokenizer:
    """For servers, --plan and training rows, where no tokenizer is loaded: a token is a byte of the plain text."""

    chat_template = "plain"
    eos_token, eos_token_id, bos_token_id = "", -1, -1

    def __call__(self, text: str, **_: Any) -> Any:
        return type("Encoding", (), {"input_ids": list(text.encode())})

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return bytes(ids).decode()

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **_: Any) -> str:
        return "\n\n".join(message["content"] for message in messages)


@dataclass(frozen=True)
class Task:
    """One task of the suite, as chat messages."""

    name: str
    config: DataConfig
    data: tasks.TaskData
    prompts: tuple[Prompt, ...]
    repeated: int
    """Rows left out because an equal row stands before them."""

    def read_by(self, tokenizer: Any | None, ids: Collection[str]) -> tuple[Prompt, ...]:
        """The prompts of these ids as a model reads them; None: a server, which has its own tokenizer and template.

        Raises DataError for a prompt over data.max_prompt_tokens, unless data.on_bad_row is skip.
        """
        found = []
        for prompt in self.prompts:
            assert prompt.messages is not None, prompt.id
            if prompt.id not in ids:
                continue
            asked, first = prompt.row["prompt"], prompt.messages[0]
            added = len(prompt.messages) > (1 if isinstance(asked, str) else len(asked))
            system = first["content"] if added else None
            reader = tokenizer or PlainTokenizer()
            try:
                text, token_ids = models.render(reader, asked, self.config.prompt_rule, system)
                if tokenizer is not None and len(token_ids) > self.config.max_prompt_tokens:
                    limit = self.config.max_prompt_tokens
                    raise DataError(f"{len(token_ids)} tokens, over data.max_prompt_tokens = {limit}; raise the limit")
            except DataError as error:
                if self.config.on_bad_row == "skip":
                    continue
                raise DataError(f"{self.name}, prompt {prompt.id}: {error}") from None
            rule = self.config.prompt_rule
            chat = rule == "chat" or (rule == "auto" and bool(getattr(reader, "chat_template", None)))
            ids_read = token_ids if tokenizer is not None else ()
            found.append(replace(prompt, token_ids=ids_read, text=text, messages=prompt.messages if chat else None))
        return tuple(found)


def task_configs(config: SuiteConfig) -> list[DataConfig]:
    """One data section per task; beside rows of one's own, a task is the recipe that reads them. Raises ConfigError."""
    data = config.data
    own = data.file or data.dataset
    if own and len(config.task) == 1 and config.task[0] in RECIPES:
        return [replace(data, task=config.task[0])]
    if own and config.task:
        raise ConfigError(f"--task {','.join(config.task)} and --data {own} are two suites; give one of them")
    if len(set(config.task)) < len(config.task):
        raise ConfigError(f"--task {','.join(config.task)} names a task twice")
    return [data] if own or not config.task else [replace(data, task=name) for name in config.task]


def load_task(config: SuiteConfig, data: DataConfig, reward: RewardConfig, of_run: str | None = None) -> Task:
    """A task's prompts and rows, each row tested against the verifier. Raises DataError, RewardError.

    of_run names the run whose own held-out prompts these must be.
    """
    as_chat = replace(data, prompt_rule="chat", max_prompt_tokens=NO_LIMIT)
    loaded = tasks.load(GRPOConfig(data=as_chat, reward=reward), PlainTokenizer())
    own_rows = bool(data.file or data.dataset) and not data.held_out
    if of_run and own_rows:
        raise DataError(f"{of_run} kept no held-out prompts; name a suite with --task, or --data FILE --verifier SPEC")
    side = loaded.train if own_rows else loaded.held_out
    if not side:
        raise DataError(f"{loaded.name} has no held-out prompts; raise --data.held_out, or leave it at 0")
    unique: dict[str, Prompt] = {}
    for prompt in side:
        unique.setdefault(hash_json(prompt.row), prompt)
    prompts = tuple(unique.values())[: config.prompts or None]
    return Task(loaded.name, data, loaded, prompts, len(side) - len(unique))


def task_hash(task: Task, judge: rewards.RewardJudge) -> str:
    """Hash of a task: its prompts in order, the rule and system prompt that render them, and the verifier."""
    asked = [task.config.prompt_rule, task.config.system_prompt, [prompt.id for prompt in task.prompts]]
    return hash_json([asked, rewards.verifier_hash(judge.parts), judge.combine])


def cluster_labels(prompts: Sequence[Prompt], column: str | None) -> dict[str, Hashable]:
    """Prompt id -> its cluster: the hash of the column's value, else of the prompt's own text. Raises DataError."""
    labels: dict[str, Hashable] = {}
    for prompt in prompts:
        if column is not None and column not in prompt.row:
            raise DataError(
                f"--clusters {column}: prompt {prompt.id} has no such column; {nearest(column, prompt.row, COLUMNS)}"
            )
        labels[prompt.id] = hash_json(prompt.row["prompt"] if column is None else prompt.row[column])
    return labels


# Before any compute is spent


def plan(config: SuiteConfig, reward: Callable[..., Any] | None = None) -> list[dict[str, Any]]:
    """Per task (and for all of them): how small a difference of two models it can show, and what a wished one needs.

    No model is loaded. Each row: task, prompts, clusters, samples, half_width (of the interval of an accuracy of one
    half), difference (the wished one), and by_discordance: [share of prompts on which single samples of the two models
    differ, smallest difference detected with 80% power at the 5% level, prompts needed for the wished one].
    """
    judged = config.reward if reward is None else replace(config.reward, functions=(reward,))  # type: ignore[arg-type]
    loaded = [load_task(config, data, judged) for data in task_configs(config)]
    rows = [(task.name, cluster_labels(task.prompts, config.clusters)) for task in loaded]
    if len(rows) > 1:
        rows.append(("all", {key: label for _, labels in rows for key, label in labels.items()}))
    return [_planned(name, labels, config) for name, labels in rows]


def _planned(name: str, labels: dict[str, Hashable], config: SuiteConfig) -> dict[str, Any]:
    samples = config.answer.samples
    count = len(set(labels.values()))
    low, high = stats.wilson(count / 2, count)
    table = [
        [
            share,
            stats.detectable_difference(count, share, samples),
            stats.prompts_needed(config.difference, share, samples),
        ]
        for share in DISCORDANCES
    ]
    return {
        "task": name,
        "prompts": len(labels),
        "clusters": count,
        "samples": samples,
        "half_width": (high - low) / 2,
        "difference": config.difference,
        "by_discordance": table,
    }
