"""Multi-turn rollouts: an environment (a tool, a game, a user) gives tokens between the turns that are sampled."""
