"""The answer's region: the part of a completion that holds the answer by the task's rule, found in linear time.

A completion without the region has no answer; no other rule is tried.

    completion -> cut at end-of-turn and stop -> after the last closed think block -> the rule's region -> answer text

Rules: tag (<answer>..</answer>), boxed (\\boxed{..}), hash (a line "#### N"), marker ("Answer: X" to the end of its
line), final (the last statement of free text), last_number (of a finished completion), exact_format (nothing but the
tags), whole.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from dataclasses import dataclass
from typing import Literal, get_args

from tinyllm.errors import RewardError
from tinyllm.rewards.text.numbers import last_number

Rule = Literal["tag", "boxed", "hash", "marker", "final", "last_number", "exact_format", "whole"]
RULES: tuple[Rule, ...] = get_args(Rule)

END_OF_TURN = (
    "<|im_end|> <|endoftext|> <|eot_id|> <|end_of_text|> <|end|> <|return|> <end_of_turn> <|eot|> <|eom_id|> "
    "<|END_OF_TURN_TOKEN|> <eos> <\uff5cend\u2581of\u2581sentence\uff5c> </s>"
).split()
"""End-of-turn tokens as text; text after one is not part of the answer."""
_END = re.compile("|".join(map(re.escape, END_OF_TURN)))
_BOX = re.compile(r"\\(boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_HASH = re.compile(r"^[ \t]*####(?!#)(.*)$", re.MULTILINE)
_STATED = re.compile(r"\b(?:final answer|answer)\b[ *_]{0,4}(?::|\bis\b(?: not\b)?)[ *_:]{0,8}", re.IGNORECASE)
_MATH_MARKS = {"$$": "$$", "$": "$", "\\(": "\\)", "\\[": "\\]"}
_MATH_MARK = re.compile(r"\\[$\\]|\$\$|\$|\\[()\[\]]")
_JOIN = re.compile(r"[\s,;]*(?:or|and|,|;|/)[\s,;]*(?:or|and)?[\s]*", re.IGNORECASE)


@dataclass(frozen=True)
class Region:
    """A rule that finds the answer in a completion, with its settings."""

    rule: Rule = "tag"
    tag: str = "answer"
    """Name of the tag (rule tag)."""
    which: Literal["one", "last"] = "one"
    """one: there must be exactly one block; last: the last block counts (rule tag)."""
    boxes: tuple[str, ...] = ("boxed",)
    """TeX commands that mark the answer: boxed, fbox (rule boxed)."""
    agree: bool = False
    """Whether all boxes must hold the same text; in any case the last box is the answer (rule boxed)."""
    marker: str = "Answer:"
    """Text before the answer (rule marker); the answer is the rest of the line after the last marker."""
    tags: tuple[str, ...] = ("think", "answer")
    """The blocks that the whole output must consist of, in order (rule exact_format); the last holds the answer."""
    think_prefilled: bool = False
    """Whether the prompt already ends in <think>."""
    stop: str | None = None
    """A stop string: text after its first occurrence is not part of the output."""

    def __post_init__(self) -> None:
        for name in ("tag", "marker"):
            if not getattr(self, name).strip():
                raise RewardError(f"{name} is empty; give the text that marks the answer")
        for box in self.boxes:
            if box not in ("boxed", "fbox"):
                raise RewardError(f"boxes has {box!r}; choose from boxed, fbox")
        if not self.tags or not self.boxes:
            raise RewardError(f"{'tags' if self.boxes else 'boxes'} is empty; name at least one")

    @property
    def reads_end(self) -> bool:
        """Whether the rule reads the end of the text, so that a completion cut by the length limit has no answer."""
        return self.rule in ("last_number", "final")

    def find(self, text: str) -> tuple[str | None, str]:
        """(answer, ""), or (None, the reason why there is none). Takes time linear in the text's length."""
        text = cut(text, self.stop)
        if self.rule == "exact_format":
            return self._exact(text)
        if self.rule != "last_number":
            text = after_think(text, self.think_prefilled)
        answer, why = getattr(self, f"_{self.rule}")(text)
        if answer is not None and not answer.strip():
            return None, "the answer is empty"
        return answer, why

    def write(self, answer: str) -> str:
        """A completion in which the rule finds this answer; self-tests use it to state a gold."""
        body = {
            "tag": f"<{self.tag}>{answer}</{self.tag}>",
            "boxed": f"\\{self.boxes[0]}{{{answer}}}",
            "hash": f"#### {answer}",
            "marker": f"{self.marker} {answer}",
            "exact_format": "",
        }.get(self.rule, answer)
        if self.rule == "exact_format":
            tags = self.tags[1:] if self.think_prefilled and self.tags[0] == "think" else self.tags
            parts = [f"<{tag}>{answer if tag == tags[-1] else ''}</{tag}>" for tag in tags]
            return ("</think>" if tags != self.tags else "") + "".join(parts)
        return f"</think>{body}" if self.think_prefilled else body

    def _whole(self, text: str) -> tuple[str | None, str]:
        return text.strip(), ""

    def _tag(self, text: str) -> tuple[str | None, str]:
        opening, closing = f"<{self.tag}>", f"</{self.tag}>"
        opened, closed = text.count(opening), text.count(closing)
        if not opened or not closed:
            return None, f"no {opening} block"
        if self.which == "one" and (opened, closed) != (1, 1):
            return None, f"{max(opened, closed)} {opening} blocks where one is asked"
        end = text.rfind(closing)
        start = text.rfind(opening, 0, end)
        if start < 0 or text.find(opening, end) >= 0:
            return None, f"the last {opening} block is not closed"
        inside = text[start + len(opening) : end]
        return (None, f"{closing} without {opening}") if closing in inside else (inside, "")

    def _boxed(self, text: str) -> tuple[str | None, str]:
        found: list[tuple[int, int] | None] = []  # by the place where each box starts; None while it is open
        stack: list[tuple[int, int]] = []  # (index in found or -1, where the content starts)
        for match in _BOX.finditer(text):
            if match[1]:
                stack.append((len(found), match.end()) if match[1] in self.boxes else (-1, 0))
                if match[1] in self.boxes:
                    found.append(None)
            elif match[0] == "{":
                stack.append((-1, 0))
            elif match[0] == "}" and stack:
                index, start = stack.pop()
                if index >= 0:
                    found[index] = start, match.start()
        if not found:
            return None, f"no \\{self.boxes[0]}{{}}"
        if found[-1] is None:
            return None, f"the last \\{self.boxes[0]} is not closed"
        last = text[slice(*found[-1])]
        if self.agree and not all(span and text[slice(*span)].strip() == last.strip() for span in found):
            return None, "the boxes differ"
        return last, ""

    def _hash(self, text: str) -> tuple[str | None, str]:
        lines = _HASH.findall(text)
        return (lines[-1].strip(), "") if lines else (None, "no line '#### ...'")

    def _marker(self, text: str) -> tuple[str | None, str]:
        start = text.rfind(self.marker)
        if start < 0:
            return None, f"no {self.marker!r}"
        return text[start + len(self.marker) :].split("\n", 1)[0].strip(), ""

    def _last_number(self, text: str) -> tuple[str | None, str]:
        number = last_number(text)
        return number, "" if number else "no number at the end"

    def _final(self, text: str) -> tuple[str | None, str]:
        """The rest of the line after the last "answer is" or "answer:", else the last line that is not blank."""
        last = deque(_STATED.finditer(text), maxlen=1)
        if last:
            negated = last[0][0].lower().rstrip(" *_:").endswith(" not")  # "is not 72": keep the "not"
            text = text[last[0].end() - (4 if negated else 0) :].split("\n", 1)[0]
        else:
            text = text.rstrip().rpartition("\n")[2]
        return text.strip(), ""

    def _exact(self, text: str) -> tuple[str | None, str]:
        tags = self.tags
        if self.think_prefilled and tags[0] == "think":
            text = "<think>" + text
        rest = text.strip()
        for tag in tags:
            if text.count(f"<{tag}>") != 1 or text.count(f"</{tag}>") != 1:
                return None, f"not exactly one <{tag}> block"
        inside = ""
        for tag in tags:
            if not rest.startswith(f"<{tag}>"):
                return None, f"<{tag}> does not come next"
            inside, closed, rest = rest[len(tag) + 2 :].partition(f"</{tag}>")
            if not closed or any(f"<{other}>" in inside or f"</{other}>" in inside for other in tags):
                return None, f"<{tag}> is not closed"
            rest = rest.strip()
        if rest:
            return None, "text after the last block"
        return (inside, "") if inside.strip() else (None, "the answer is empty")


def cut(text: str, stop: str | None = None) -> str:
    """The text before the first end-of-turn token, up to and including the first `stop`."""
    end = _END.search(text)
    if end:
        text = text[: end.start()]
    at = text.find(stop) if stop else -1
    return text if at < 0 else text[: at + len(stop or "")]


def after_think(text: str, prefilled: bool = False) -> str:
    """The text after the last </think>, up to the next <think>; "" if the prompt opened a block that is not closed.

    prefilled: whether the prompt ends in <think>.
    """
    _, closed, rest = text.rpartition("</think>")
    if not closed and prefilled:
        return ""
    return rest.partition("<think>")[0]


_WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"))
_COMMANDS = ("\\boxed{", "\\fbox{", "\\text{", "\\textbf{", "\\mathbf{", "\\mathrm{")


def unwrap(answer: str) -> str:
    """The answer without markup around the whole of it ($..$, **..**, \\text{..}) and without its last full stop."""
    answer = answer.strip()
    if answer.isascii() and answer.isalnum():  # the common case
        return answer
    for _ in range(8):
        before = answer
        answer = answer.strip().strip("*")
        if answer.endswith(".") and not answer.endswith(".."):
            answer = answer[:-1].rstrip()
        for opening, closing in _WRAPPERS:
            inner = answer[len(opening) : -len(closing)]
            whole = len(answer) > len(opening + closing) and answer.startswith(opening) and answer.endswith(closing)
            if whole and closing not in inner:
                answer = inner
        for command in _COMMANDS:
            if answer.startswith(command) and closes_at(answer, len(command) - 1) == len(answer) - 1:
                answer = answer[len(command) : -1]
        if answer == before:
            break
    return answer.strip()


def closes_at(text: str, start: int) -> int:
    """Index of the brace that closes the brace at `start`; -1 when there is none. Escaped braces do not count."""
    depth = 0
    for match in _BRACE.finditer(text, start):
        depth += (match[0] == "{") - (match[0] == "}")
        if match[0] == "}" and depth == 0:
            return match.start()
    return -1


def math_spans(text: str) -> list[str]:
    """Contents of $..$, $$..$$, \\(..\\) and \\[..\\]; [] if any two are joined to a list by "or", "and" or a comma."""
    spans: list[tuple[int, int, str]] = []
    opened: tuple[int, int, str] | None = None  # (start, start of the content, mark that closes it)
    for match in _MATH_MARK.finditer(text):
        if opened is None:
            if match[0] in _MATH_MARKS:
                opened = (match.start(), match.end(), _MATH_MARKS[match[0]])
        elif match[0] == opened[2]:
            spans.append((opened[0], match.end(), text[opened[1] : match.start()]))
            opened = None
    for before, after in itertools.pairwise(spans):
        if _JOIN.fullmatch(text[before[1] : after[0]]):
            return []
    return [content for _, _, content in spans]
