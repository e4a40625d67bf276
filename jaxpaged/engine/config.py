"""What is fixed when an engine is built: every static shape and rule of the compiled loop."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from jax import Array

DType = Literal["auto", "float32", "bfloat16"]
Policy = Literal["mixed", "prefill_first"]

# A step of up to 32 sequences, which the end of most loads is made of, takes half of what 64 rows take. Finer levels
# save less than their compile takes.
_ROW_LEVELS = (1, 8, 32, 128)
# A matrix product of fewer rows takes hardly less time, and each bucket costs a compile.
_FEWEST_PREFILL_ROWS = 128


@dataclass(frozen=True)
class Bucket:
    """A compiled shape of one step: rows that the model computes, and the query tiles that attention sees them as."""

    rows: int
    decode_tiles: int
    prefill_tiles: int


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The sizes and the policy of an engine. Raises ValueError, naming the field, for a value that cannot work.

    num_blocks, block_size: the pool, in blocks and in tokens a block.
    max_num_seqs: slots, that is sequences that run at once.
    max_num_waiting: queue places on the device besides the slots; requests beyond them wait on the host.
    max_num_batched_tokens: the token budget of one step.
    max_model_len: the longest sequence, prompt and output together, in tokens.
    enable_prefix_caching: whether sequences that begin alike share their blocks.
    max_steps: the most steps of one run, which the event buffer has room for.
    max_stop_ids: the most stop token ids (EOS among them) of a request.
    max_listed_tokens: the most token ids that a request may allow or bias.
    tile_q: query tokens of one prefill tile.
    fewest_rows: to which a step with less to decode is padded, where fewer rows take longer.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_waiting: int
    max_num_batched_tokens: int
    max_model_len: int
    schedule: Policy = "mixed"
    enable_prefix_caching: bool = True
    max_steps: int = 64
    max_stop_ids: int = 16
    max_listed_tokens: int = 256
    tile_q: int = 32
    fewest_rows: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name not in ("schedule", "enable_prefix_caching") and (
                not isinstance(value, int) or isinstance(value, bool) or value < 1
            ):
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
        if not isinstance(self.enable_prefix_caching, bool):
            raise ValueError(f"enable_prefix_caching must be True or False, not {self.enable_prefix_caching!r}")
        if self.schedule not in get_args(Policy):
            raise ValueError(f"schedule must be one of {list(get_args(Policy))}, not {self.schedule!r}")
        if self.max_model_len < 2:
            raise ValueError(
                f"max_model_len must be at least 2 (a prompt token and an output token), not {self.max_model_len}"
            )

    @property
    def num_rows(self) -> int:
        """Rows of the request table: every slot and every queue place."""
        return self.max_num_seqs + self.max_num_waiting

    @property
    def max_blocks(self) -> int:
        """Blocks that one sequence can hold: the width of a block table."""
        return min(self.blocks_for(self.max_model_len - 1), self.num_blocks)

    @property
    def scratch_block(self) -> int:
        """The block after the last real one. Padding writes there, and nobody reads it."""
        return self.num_blocks

    def blocks_for[N: (int, Array)](self, num_tokens: N) -> N:
        """Blocks that hold `num_tokens` tokens, for a number or an array of them."""
        return -(-num_tokens // self.block_size)

    @property
    def row_levels(self) -> tuple[int, ...]:
        """Numbers of rows that decodes and samples, one row a sequence, are padded to, smallest first."""
        most = min(self.max_num_seqs, self.max_num_batched_tokens)
        fewest = min(self.fewest_rows, most)
        return tuple(sorted({most, *(max(level, fewest) for level in _ROW_LEVELS if 2 * level <= most)}))

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The shapes a step can take, smallest first; the last one takes every step that the rules allow."""
        budget = min(self.max_num_batched_tokens, self.max_num_seqs * self.max_model_len)
        decodes = [Bucket(rows, rows, 0) for rows in self.row_levels]
        prefills = [
            # Every sequence may end in a tile that is not full.
            Bucket(rows, min(rows, self.max_num_seqs), min(rows, rows // self.tile_q + self.max_num_seqs))
            for rows in (budget // 16, budget // 4, budget)
            if rows == budget or rows >= _FEWEST_PREFILL_ROWS
        ]
        return tuple(sorted(decodes + prefills, key=lambda bucket: (bucket.rows, bucket.prefill_tiles)))
