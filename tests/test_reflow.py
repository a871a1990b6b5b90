"""scripts/reflow.py: ragged docstring paragraphs are found and wrapped again, and nothing else is touched."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import reflow  # noqa: E402  found in the folder above

LONG = "A sentence that is as long as a line of a docstring may be, and that was wrapped once more at a smaller margin, by a"
RAGGED = f'''"""What it is.

{LONG}
machine that
left these lines. It goes on here.

    {LONG}
    an example
    stays as it is

- {LONG}
  a list
  stays as it is
name: {LONG[:90]}
other: of two lines that somebody
wrote so
"""


def function():
    r"""{LONG[:100]}

    {LONG[:110]}
    raw \\alpha
    text in a function, and its attributes too."""


# {LONG}
# comments
# stay as they are
TEXT = """
{LONG}
a text
is no docstring
"""
'''


def test_ragged_paragraphs_are_wrapped_again():
    mended, begins = reflow.reflow(RAGGED)
    assert begins == [3, 23]
    assert f"{LONG}\nmachine that left these lines. It goes on here.\n" in mended
    assert " raw\n    \\alpha text in a function, and its attributes too." in mended


def test_everything_else_stays():
    mended, _ = reflow.reflow(RAGGED)
    for kept in (
        "an example\n    stays",
        "a list\n  stays",
        "somebody\nwrote so",
        "# comments\n# stay",
        "a text\nis no",
    ):
        assert kept in mended
    assert reflow.reflow(mended) == (mended, [])
    assert mended.split() == RAGGED.split()


def test_a_break_at_the_end_of_a_sentence_was_meant():
    source = f'"""First.\n\n{LONG}\nmachine.\nAnd another\nsentence."""\n'
    assert reflow.reflow(source) == (source, [])


def test_check_and_fix(tmp_path, capsys):
    file = tmp_path / "module.py"
    file.write_text(RAGGED)
    assert reflow.main([str(tmp_path)]) == 1 and file.read_text() == RAGGED
    assert "module.py:3: ragged paragraph\n" in capsys.readouterr().out
    assert reflow.main(["--fix", str(file)]) == 0 and reflow.main([str(tmp_path)]) == 0


@pytest.mark.parametrize("folder", ["tinyllm", "tests", "benchmarks", "scripts"])
def test_no_paragraph_of_this_project_is_ragged(folder):
    assert reflow.main([str(ROOT / folder)]) == 0
