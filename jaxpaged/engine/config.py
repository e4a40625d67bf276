"""What is fixed when an engine is built: every static shape and rule of the compiled loop."""

from dataclasses import dataclass
from typing import Literal, get_args

Policy = Literal["mixed", "prefill_first"]


@dataclass(frozen=True, order=True)
class Bucket:
    """A compiled shape of one step: `decode_rows` tiles of one token and `prefill_tiles` tiles of `tile_q` tokens."""

    decode_rows: int
    prefill_tiles: int

    def num_rows(self, tile_q: int) -> int:
        return self.decode_rows + self.prefill_tiles * tile_q


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The sizes and the policy of an engine. Raises ValueError, naming the field, for a value that cannot work.

    num_blocks, block_size: the pool, in blocks and in tokens a block.
    max_num_seqs: slots, that is sequences that run at once.
    max_num_waiting: queue places on the device besides the slots; requests beyond them wait on the host.
    max_num_batched_tokens: the token budget of one step.
    max_model_len: the longest sequence, prompt and output together, in tokens.
    max_steps: the most steps of one run, which the event buffer has room for.
    max_stop_ids: the most stop token ids (EOS among them) of a request.
    tile_q: query tokens of one prefill tile.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_waiting: int
    max_num_batched_tokens: int
    max_model_len: int
    schedule: Policy = "mixed"
    max_steps: int = 64
    max_stop_ids: int = 8
    tile_q: int = 16

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "schedule" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
        if self.schedule not in get_args(Policy):
            raise ValueError(f"schedule must be one of {list(get_args(Policy))}, not {self.schedule!r}")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2 (a prompt token and an output token), not {self.max_model_len}")

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

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def row_levels(self) -> tuple[int, ...]:
        """Numbers of rows that sequences, one row each, are padded to, smallest first."""
        rows = min(self.max_num_seqs, self.max_num_batched_tokens)
        return tuple(sorted({min(level, rows) for level in (1, 8, rows)}))

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The shapes a step can take, smallest first; the last one takes every step that the rules allow."""
        slots, tile_q = self.max_num_seqs, self.tile_q
        budget = min(self.max_num_batched_tokens, slots * self.max_model_len)
        # Every sequence may end in a tile that is not full.
        most_tiles = min(budget, budget // tile_q + slots)
        tile_levels = {min(max(1, level), most_tiles) for level in (budget // tile_q // 4, budget // tile_q, most_tiles)}
        decode = [Bucket(level, 0) for level in self.row_levels]
        mixed = [Bucket(self.row_levels[-1], level) for level in tile_levels]
        return tuple(sorted(decode + mixed, key=lambda bucket: bucket.num_rows(tile_q)))
