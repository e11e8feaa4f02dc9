"""Drawing a token from a row of probabilities, on the host.

One number between 0 and 1, made from the request's seed and the token's position,
decides each draw, so a seed repeats its answer whatever is served beside it. The
filters look at as many of the best tokens as they need, not at a sorted vocabulary.
"""

import dataclasses
import hashlib
import struct

import torch

# Tokens that the filters look at first; doubled until the cut lies within them.
_FIRST_LOOK = 256


@dataclasses.dataclass(frozen=True)
class Filters:
    """What a request lets through: the best `top_k` tokens, those before whom less than
    `top_p` is gathered, and those with at least `min_p` of the best one's probability."""

    top_k: int
    top_p: float = 1.0
    min_p: float = 0.0

    def leave_all(self, vocabulary: int) -> bool:
        return self.top_k >= vocabulary and self.top_p >= 1.0 and self.min_p <= 0.0


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but the two."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _kept(probabilities: torch.Tensor, filters: Filters) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, best first, and tokens that the filters leave."""
    vocabulary = probabilities.shape[0]
    looked = min(vocabulary, filters.top_k, _FIRST_LOOK)
    while True:
        weights, tokens = torch.topk(probabilities, looked)
        before = weights.double().cumsum(0) - weights
        keep = (before <= filters.top_p) & (weights >= filters.min_p * weights[0])
        if looked == min(vocabulary, filters.top_k) or not keep[-1]:
            return weights[keep], tokens[keep]
        looked = min(vocabulary, filters.top_k, 4 * looked)


def draw(probabilities: torch.Tensor, filters: Filters, number: float) -> int:
    """The token that `number` in [0, 1) falls on.

    Args:
        probabilities: float32 [vocabulary], need not sum to exactly 1.
        filters: top_k 1 is greedy, ties as argmax has them.
        number: see uniform.
    """
    if filters.top_k == 1:
        return int(probabilities.argmax())
    weights, tokens = probabilities, None
    if not filters.leave_all(probabilities.shape[0]):
        weights, tokens = _kept(probabilities, filters)
    upto = weights.double().cumsum(0)
    index = int(torch.searchsorted(upto, number * upto[-1], right=True))
    # The last weights may be zero: never step past the last that is not.
    index = min(index, int(torch.searchsorted(upto, upto[-1])))
    return index if tokens is None else int(tokens[index])
