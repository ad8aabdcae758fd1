"""The reference model's rule in plain Python: the oracle that tests compare a worker with.

Next token = keyed hash of the whole history, by position: each token is mixed with its position
and the key, the mixes are added modulo 2 ** 64 (so the order of adding can't matter), and the sum
is mixed again. The tensor form of the same rule is in worker/models/reference.py.
"""

from collections.abc import Sequence

VOCAB = 257
EOS = 256
FIRST, SPAN = 32, 95  # printable ASCII: ids 32 … 126

MASK = (1 << 64) - 1
TOKEN_FACTOR = 0x9E3779B97F4A7C15
POSITION_FACTOR = 0xD1B54A32D192ED03
EOS_SALT = 0x5851F42D4C957F2D
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def mix(x: int) -> int:
    """The splitmix64 finalizer."""
    x &= MASK
    x = ((x ^ (x >> 30)) * MIX_1) & MASK
    x = ((x ^ (x >> 27)) * MIX_2) & MASK
    return x ^ (x >> 31)


def next_token(history: Sequence[int], key: int = 0, eos_every: int = 0) -> int:
    """The token after `history`; with `eos_every` n, `EOS` for one hash in n (0: never)."""
    return _token(sum(_term(t, i, key) for i, t in enumerate(history)), eos_every)


def reference_tokens(
    prompt: Sequence[int], n: int, key: int = 0, eos_every: int = 0, stop_at_eos: bool = True
) -> list[int]:
    """The first `n` tokens after `prompt`; the EOS that ends it, if any, is the last of them."""
    history = len(prompt)
    total = sum(_term(t, i, key) for i, t in enumerate(prompt))
    out: list[int] = []
    while len(out) < n:
        out.append(_token(total, eos_every))
        if out[-1] == EOS and stop_at_eos:
            break
        total += _term(out[-1], history, key)
        history += 1
    return out


def _term(token: int, position: int, key: int) -> int:
    return mix((token + 1) * TOKEN_FACTOR + (position + 1) * POSITION_FACTOR + mix(key))


def _token(total: int, eos_every: int) -> int:
    h = mix(total)
    if eos_every and (mix(h + EOS_SALT) >> 11) % eos_every == 0:
        return EOS
    return FIRST + (h >> 11) % SPAN
