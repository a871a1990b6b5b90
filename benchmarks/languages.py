"""How often the instructions family tells a text's language rightly: sentences of 36 languages, and texts of none.

    python benchmarks/languages.py          # needs the extra [instructions]

The sentences of languages.json were written for this: per language two short ones (two to five words), two of a line,
and one of two lines. For each length it prints how many were told rightly, wrongly and not at all, then how many texts
of no language, or of one that no constraint can ask for, were told as one of these. With --without-threshold it prints
the same of the library's own answer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from tinyllm.rewards.text.languages import LANGUAGES, language_of

DATA = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
SENTENCES: dict[str, list[str]] = DATA["sentences"]
NONE: list[str] = DATA["none"]
"""Texts for which no language of SENTENCES may be named: of no language, or of another one."""
LENGTHS = (("short", (0, 1)), ("one line", (2, 3)), ("two lines", (4,)))


def counts(tell: Callable[[str], str | None], places: tuple[int, ...]) -> tuple[int, int, int, list[str]]:
    """(right, wrong, not told, what was told wrongly) over the sentences at these places of each language."""
    right = untold = 0
    wrong = []
    for language, sentences in SENTENCES.items():
        for place in places:
            told = tell(sentences[place])
            right += told == language
            untold += told is None
            if told not in (language, None):
                wrong.append(f"{language} told as {told}: {sentences[place]}")
    return right, len(wrong), untold, wrong


def report(name: str, tell: Callable[[str], str | None]) -> None:
    """Print one detector's numbers."""
    print(name)
    for length, places in LENGTHS:
        right, wrong, untold, shown = counts(tell, places)
        whole = right + wrong + untold
        print(f"  {length:10} {right:3} of {whole} right ({right / whole:.1%}), {wrong} wrong, {untold} not told")
        for line in shown:
            print(f"    {line}")
    named = [f"{text[:60]!r} told as {told}" for text in NONE if (told := tell(text)) in LANGUAGES]
    print(f"  of no language of ours: {len(named)} of {len(NONE)} told as one")
    for line in named:
        print(f"    {line}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-threshold", action="store_true", help="also the library's own answer")
    assert SENTENCES.keys() == LANGUAGES, SENTENCES.keys() ^ LANGUAGES
    report("language_of", language_of)
    if parser.parse_args().without_threshold:
        import py3langid

        report("py3langid, no threshold", lambda text: py3langid.classify(text)[0])


if __name__ == "__main__":
    main()
