"""The sizes of an engine where the caller leaves them open."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.engine.config import EngineConfig, Policy
from jaxpaged.engine.cpu import cpu_features
from jaxpaged.models.config import ModelConfig
from jaxpaged.sampling_params import is_int

# Of the memory that is free, for the block pool; the rest is for weights and activations.
_POOL_SHARE = 0.5
_MOST_POOL_BYTES_ON_CPU = 2**30
_FALLBACK_FREE_BYTES = 2**31


def engine_config(
    model_config: ModelConfig,
    *,
    kv_dtype: np.typing.DTypeLike,
    block_size: int,
    num_blocks: int | None,
    max_num_seqs: int,
    max_num_waiting: int,
    max_num_batched_tokens: int,
    max_model_len: int | None,
    schedule: Policy,
    max_steps: int,
    enable_prefix_caching: bool = True,
) -> EngineConfig:
    """Fill in what is None: `max_model_len` from the model, `num_blocks` from the memory that is free.

    Raises ValueError, naming the field, for sizes that cannot work or that memory has no room for.
    """
    if max_model_len is None:
        max_model_len = model_config.max_position_embeddings
    if is_int(max_model_len) and max_model_len > model_config.max_position_embeddings:
        raise ValueError(
            f"max_model_len is {max_model_len}, the model was made for {model_config.max_position_embeddings} tokens"
        )
    sizes = EngineConfig(
        num_blocks=1 if num_blocks is None else _plain(num_blocks),
        block_size=_plain(block_size),
        max_num_seqs=_plain(max_num_seqs),
        max_num_waiting=_plain(max_num_waiting),
        max_num_batched_tokens=_plain(max_num_batched_tokens),
        max_model_len=_plain(max_model_len),
        schedule=schedule,
        max_steps=_plain(max_steps),
        enable_prefix_caching=enable_prefix_caching,
        max_stop_ids=max(8, len(model_config.eos_token_ids)),
        fewest_rows=_fewest_rows(kv_dtype),
        tile_q=16 if jax.default_backend() == "cpu" else 32,  # what padding costs there outweighs the larger product
    )
    free_bytes = _free_bytes()
    _check_room(
        f"max_num_seqs={max_num_seqs}, max_num_waiting={max_num_waiting} and max_model_len={max_model_len}",
        sizes.num_rows * sizes.max_model_len * np.dtype(np.int32).itemsize,
        free_bytes,
    )
    budget = sizes.buckets[-1].rows
    # The widest rows of a step, in float32: what the MLP makes of each, twice, and the queries.
    row_width = 2 * model_config.intermediate_size + model_config.num_heads * model_config.head_dim
    _check_room(
        f"max_num_batched_tokens={max_num_batched_tokens}: the activations of a step of {budget} tokens",
        budget * row_width * np.dtype(np.float32).itemsize,
        free_bytes,
    )
    bytes_a_block = (
        2 * model_config.num_layers * model_config.num_kv_heads * model_config.head_dim * jnp.dtype(kv_dtype).itemsize
    ) * sizes.block_size
    if num_blocks is not None:
        _check_room(f"num_blocks={num_blocks} of block_size={block_size}", sizes.num_blocks * bytes_a_block, free_bytes)
        return sizes
    most_useful = sizes.max_num_seqs * sizes.blocks_for(sizes.max_model_len - 1)
    affordable = _pool_bytes(free_bytes) // bytes_a_block
    if affordable < 1:
        raise ValueError(
            f"block_size={block_size}: one block takes {bytes_a_block / 2**20:.0f} MiB, more than the memory for the "
            "pool; choose a smaller block_size, or num_blocks yourself"
        )
    return EngineConfig(**{**vars(sizes), "num_blocks": min(affordable, most_useful)})


def best_dtype(max_num_seqs: int) -> np.dtype:
    """What weights and block pool are fastest in on this device: bfloat16 where its products are in hardware.

    On a CPU, one sequence at once takes float32: XLA's bfloat16 product of one row takes ten times as long as of two,
    and of two half as long again as float32's of one.
    """
    if jax.default_backend() == "cpu" and (max_num_seqs == 1 or not _cpu_multiplies_bfloat16()):
        return np.dtype(np.float32)
    return jnp.dtype(jnp.bfloat16)


def _cpu_multiplies_bfloat16() -> bool:
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(cpu_features())


def _fewest_rows(dtype: np.typing.DTypeLike) -> int:
    return 2 if jax.default_backend() == "cpu" and jnp.dtype(dtype) == jnp.bfloat16 else 1


def _plain(value: Any) -> Any:
    """An integer of another library as Python's; anything else as it is, for EngineConfig to refuse."""
    return int(value) if is_int(value) else value


def _check_room(what: str, num_bytes: int, free_bytes: int | None) -> None:
    if free_bytes is not None and num_bytes > free_bytes:
        raise ValueError(f"{what} take {num_bytes / 2**30:.1f} GiB of memory, {free_bytes / 2**30:.1f} GiB are free")


def _pool_bytes(free_bytes: int | None) -> int:
    pool_bytes = int((_FALLBACK_FREE_BYTES if free_bytes is None else free_bytes) * _POOL_SHARE)
    return min(pool_bytes, _MOST_POOL_BYTES_ON_CPU) if jax.default_backend() == "cpu" else pool_bytes


def _free_bytes() -> int | None:
    """Free memory on the device; None where it is unknown."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return _available_host_bytes()
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def _available_host_bytes() -> int | None:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
