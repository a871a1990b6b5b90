"""Our reader of mathematical answers, LaTeX and plain: text -> tree. A text that does not read completely is no answer.

An answer is data, never a program: only the forms below exist. Length, nesting and digits are limited before anything
is computed, and nothing is computed here.

    answer   := item (("," | ";" | "and" | "or") item)*            several values: their order does not matter
    item     := [symbol "in"] side (("=" | "<" | "<=" | ">" | ">=" | "!=") side)* [qualifier]
    side     := sum | union of intervals | sum ":" sum
    sum      := ["+" | "-" | "+-"] term (("+" | "-" | "+-" | "-+") term)*
    term     := factor (("*" | "/" | nothing) factor)*             nothing: a product, or a mixed number (3 1/2)
    factor   := atom ["^" factor] ["!"] ["%" | degree | unit]
    atom     := number | symbol | constant | function argument | "(" .. ")" | "|" .. "|" | tuple | interval | set |
    matrix | text

Trees are tuples: (kind, part, part, ...). Kinds: num, sym, const, add, mul, div, pow, neg, pm, mp, fact, func, binom,
text, unit, base, seq (bracketed), list, rel, union, ratio, matrix.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from tinyllm.rewards.math.tokens import FUNCTIONS, GREEK, Token, Unreadable, number, tokenize
from tinyllm.rewards.text.numbers import read_number

Tree = tuple[Any, ...]
MAX_DEPTH = 100
MAX_CHAIN = 100
"""Most factors of one product, and signs after one atom."""
MAX_NODES = 2_000

WORDS = frozenset("yes no odd even none all true false one two on off".split())
"""Short words that are text when they are the whole answer; longer words are text anyway."""
QUALIFIERS = frozenset(
    "for any all every each some where with is are a an constant constants real integer arbitrary number numbers value "
    "values".split()
)
"""Words that may stand after an answer, with symbols: "for any real c"."""
_GROUPED = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])")


def read(text: str) -> Tree:
    """The tree of a whole answer. Raises Unreadable where no tree is the whole text."""
    text = text.strip().removesuffix("\\")  # half of a "\ " at the end
    while len(text) > 1 and text[-1] == "." and text[-2] != ".":
        text = text[:-1].rstrip()
    text = _dollars(text)
    if not text or text.casefold() == "n/a":
        raise Unreadable("empty")
    if re.fullmatch(r"[A-Za-z]+", text) and (len(text) > 3 or text.lower() in WORDS):
        return ("text", text.casefold())
    if text.count("(") + text.count("[") == 0 and "\\{" not in text:
        text = _GROUPED.sub(lambda match: match[0].replace(",", "{,}"), text)  # within brackets a comma separates
    parser = _Parser(tokenize(text))
    tree = parser.answer()
    if parser.at < len(parser.tokens):
        raise Unreadable(f"{parser.tokens[parser.at][1]!r} does not fit")
    return tree


def _dollars(text: str) -> str:
    """Without the dollars that mark mathematics; one at the start alone is a currency sign."""
    plain = text.replace("\\$", "")
    if plain.startswith("$") and plain.count("$") == 1:
        return "\\" + text[text.index("$") :]
    return re.sub(r"(?<!\\)\$", " ", text).strip()


class _Parser:
    """Recursive descent; each level of nesting is counted."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = [token for token in tokens if token[0] != "sp"]
        self.spaced: set[int] = set()
        """Indices, among the tokens without spaces, of those that have white space before them."""
        count = 0
        for before, token in itertools.pairwise([("", ""), *tokens]):
            if token[0] != "sp":
                if before[0] == "sp":
                    self.spaced.add(count)
                count += 1
        self.at = 0
        self.depth = 0
        self.nodes = 0
        self.bars = 0

    # tools

    def peek(self, ahead: int = 0) -> Token:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ("end of text", "")

    def is_op(self, *ops: str) -> bool:
        kind, text = self.peek()
        return kind == "op" and text in ops

    def accept(self, *ops: str) -> str:
        """The operator that comes next, taken, where it is one of these; else ""."""
        if not self.is_op(*ops):
            return ""
        self.at += 1
        return self.tokens[self.at - 1][1]

    def take(self, op: str) -> None:
        if not self.accept(op):
            raise Unreadable(f"{op!r} is missing")

    def separated(self, read: Callable[[], Tree], *ops: str) -> list[Tree]:
        """One or more parts with one of these operators between them."""
        parts = [read()]
        while self.accept(*ops):
            parts.append(read())
        return parts

    def node(self, *tree: Any) -> Tree:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise Unreadable(f"more than {MAX_NODES} parts")
        return tree

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable(f"nested deeper than {MAX_DEPTH}")

    # grammar

    def answer(self) -> Tree:
        items = [self.item()]
        while self._separator():
            items.append(self.item())
        return items[0] if len(items) == 1 else self.node("list", *items)

    def _separator(self) -> bool:
        found = False
        while True:
            kind, text = self.peek()
            word = text.strip(" ,").lower()
            if (kind == "op" and text in (",", ";", "or", "and")) or (
                kind in ("text", "word") and word in ("and", "or", "")
            ):
                self.at += 1
                found = True
            else:
                if found and kind == "end of text":
                    raise Unreadable("a separator at the end")
                return found

    def item(self) -> Tree:
        kind, _ = self.peek()
        if kind == "text":
            words = " ".join(self.peek()[1].split()).casefold().strip(".")
            choice = re.fullmatch(r"\(?([A-Za-z])\)?", self.peek()[1].strip())
            following = self.tokens[self.at + 1] if self.at + 1 < len(self.tokens) else ("op", ",")
            if following == ("op", ",") or following[0] == "text":
                self.at += 1
                if read_number(words) is not None:
                    return self._text(words)
                if choice:
                    return self.node("sym", choice[1])
                return self.node("text", words)
        sides: list[Any] = [self.side()]
        while sign := self.accept("=", "<", "<=", ">", ">=", "!=", "in"):
            sides += [sign, self.side()]
        self._qualifier()
        if len(sides) == 1:
            return sides[0]
        if sides[1] == "in":
            if sides[0][0] != "sym" or len(sides) != 3:
                raise Unreadable("'in' without a symbol before it")
            return sides[2]
        return self.node("rel", *sides)

    def _qualifier(self) -> None:
        """Drop "for any c", "where c is a constant": words of a closed list and single symbols, to the end."""
        kind, text = self.peek()
        if kind != "text" or not re.match(r"\s*(?:for|where|with)\b", text):
            return
        for kind, text in self.tokens[self.at :]:
            words = set(text.lower().replace(",", " ").split())
            symbol = (kind == "word" and len(text) == 1) or (kind == "cmd" and text in GREEK)
            fits = words <= QUALIFIERS if kind == "text" else symbol or (kind, text) in (("op", ","), ("op", "in"))
            if not fits:
                raise Unreadable(f"{text!r} after the answer")
        self.at = len(self.tokens)

    def side(self) -> Tree:
        tree = self.sum()
        for op, kind in ((":", "ratio"), ("cup", "union")):
            if self.accept(op):
                return self.node(kind, tree, *self.separated(self.sum, op))
        return tree

    def sum(self) -> Tree:
        self.deeper()
        sign = self.accept("+", "-", "+-", "-+")
        parts = [self._with_sign(sign, self.term())]
        while sign := self.accept("+", "-", "+-", "-+"):
            parts.append(self._with_sign(sign, self.term()))
        self.depth -= 1
        return parts[0] if len(parts) == 1 else self.node("add", *parts)

    def _with_sign(self, sign: str, term: Tree) -> Tree:
        return term if sign in ("", "+") else self.node({"-": "neg", "+-": "pm", "-+": "mp"}[sign], term)

    def term(self) -> Tree:
        tree = self.factor()
        for _ in range(MAX_CHAIN):
            if self.accept("*"):
                tree = self.node("mul", tree, self._signed())
            elif self.accept("/"):
                below = self._signed()
                tree = self._mixed(tree, below) if tree[0] == "mixed" else self.node("div", tree, below)
            elif self._starts_factor():
                tree = self._juxtaposed(tree)
            else:
                if tree[0] == "mixed":
                    raise Unreadable("two numbers side by side")
                return tree
        raise Unreadable(f"more than {MAX_CHAIN} factors")

    def _signed(self) -> Tree:
        return self._with_sign(self.accept("-"), self.factor())

    def _juxtaposed(self, tree: Tree) -> Tree:
        """A product without a sign; after an integer, a fraction makes a mixed number (3 1/2, 3\\frac{1}{2})."""
        spaced = self.at in self.spaced
        literal = self.tokens[self.at - 1][0] == "num" and tree[0] == "num"
        right_literal = self.peek()[0] == "num"
        fraction = self.peek() in (("cmd", "frac"), ("cmd", "dfrac"), ("cmd", "tfrac"))
        right = self.factor()
        if literal and fraction and right[0] == "div" and right[1][0] == right[2][0] == "num":
            return self._mixed(("mixed", tree, right[1]), right[2])
        if right_literal and self.tokens[self.at - 1][0] == "num":
            if not (literal and spaced and right[0] == "num"):
                raise Unreadable("two numbers side by side")
            return ("mixed", tree, right)
        return self.node("mul", tree, right)

    def _mixed(self, tree: Tree, below: Tree) -> Tree:
        _, whole, above = tree
        values: list[Any] = [part[1] if part[0] == "num" else None for part in (whole, above, below)]
        if any(value is None or value != int(value) for value in values) or not 0 <= values[1] < values[2]:
            raise Unreadable("not a proper mixed number")
        return self.node("num", Fraction(values[0]) + Fraction(values[1], values[2]))

    def _starts_factor(self) -> bool:
        kind, text = self.peek()
        if kind in ("num", "base", "begin"):
            return True
        if kind == "word":
            return text.lower() not in ("and", "or")
        if kind == "cmd":
            return text != "choose"
        if kind == "text":
            return False
        return kind == "op" and (text in ("(", "[", "{", "\\{", "lfloor", "lceil") or (text == "|" and not self.bars))

    def factor(self) -> Tree:
        tree = self.atom()
        for _ in range(MAX_CHAIN):
            if self._degree():
                tree = self.node("unit", tree, "\u00b0")
            elif self.accept("^"):
                tree = self.node("pow", tree, self._exponent())
            elif self.accept("!"):
                if self.is_op("!"):
                    raise Unreadable("a double factorial")
                tree = self.node("fact", tree)
            elif self.accept("%"):
                if self._starts_factor() or self.peek()[0] == "text":
                    raise Unreadable("something stands after a percent sign")
                tree = self.node("unit", tree, "%")
            elif self.peek()[0] == "text" and self._is_unit(self.peek()[1]):
                name = " ".join(self.peek()[1].split())
                self.at += 1
                tree = self.node("unit", tree, name + self._unit_power())
            else:
                return tree
        raise Unreadable(f"more than {MAX_CHAIN} signs after one atom")

    def _degree(self) -> bool:
        """Take a sign of degrees, if one comes next: \u00b0, ^\\circ or ^{\\circ}."""
        for form in (["degree"], ["^", "degree"], ["^", "{", "degree", "}"]):
            if [self.peek(ahead) for ahead in range(len(form))] == [("op", op) for op in form]:
                self.at += len(form)
                return True
        return False

    @staticmethod
    def _is_unit(text: str) -> bool:
        words = text.split()
        return bool(words) and words[0].lower() not in ("and", "or", "for", "where", "with", "if", "when")

    def _unit_power(self) -> str:
        """The power of a unit: "^2" of cm^2 or cm^{2}."""
        tokens = [self.peek(ahead) for ahead in range(4)]
        if tokens[:2] == [("op", "^"), ("op", "{")] and tokens[2][0] == "num" and tokens[3] == ("op", "}"):
            self.at += 4
            return f"^{tokens[2][1]}"
        if tokens[0] == ("op", "^") and tokens[1][0] == "num":
            self.at += 2
            return f"^{tokens[1][1]}"
        return ""

    def _exponent(self) -> Tree:
        if self.is_op("{"):
            return self.group()
        self.deeper()
        sign = self.accept("-", "+")
        tree = self.atom()
        if self.accept("^"):  # 2^3^4 groups to the right
            tree = self.node("pow", tree, self._exponent())
        self.depth -= 1
        return self._with_sign(sign, tree)

    def group(self) -> Tree:
        """A sum in braces."""
        self.take("{")
        tree = self.sum()
        if self.peek() == ("cmd", "choose"):
            self.at += 1
            tree = self.node("binom", tree, self.sum())
        self.take("}")
        return tree

    def argument(self) -> Tree:
        """A TeX argument: a group, or one digit or letter (\\frac12, \\sqrt5, \\sqrt[3]27)."""
        if self.is_op("{"):
            return self.group()
        if self.is_op("("):
            return self.atom()
        kind, text = self.peek()
        if kind not in ("num", "word", "cmd"):
            raise Unreadable("an argument is missing")
        return self.atom()

    def atom(self) -> Tree:
        self.deeper()
        tree = self._atom()
        self.depth -= 1
        return tree

    def _atom(self) -> Tree:
        kind, text = self.peek()
        if kind == "end of text":
            raise Unreadable("something is missing at the end")
        self.at += 1
        if kind == "num":
            return self.node("num", number(text))
        if kind == "base":
            return self._base(text)
        if kind == "word":
            return self._word(text)
        if kind == "cmd":
            return self._command(text)
        if kind == "text":
            return self._text(text)
        if kind == "begin":
            return self._matrix(text)
        if kind == "op" and text in ("(", "[", "\\{"):
            return self._brackets(text)
        if kind == "op" and text == "{":
            self.at -= 1
            return self.group()
        if kind == "op" and text == "|":
            self.bars += 1
            inside = self.sum()
            self.take("|")
            self.bars -= 1
            return self.node("func", "abs", inside)
        if kind == "op" and text in ("lfloor", "lceil"):
            inside = self.sum()
            self.take(text.replace("l", "r", 1))
            return self.node("func", "floor" if text == "lfloor" else "ceil", inside)
        if kind == "op" and text == "$":
            return self.node("unit", self.factor(), "$")
        raise Unreadable(f"{text!r} does not fit")

    def _base(self, text: str) -> Tree:
        digits, _, base = text.partition("_")
        radix = int(base.strip("{}"))
        try:
            if not 2 <= radix <= 16 or len(digits) > 200:
                raise ValueError
            return self.node("base", Fraction(int(digits, radix)), radix)
        except ValueError:
            raise Unreadable(f"{text!r} is not a number in that base") from None

    def _word(self, word: str) -> Tree:
        if word in FUNCTIONS:
            return self._function(word)
        if word in ("pi", "infty", "infinity", "oo"):
            return self.node("const", "pi" if word == "pi" else "infty")
        if len(word) > 3:
            raise Unreadable(f"{word!r} is a word, not mathematics")
        letters = [self._symbol(letter, last=index == len(word) - 1) for index, letter in enumerate(word)]
        return functools.reduce(lambda left, right: self.node("mul", left, right), letters)

    def _symbol(self, name: str, last: bool = True) -> Tree:
        if last and self.accept("_"):
            name = f"{name}_{self._subscript()}"
        while last and self.accept("'"):
            name += "'"
        if name in ("e", "i"):
            return self.node("const", name)
        if last and name[0] in "fgh" and self.is_op("(") and self.peek(1)[0] == "word" and self.peek(2) == ("op", ")"):
            name = f"{name}({self.peek(1)[1]})"  # a function of the task, taken as a name
            self.at += 3
        return self.node("sym", name)

    def _subscript(self) -> str:
        if not self.accept("{"):
            kind, sub = self.peek()
            if kind != "num" and (kind != "word" or len(sub) > 1):
                raise Unreadable("a subscript that is no name")
            self.at += 1
            return sub
        sub = ""
        while not self.accept("}"):
            kind, text = self.peek()
            if kind not in ("num", "word", "text") and text not in (",", "+", "-"):
                raise Unreadable("a subscript that is no name")
            sub += text
            self.at += 1
        return sub

    def _command(self, name: str) -> Tree:
        if name in ("frac", "dfrac", "tfrac", "cfrac", "binom", "dbinom", "tbinom"):
            above = self._digit_or_argument()
            return self.node("div" if "frac" in name else "binom", above, self._digit_or_argument())
        if name == "sqrt":
            return self._root()
        if name in ("boxed", "fbox"):
            return self.group()
        if name in FUNCTIONS:
            return self._function(name)
        if name in ("pi", "infty"):
            return self.node("const", name)
        if name in ("emptyset", "varnothing"):
            return self.node("seq", "\\{", "\\}")
        if name == "mathbb":
            braced = self.accept("{")
            text = self.peek()[1]
            self.at += 1
            if braced:
                self.take("}")
            if text == "R":
                infinity = ("const", "infty")
                return self.node("seq", "(", ")", ("neg", infinity), infinity)
            return self.node("text", f"set {text}")
        if name in GREEK:
            return self._symbol("\\" + name)
        raise Unreadable(f"\\{name} is not part of the grammar")

    def _root(self) -> Tree:
        index: Tree = ("num", Fraction(2))
        if self.accept("["):
            index = self.sum()
            self.take("]")
        inside = self.argument()
        odd = index[0] == "num" and index[1].denominator == 1 and index[1] % 2 == 1
        negative = odd and inside[0] == "neg"  # the cube root of -8 is -2; (-8)^{1/3} is a complex number
        root = self.node("pow", inside[1] if negative else inside, self.node("div", ("num", Fraction(1)), index))
        return self.node("neg", root) if negative else root

    def _digit_or_argument(self) -> Tree:
        """TeX takes one digit: \\frac12 is 1/2, and \\frac123 would be 1/2 and then 3."""
        kind, text = self.peek()
        if kind == "num" and len(text) > 1 and text.isdigit():
            self.tokens[self.at] = ("num", text[1:])
            return self.node("num", Fraction(int(text[0])))
        if kind == "word" and len(text) > 1:
            self.tokens[self.at] = ("word", text[1:])
            return self.node("const" if text[0] in "ei" else "sym", text[0])
        return self.argument()

    def _function(self, name: str) -> Tree:
        power: Tree | None = None
        base: Tree | None = None
        while op := self.accept("^", "_"):
            script = self._exponent()
            power, base = (script, base) if op == "^" else (power, script)
        if base is not None and name != "log":
            raise Unreadable(f"\\{name} with a subscript")
        if power == ("neg", ("num", Fraction(1))) and "arc" + name in FUNCTIONS:
            name, power = "arc" + name, None
        arguments = self._arguments(name)
        tree = self.node("func", name, *arguments, *([base] if base else []))
        return tree if power is None else self.node("pow", tree, power)

    def _arguments(self, name: str) -> list[Tree]:
        if self.accept("("):
            arguments = self.separated(self.sum, ",")
            self.take(")")
            return arguments
        if self.is_op("{"):
            return [self.group()]
        if name in ("gcd", "lcm", "max", "min"):
            raise Unreadable(f"{name} without brackets")
        self.deeper()
        tree = self.factor()
        while self._starts_factor() and self.peek()[1] not in FUNCTIONS and not self.is_op("("):
            tree = self.node("mul", tree, self.factor())
        self.depth -= 1
        return [tree]

    def _text(self, text: str) -> Tree:
        words = text.strip()
        value = read_number(words)
        if value is not None and not value.percent and not value.currency:  # \mathbf{5}
            return self.node("num", Fraction(value.value))
        if words in ("e", "i"):  # \mathrm{e}
            return self.node("const", words)
        if len(words) == 1 and words.isalpha():
            return self._symbol(words)
        raise Unreadable(f"the text {words!r} does not fit")

    def _brackets(self, opening: str) -> Tree:
        closing = {"(": (")", "]"), "[": ("]", ")"), "\\{": ("\\}",)}[opening]
        bars, self.bars = self.bars, 0
        self.deeper()
        if opening == "\\{" and self.accept("\\}"):
            self.depth -= 1
            return self.node("seq", "\\{", "\\}")
        parts = self.separated(self.item, ",", ";")
        end = self.accept(*closing)
        if not end:
            raise Unreadable(f"{opening!r} is not closed")
        self.depth -= 1
        self.bars = bars
        if len(parts) == 1 and opening in "([" and (opening, end) in (("(", ")"), ("[", "]")) and parts[0][0] != "rel":
            return parts[0]
        return self.node("seq", opening, end, *parts)

    def _matrix(self, name: str) -> Tree:
        if name not in ("pmatrix", "bmatrix", "matrix", "array", "Bmatrix"):
            raise Unreadable(f"\\begin{{{name}}} is not part of the grammar")
        self.deeper()
        if name == "array" and self.is_op("{"):  # how its columns are set: {cc}
            while not self.is_op("}") and self.peek()[0] != "end of text":
                self.at += 1
            self.take("}")
        rows = [self.separated(self.sum, "&")]
        while self.peek()[0] != "end":
            if self.accept("row"):
                if self.is_op("[") and self.peek(1)[0] == "num" and self.peek(2) in (("word", "pt"), ("word", "em")):
                    self.at += 3  # space between rows
                    self.take("]")
                if self.peek()[0] != "end":
                    rows.append(self.separated(self.sum, "&"))
            else:
                raise Unreadable("a matrix is not closed")
        if self.peek()[1] != name or len({len(row) for row in rows}) != 1:
            raise Unreadable("a matrix with rows of different lengths")
        self.at += 1
        self.depth -= 1
        return self.node("matrix", *(tuple(row) for row in rows))
