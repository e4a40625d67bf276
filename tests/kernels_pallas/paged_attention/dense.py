"""Attention from its definition: the full softmax over all positions, in float64 numpy, one row at a time."""

import numpy as np


def dense_attention(
    q: np.ndarray,
    keys: list[np.ndarray],
    values: list[np.ndarray],
    first_position: list[int],
    num_tokens: list[int],
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """q [N, Q, H, D]; keys and values of each sequence, [positions, Hkv, D]. Rows without a token are 0."""
    out = np.zeros(q.shape, np.float64)
    for n, (k, v) in enumerate(zip(keys, values, strict=True)):
        k, v = k.astype(np.float64), v.astype(np.float64)
        group = q.shape[2] // k.shape[1]
        for r in range(num_tokens[n]):
            position = first_position[n] + r
            seen = slice(0 if sliding_window is None else max(0, position - (sliding_window - 1)), position + 1)
            for h in range(q.shape[2]):
                logits = k[seen, h // group] @ q[n, r, h].astype(np.float64) * scale
                if logits_soft_cap is not None:
                    logits = logits_soft_cap * np.tanh(logits / logits_soft_cap)
                if sinks is not None:
                    logits = np.append(logits, float(sinks[h]))
                weights = np.exp(logits - logits.max())
                weights = (weights / weights.sum())[: seen.stop - seen.start]
                out[n, r, h] = weights @ v[seen, h // group]
    return out
