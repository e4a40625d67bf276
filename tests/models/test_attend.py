"""Plain causal attention against a loop in numpy, and what must not leak between rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.models import causal_attend


def draw(rows: int, heads: int = 6, kv_heads: int = 2, head_dim: int = 8) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(rows)
    return tuple(rng.standard_normal((rows, n, head_dim)).astype(np.float32) for n in (heads, kv_heads, kv_heads))


def by_hand(q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: list[int]) -> np.ndarray:
    """One row and one head at a time, in f64."""
    out = np.zeros(q.shape)
    for row, head in np.ndindex(q.shape[:2]):
        if positions[row] < 0:
            continue
        seen = [other for other in range(len(q)) if 0 <= positions[other] <= positions[row]]
        group = head // (q.shape[1] // k.shape[1])
        scores = k[seen, group].astype(np.float64) @ q[row, head] / np.sqrt(q.shape[2])
        weights = np.exp(scores - scores.max())
        out[row, head] = weights / weights.sum() @ v[seen, group]
    return out


@pytest.mark.parametrize("positions", [[0], [0, 1, 2, 3, 4], [4, 0, 3, 1, 2], [7, 9, -1, 8, -1, 20]])
def test_it_equals_the_loop(positions):
    q, k, v = draw(len(positions))
    ours = causal_attend(jnp.array(positions))(0, *map(jnp.asarray, (q, k, v)))
    np.testing.assert_allclose(ours, by_hand(q, k, v, positions), atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["k", "v"])
def test_what_is_not_finite_reaches_those_that_see_it_and_only_them(where, bad):
    q, k, v = draw(5)
    {"k": k, "v": v}[where][2, 1] = bad
    ours = np.asarray(causal_attend(jnp.arange(5))(0, *map(jnp.asarray, (q, k, v))))
    wrong = ~np.isfinite(ours).all(axis=-1)
    assert not wrong[:2].any() and not wrong[:, :3].any()  # earlier rows; heads of the other group
    assert where == "k" or wrong[2:, 3:].all()
    as_padding = np.asarray(causal_attend(jnp.array([0, 1, -1, 2, 3]))(0, *map(jnp.asarray, (q, k, v))))
    assert np.isfinite(as_padding).all()


def test_the_result_has_the_dtype_of_q():
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in draw(4))
    ours = causal_attend(jnp.arange(4))(0, q, k, v)
    assert ours.dtype == jnp.bfloat16
    exact = by_hand(*(np.asarray(x, np.float32) for x in (q, k, v)), [0, 1, 2, 3])
    np.testing.assert_allclose(np.asarray(ours, np.float32), exact, atol=0.02)
