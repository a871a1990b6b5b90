"""The capstone: one model from base over SFT and DPO to GRPO, evaluated at each stage, in one report.

rows       worked examples, prompts to train on, the held-out and the shifted suite: disjoint, generated, seeded
stages     the runs, one after the other; a finished run is not made again
outcome    evaluation of every stage, paired differences, capstone.json, capstone.html
"""
