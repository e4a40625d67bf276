"""The sizes of an engine where the caller leaves them open."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.engine.config import EngineConfig, Policy
from jaxpaged.models.config import ModelConfig

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
) -> EngineConfig:
    """Fill in what is None: `max_model_len` from the model, `num_blocks` from the memory that is free.

    Raises ValueError, naming the field, for sizes that cannot work.
    """
    if max_model_len is None:
        max_model_len = model_config.max_position_embeddings
    if isinstance(max_model_len, int) and max_model_len > model_config.max_position_embeddings:
        raise ValueError(
            f"max_model_len is {max_model_len}, the model was made for {model_config.max_position_embeddings} tokens"
        )
    sizes = EngineConfig(
        num_blocks=1 if num_blocks is None else num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_waiting=max_num_waiting,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        schedule=schedule,
        max_steps=max_steps,
        max_stop_ids=max(8, len(model_config.eos_token_ids)),
    )
    if num_blocks is not None:
        return sizes
    bytes_a_block = (
        2 * model_config.num_layers * model_config.num_kv_heads * model_config.head_dim * jnp.dtype(kv_dtype).itemsize
    ) * block_size
    most_useful = max_num_seqs * sizes.blocks_for(max_model_len - 1)
    affordable = int(_free_bytes() * _POOL_SHARE) // bytes_a_block
    if affordable < 1:
        raise ValueError(
            f"block_size={block_size}: one block takes {bytes_a_block / 2**20:.0f} MiB, more than the memory for the pool; "
            "choose a smaller block_size, or num_blocks yourself"
        )
    return EngineConfig(**{**vars(sizes), "num_blocks": min(affordable, most_useful)})


def _free_bytes() -> int:
    """Memory on the device that a pool could take."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return min(_available_host_bytes(), int(_MOST_POOL_BYTES_ON_CPU / _POOL_SHARE))
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return _FALLBACK_FREE_BYTES
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def _available_host_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return _FALLBACK_FREE_BYTES
