"""Attention over a block pool: the pool's layout, its writes, and the attention that reads it."""

from kernels_pallas.paged_attention.api import (
    KVPool,
    check_kv_pool,
    check_platform,
    init_kv_pool,
    paged_attention,
    write_kv,
)

__all__ = ["KVPool", "check_kv_pool", "check_platform", "init_kv_pool", "paged_attention", "write_kv"]
