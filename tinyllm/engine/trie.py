"""Token sequences as a trie, so that every distinct prefix appears, and is computed, once.

A trie node is a (prefix, token) pair; sequences with equal beginnings (a system prompt, the prompt of a group, equal
beginnings of completions) share its nodes. Nodes are numbered in the order in which they were added, so the nodes that
a sequence adds are one contiguous run. No torch here: the scheduler counts the tokens of a prefill with a trie.
"""

from __future__ import annotations

from collections.abc import Iterable


class Trie:
    """Grows by whole sequences; `paths[s][i]` is the trie node that holds token i of sequence s."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        """Token of each trie node."""
        self.positions: list[int] = []
        """Position of each trie node in its sequences."""
        self.paths: list[list[int]] = []
        self.new: list[int] = []
        """Index of the first token of each sequence that needed a new trie node (its length when all were known)."""
        self._children: dict[tuple[int, int], int] = {}

    def add(self, token_ids: Iterable[int]) -> list[int]:
        """Adds a sequence; returns its path, one trie node per token."""
        node, first_new = -1, -1
        path: list[int] = []
        for position, token in enumerate(token_ids):
            child = self._children.get((node, token))
            if child is None:
                child = len(self.tokens)
                self._children[node, token] = child
                self.tokens.append(token)
                self.positions.append(position)
                if first_new < 0:
                    first_new = position
            node = child
            path.append(node)
        self.paths.append(path)
        self.new.append(len(path) if first_new < 0 else first_new)
        return path

    def __len__(self) -> int:
        return len(self.tokens)
