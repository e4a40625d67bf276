"""Attention from its definition: the full softmax over all positions, in float64 numpy, one row at a time."""

import numpy as np


def dense_attention(
    q: np.ndarray,
    keys: list[np.ndarray],
    values: list[np.ndarray],
    first_position: list[int],
    num_tokens: list[int],
    scale: float,
) -> np.ndarray:
    """q [N, Q, H, D]; keys and values of each sequence, [positions, Hkv, D]. Rows without a token are 0."""
    out = np.zeros(q.shape, np.float64)
    for n, (k, v) in enumerate(zip(keys, values, strict=True)):
        group = q.shape[2] // k.shape[1]
        for r in range(num_tokens[n]):
            seen = first_position[n] + r + 1
            for h in range(q.shape[2]):
                logits = k[:seen, h // group].astype(np.float64) @ q[n, r, h].astype(np.float64) * scale
                weights = np.exp(logits - logits.max())
                out[n, r, h] = weights / weights.sum() @ v[:seen, h // group].astype(np.float64)
    return out
