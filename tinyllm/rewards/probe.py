"""Attacks on a verifier before training: texts that no honest answer looks like, and that some verifiers reward.

Blind attacks know nothing of the gold: one pays when it is rewarded on more than a fifth of the rows (a constant guess
is right by chance now and then). Informed attacks contain the gold in a form that must not count: one reward is enough.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinyllm.config.sections import RewardConfig
from tinyllm.errors import DataError, RewardError
from tinyllm.records import Completion, Prompt, Revision, Verdict
from tinyllm.rewards.base import Verifier, prompt_text
from tinyllm.rewards.combine import FORMAT, make_parts
from tinyllm.rewards.judge import RewardJudge, TaskRows
from tinyllm.rewards.text.extract import Region

ROWS = 20
"""Rows probed unless asked otherwise."""
CHANCE = 0.2
"""Share of rows a blind attack may be right on."""

_LISTED = tomllib.loads((Path(__file__).parent / "attacks.toml").read_text(encoding="utf-8"))
"""Attacks that need neither prompt nor gold: texts, answers, code; each name -> text."""
LOOK_ALIKES = str.maketrans("aeopcxAEO", "\u0430\u0435\u043e\u0440\u0441\u0445\u0410\u0415\u041e")
"""Latin letters to Cyrillic ones that look the same."""


@dataclass(frozen=True)
class Attack:
    """One text against one row."""

    name: str
    text: str
    informed: bool
    """Whether it was made from the row's gold."""


@dataclass(frozen=True)
class ProbeFinding:
    """What one attack earned over the probed rows."""

    name: str
    informed: bool
    rows: int
    paid: int
    """Rows on which it earned at least half of what the gold earns."""
    example: str

    @property
    def pays(self) -> bool:
        """Whether the attack is rewarded often enough for a policy to learn it."""
        return self.paid > 0 if self.informed else self.paid > CHANCE * self.rows


def probe(judge: RewardJudge, prompts: Sequence[Prompt], rows: int = ROWS) -> list[ProbeFinding]:
    """Every attack on up to `rows` prompts, spread over them; findings in the order of the attacks."""
    step = max(1, len(prompts) // rows)
    chosen = [replace(prompt, draw=0) for prompt in prompts[::step][:rows]]
    earned: dict[tuple[str, bool], list[tuple[bool, str]]] = {}
    for prompt in chosen:
        gold_texts = honest(judge, prompt.row)
        listed = attacks(judge, prompt.row)
        texts = [*gold_texts, *(attack.text for attack in listed)]
        values = [verdict.value for verdict in _verdicts(judge, prompt, texts)]
        top = max([value for value in values[: len(gold_texts)] if value is not None], default=0.0)
        for attack, value in zip(listed, values[len(gold_texts) :], strict=True):
            paid = value is not None and value > 0 and value >= top / 2
            earned.setdefault((attack.name, attack.informed), []).append((paid, attack.text))
    return [
        ProbeFinding(
            name,
            informed,
            len(hits),
            sum(paid for paid, _ in hits),
            next((text for paid, text in hits if paid), hits[0][1]),
        )
        for (name, informed), hits in earned.items()
    ]


def probe_before_training(
    reward: RewardConfig, data: TaskRows, allowed: Sequence[str] = (), rows: int = ROWS
) -> list[ProbeFinding]:
    """Probe the verifiers of a run (not its reward functions: their calls count). `allowed`: attacks that may pay.

    Raises RewardError naming the attacks that pay, and how to go on.
    """
    parts = [
        part for part in make_parts(reward, data.verifier) if isinstance(part.judge, Verifier) and part.name != FORMAT
    ]
    if not parts:
        return []
    judge = RewardJudge(parts, reward.timeout_s, reward.workers)
    try:
        found = probe(judge, data.train, rows)
    finally:
        judge.close()
    names = sorted(finding.name for finding in found if finding.pays and finding.name not in allowed)
    if names:
        shown = next(finding for finding in found if finding.name == names[0])
        raise RewardError(
            f"the verifier pays for {', '.join(map(repr, names))} (example: {shown.example[:80]!r}); use a "
            "stricter rule, or let an attack pay with --reward.allow_probes NAME"
        )
    return found


def honest(judge: RewardJudge, row: Mapping[str, Any]) -> list[str]:
    """Texts that give the gold, in every way that some part may read."""
    gold = _gold(row)
    if gold is None:
        return [str(row["solution"])] if row.get("solution") else []
    return list(dict.fromkeys([*(region.write(gold) for region in _regions(judge)), gold]))


def attacks(judge: RewardJudge, row: Mapping[str, Any]) -> list[Attack]:
    """All attacks on one row."""
    found = [Attack(name, text, False) for name, text in _blind(prompt_text(row)).items()]
    entry = _entry(row)
    if entry:
        submissions = {name: code.replace("ENTRY", entry) for name, code in _LISTED["code"].items()}
        found += [Attack(name, f"```python\n{code}\n```", False) for name, code in submissions.items()]
    for region in _regions(judge):
        found += [Attack(name, region.write(text), False) for name, text in _answers().items()]
        found += [Attack("format only", region.write(""), False)]
        gold = _gold(row)
        if gold is not None:
            found += _informed(region, gold)
    return found


def _blind(prompt: str) -> dict[str, str]:
    made = {
        "the prompt": prompt,
        "the prompt twice": f"{prompt}\n{prompt}",
        "20,000 open tags": "<answer>" * 20_000,
        "deep nesting": "(" * 5_000 + ")" * 5_000,
    }
    return _LISTED["texts"] | made


def _answers() -> dict[str, str]:
    made = {
        "list of answers": ", ".join(map(str, range(101))),
        "answers joined by or": " or ".join(map(str, range(30))),
        "huge number": "9" * 5_000,
    }
    return _LISTED["answers"] | made


def _informed(region: Region, gold: str) -> list[Attack]:
    wrong = f"{gold}1" if gold[-1:].isdigit() else f"{gold}x"  # not "0": 00 is 0
    zero = not gold.strip("0.,-")
    placed = region.write(gold)
    texts = {
        "gold or another": region.write(f"{gold} or {wrong}"),
        "gold, then another answer": f"{placed}\n{region.write(wrong)}",
        "gold within a longer answer": region.write(f"{wrong} {gold} {wrong}"),
        "gold, continued": region.write(wrong),
        "gold negated": placed if zero else region.write(f"-{gold}" if gold[:1].isdigit() else f"not {gold}"),
        "gold in other digits": region.write(gold.translate({ord(str(n)): chr(0xFF10 + n) for n in range(10)})),
        "gold in look-alike letters": region.write(gold.translate(LOOK_ALIKES)),
    }  # fmt: skip
    if region.rule != "last_number":
        texts["gold only in the reasoning"] = f"<think>{placed}</think>"
        texts["gold after the end of turn"] = f"<|im_end|>{placed}"
    if region.rule not in ("last_number", "final", "whole"):
        texts["gold outside its place"] = f"It is {gold}."
    return [Attack(name, text, True) for name, text in texts.items() if text != placed]


def _regions(judge: RewardJudge) -> list[Region]:
    """Where the parts read their answers; the whole text where only reward functions read it."""
    verifiers = [part.judge for part in judge.parts if isinstance(part.judge, Verifier) and part.name != FORMAT]
    found = [verifier.region for verifier in verifiers if verifier.region is not None]
    return found or ([Region("whole")] if any(not isinstance(part.judge, Verifier) for part in judge.parts) else [])


def _gold(row: Mapping[str, Any]) -> str | None:
    gold = row.get("answer")
    text = str(gold).strip() if isinstance(gold, (str, int, float)) and not isinstance(gold, bool) else ""
    return text if text and len(text) < 200 and "\n" not in text else None


def _entry(row: Mapping[str, Any]) -> str | None:
    if not (row.get("calls") or row.get("stdio") or row.get("residual")):
        return None
    from tinyllm.rewards.code.verifier import read_tests

    try:
        return read_tests(row).entry or "main"
    except DataError:
        return None


def _verdicts(judge: RewardJudge, prompt: Prompt, texts: Sequence[str]) -> list[Verdict]:
    """All texts at once for our verifiers; one call each for functions, since one that raises leaves its batch
    unscored."""
    completions = [_completion(prompt, number, text) for number, text in enumerate(texts)]
    if all(isinstance(part.judge, Verifier) for part in judge.parts):
        return list(judge([prompt], completions).verdicts)
    return [verdict for completion in completions for verdict in judge([prompt], [completion]).verdicts]


def _completion(prompt: Prompt, sample: int, text: str) -> Completion:
    return Completion(prompt.id, 0, sample, (), (), "stop", 0, Revision(0, "probe"), text)
