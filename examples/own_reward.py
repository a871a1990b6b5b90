"""Your own rows and your own reward function, from Python.

    python examples/own_reward.py [STEPS] [MODEL]

Rewards short answers that name the colour that was asked for; None would mark a completion as unscored.
"""

import json
import sys
import tempfile
from pathlib import Path

import tinyllm


def names_colour(prompts, completions, colour, **_):
    """One number per completion; `colour` is the column of the rows below."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(wanted in text.lower()) - len(text) / 1000 for text, wanted in zip(texts, colour, strict=True)]


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    model = sys.argv[2] if len(sys.argv) > 2 else "smollm2-135m-instruct"
    folder = Path(tempfile.mkdtemp())
    things = {"grass": "green", "snow": "white", "coal": "black", "blood": "red", "the sky": "blue"}
    rows = [{"prompt": f"What colour is {thing}?", "colour": colour} for thing, colour in things.items()]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = tinyllm.grpo(
        model=model,
        data=str(folder / "rows.jsonl"),
        reward=names_colour,
        steps=steps,
        prompts_per_step=2,
        group_size=4,
        held_out=0.2,
        tokens_per_microbatch=1024,
        run={"dir": str(folder / "run")},
    )
    print("model in", result.model_dir)


if __name__ == "__main__":
    main()
