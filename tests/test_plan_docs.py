"""What docs/scaling.md shows of plans for GPUs is what the command prints (the page leaves lines out and wraps others)."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from transformers import Qwen2Config

from tinyllm.commands.cli import main

PAGE = (Path(__file__).parent.parent / "docs" / "scaling.md").read_text()
SHOWN = [
    block for block in re.findall(r"```\n(.*?)```", PAGE, flags=re.S) if block.startswith("$ tinyllm plan --model")
]
SHAPES = {  # as in the models' published config.json
    "Qwen/Qwen2.5-1.5B-Instruct": (1536, 8960, 28, 12, 2, 151936, True),
    "Qwen/Qwen2.5-7B-Instruct": (3584, 18944, 28, 28, 4, 152064, False),
    "Qwen/Qwen2.5-32B-Instruct": (5120, 27648, 64, 40, 8, 152064, False),
}


def variables():
    """H100 and JOB of the page."""
    return dict(re.findall(r'^(\w+)="([^"]*)"$', PAGE, flags=re.M))


@pytest.mark.parametrize("shown", SHOWN, ids=range(len(SHOWN)))
def test_a_plan_of_the_page_is_what_the_command_prints(shown, tmp_path, monkeypatch, capsys):
    line, _, printed = shown.replace("\\\n", " ").removeprefix("$ tinyllm ").partition("\n")
    for name, text in variables().items():
        line = line.replace(f"${name}", text)
    words = shlex.split(line)
    name = words[words.index("--model") + 1]
    hidden, inner, layers, heads, groups, vocabulary, tied = SHAPES[name]
    Qwen2Config(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=groups, vocab_size=vocabulary, tie_word_embeddings=tied, max_position_embeddings=32768,
    ).save_pretrained(tmp_path / name)  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    assert main(words) == 0
    out = " ".join(capsys.readouterr().out.split())
    lines = [" ".join(line.split()) for line in printed.splitlines() if line.strip(" .")]
    assert len(lines) > 5 and [line for line in lines if line not in out] == []


def test_the_page_shows_plans():
    assert len(SHOWN) >= 5
