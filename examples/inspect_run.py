"""Read a finished run with pandas: which prompts were hard, and what the policy said.

python examples/inspect_run.py RUN
"""

import sys
from pathlib import Path

import pandas as pd


def main() -> None:
    run = Path(sys.argv[1])
    rollouts = pd.concat(pd.read_parquet(path) for path in sorted((run / "rollouts").glob("*.parquet")))
    print(f"{len(rollouts)} rollouts of {rollouts['step'].nunique()} steps")
    print(rollouts.groupby("step")["reward"].agg(["mean", "count"]).round(3).to_string())
    hardest = rollouts.groupby("prompt_id")["reward"].mean().sort_values().index[:3]
    for prompt_id in hardest:
        rows = rollouts[rollouts["prompt_id"] == prompt_id]
        print(f"\n{rows['prompt'].iloc[0][-60:]!r}")
        for _, row in rows.head(3).iterrows():
            print(f"  {row['reward']}  {row['completion'][:70]!r}")


if __name__ == "__main__":
    main()
