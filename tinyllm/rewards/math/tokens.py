"""Tokens of mathematical answers, LaTeX and plain, by the closed tables of symbols.toml."""

from __future__ import annotations

import re
import tomllib
from fractions import Fraction
from pathlib import Path

from tinyllm.rewards.text.numbers import decimal_value, digits_to_int

MAX_CHARS = 4_000

_TABLES = tomllib.loads((Path(__file__).parent / "symbols.toml").read_text(encoding="utf-8"))
FUNCTIONS, GREEK, TEXTS = (frozenset(_TABLES[name].split()) for name in ("functions", "greek", "texts"))
SKIPPED = frozenset(_TABLES["skipped"].split()) | {" ", "\n"}
OPERATORS = {command: sign for sign, commands in _TABLES["operators"].items() for command in commands.split()}
UNICODE = {char: plain for plain, chars in _TABLES["characters"].items() for char in chars.split()}
_TOKEN = re.compile(
    r"(?P<base>[0-9][0-9A-Fa-f]*_(?:\{[0-9]{1,2}\}|[0-9]))(?![0-9])"
    r"|(?P<repeat>[0-9]*\.[0-9]*\\(?:overline|bar)\{[0-9]+\})"
    r"|(?P<number>(?:[0-9]{1,3}(?:(?:\{,\}|\\,)[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?P<exp>[eE][+-]?[0-9]+(?![0-9]*[A-Za-z]))?"
    r"|\\(?P<command>[A-Za-z]+|.)"
    r"|(?P<word>[A-Za-z]+)"
    r"|(?P<op><=|>=|!=|\*\*|[-+*/^_=<>(){}\[\]|,;:!%'&$])"
    r"|(?P<space>[\s~]+)",
    re.DOTALL,
)


class Unreadable(ValueError):
    """The text is not an answer by the grammar, or is past a limit; the message says why."""


Token = tuple[str, str]


def tokenize(text: str) -> list[Token]:
    """(kind, text) pairs; kinds: num, base, cmd, word, op, text, sp, begin, end. Raises Unreadable."""
    if len(text) > MAX_CHARS:
        raise Unreadable(f"longer than {MAX_CHARS} characters")
    for char, plain in UNICODE.items():
        text = text.replace(char, f" {plain} ")
    tokens: list[Token] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise Unreadable(f"{text[at]!r} is not part of the grammar")
        at = match.end()
        command = match["command"]
        if match["space"]:
            tokens.append(("sp", " "))
        elif match["base"]:
            tokens.append(("base", match["base"]))
        elif match["repeat"]:
            tokens.append(("num", match["repeat"]))
        elif match["number"]:
            tokens.append(("num", match["number"] + (match["exp"] or "")))
        elif match["word"]:
            tokens.append(("word", match["word"]))
        elif match["op"]:
            tokens.append(("op", match["op"].replace("**", "^")))
        elif command in TEXTS:
            inside, at = _braced(text, at)
            kind = "sp" if not inside.strip() else "cmd" if command == "operatorname" else "text"
            tokens.append((kind, inside))
        elif command in ("begin", "end"):
            inside, at = _braced(text, at)
            tokens.append((command, inside))
        elif command == "\\":
            tokens.append(("op", "row"))
        elif command in OPERATORS:
            tokens.append(("op", OPERATORS[command]))
        elif command in SKIPPED:
            tokens.append(("sp", " "))
        else:
            tokens.append(("cmd", command))
    return tokens


def _braced(text: str, at: int) -> tuple[str, int]:
    while at < len(text) and text[at] == " ":
        at += 1
    end = text.find("}", at)
    if at >= len(text) or text[at] != "{" or end < 0 or "{" in text[at + 1 : end]:
        raise Unreadable("a text without its braces")
    return text[at + 1 : end], end + 1


def number(text: str) -> Fraction:
    """The exact value of a decimal, its thousands marks taken out. Raises Unreadable past the exponent limit."""
    text = text.replace("{,}", "").replace("\\,", "")
    plain, _, repeated = text.replace("\\bar", "\\overline").partition("\\overline")
    if repeated:
        digits = repeated.strip("{}")
        places = len(plain.partition(".")[2])
        start = Fraction(digits_to_int(plain.replace(".", "") or "0"), 10**places)
        return start + Fraction(digits_to_int(digits), (10 ** len(digits) - 1) * 10**places)
    mantissa, _, exponent = text.lower().partition("e")
    value = decimal_value(mantissa, exponent)
    if value is None:
        raise Unreadable("the exponent is too large")
    return value
