"""Random numbers by key: every completion has a stream of its own, whatever else is sampled beside it.

A uniform number depends on (seed, step, prompt id, draw, sample, position) alone. No torch here: the scheduler, servers
and clients use this module too.
"""

from __future__ import annotations

import hashlib

_MASK = (1 << 64) - 1


def seed_key(seed: int, step: int, prompt_id: str, draw: int, sample: int) -> int:
    """63-bit key of one completion's random numbers."""
    text = f"{seed}\x1f{step}\x1f{prompt_id}\x1f{draw}\x1f{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def uniform(key: int, position: int) -> float:
    """Uniform number in [0, 1) with 53 bits: the splitmix64 output number `position` of the stream `key`.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 17.
    """
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) >> 11) * 2.0**-53
