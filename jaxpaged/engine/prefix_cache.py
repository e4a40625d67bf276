"""Which full blocks hold which beginning of a sequence, so that another with the same beginning can share them.

A full block is registered under a key, a hash of all tokens up to its end. A key only says where to look: a hit is one
where the block's own tokens and the block before it are the right ones, so no collision gives a wrong hit. The block
before it can be named by its ID alone: whoever holds a block holds those before it, and releases them later, so none is
handed out again while one that follows it is still registered.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.sums import exclusive_cumsum, pick

# A key's place is one of the ways of a set. With as many sets as blocks, nine keys meet in one of 10 million.
_WAYS = 8
_FEWEST_SETS = 1024
_NOWHERE = -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefixCache:
    """place: of each of the N blocks, its place in `entries`, or -1 if it is not registered.

    entries: the block at each place; stale, unless `place` of that block says the same.
    key, parent, tokens: of the registered blocks. parent is the block before, or for a first one what `_root` gives.
    """

    place: Int32[Array, " N"]
    entries: Int32[Array, " P"]
    key: UInt32[Array, " N"]
    parent: Int32[Array, " N"]
    tokens: Int32[Array, "N block_size"]


def init_prefix_cache(config: EngineConfig) -> PrefixCache:
    """Nothing is registered."""
    blocks = config.num_blocks
    sets = max(_FEWEST_SETS, 1 << (blocks - 1).bit_length())
    return PrefixCache(
        place=jnp.full(blocks, _NOWHERE, jnp.int32),
        entries=jnp.zeros(sets * _WAYS, jnp.int32),
        key=jnp.zeros(blocks, jnp.uint32),
        parent=jnp.zeros(blocks, jnp.int32),
        tokens=jnp.zeros((blocks, config.block_size), jnp.int32),
    )


def clear(cache: PrefixCache) -> PrefixCache:
    """Forget all blocks. Those in use stay so."""
    return replace(cache, place=jnp.full_like(cache.place, _NOWHERE))


def forget(cache: PrefixCache, blocks: Int32[Array, " B"]) -> PrefixCache:
    """These blocks get other tokens. N is no block."""
    return replace(cache, place=cache.place.at[blocks].set(_NOWHERE, mode="drop"))


def look_up(
    cache: PrefixCache,
    tokens: Int32[Array, "S L"],
    total_len: Int32[Array, " S"],
    cache_salt: Int32[Array, " S"],
    config: EngineConfig,
) -> tuple[Int32[Array, " S"], Int32[Array, "S M"]]:
    """How many registered blocks each sequence begins with, and which. Its last token is never among theirs."""
    width = config.max_blocks * config.block_size
    tokens = jnp.pad(tokens[:, :width], ((0, 0), (0, max(0, width - tokens.shape[1]))))
    in_blocks = tokens.reshape(len(tokens), config.max_blocks, config.block_size)
    words = _words(in_blocks, jnp.arange(width).reshape(in_blocks.shape[1:]))
    keys = _key_of_root(cache_salt)[:, None] + jnp.cumsum(jnp.sum(words, axis=2, dtype=jnp.uint32), axis=1)
    found, blocks = _find(cache, keys)
    parent = jnp.concatenate([_root(cache_salt)[:, None], blocks[:, :-1]], axis=1)
    is_hit = found & (cache.parent[blocks] == parent) & jnp.all(cache.tokens[blocks] == in_blocks, axis=2)
    is_hit &= jnp.arange(config.max_blocks) < ((total_len - 1) // config.block_size)[:, None]
    return jnp.sum(jnp.cumprod(is_hit, axis=1), axis=1, dtype=jnp.int32), blocks


class Filled(NamedTuple):
    """The blocks that a step fills, by sequence and position. is_one: the others are none.

    up_to: of each, those of its own sequence up to itself. is_orphan: whether the one before the first of them is not
    registered; then the key means nothing.
    """

    is_one: Bool[Array, " F"]
    block: Int32[Array, " F"]
    parent: Int32[Array, " F"]
    key: UInt32[Array, " F"]
    tokens: Int32[Array, "F block_size"]
    up_to: Bool[Array, "F F"]
    is_orphan: Bool[Array, " F"]


def find_filled(
    cache: PrefixCache,
    tokens: Int32[Array, "R L"],
    row: Int32[Array, " S"],
    tables: Int32[Array, "S M"],
    cached: Int32[Array, " S"],
    scheduled: Int32[Array, " S"],
    cache_salt: Int32[Array, " S"],
    config: EngineConfig,
) -> Filled:
    """The blocks that these tokens fill, of the candidates in these rows and with these tables."""
    size = config.block_size
    num_full = cached // size
    count = (cached + scheduled) // size - num_full
    start = exclusive_cumsum(count)
    i = jnp.arange(most_filled(config))
    its = (start <= i[:, None]) & (i[:, None] < start + count)
    candidate = pick(its, jnp.arange(len(row)))
    index = pick(its, num_full - start) + i  # in its sequence
    is_one = i < jnp.sum(count)
    up_to = (candidate[:, None] == candidate) & (i <= i[:, None]) & is_one

    def block_at(index: Int32[Array, " F"]) -> Int32[Array, " F"]:
        return tables.at[candidate, jnp.maximum(index, 0)].get(mode="clip")

    position = index[:, None] * size + jnp.arange(size)
    own_tokens = tokens.at[row[candidate][:, None], position].get(mode="clip")
    own_sum = jnp.sum(_words(own_tokens, position), axis=1, dtype=jnp.uint32)
    sums = jnp.sum(jnp.where(up_to, own_sum, 0), axis=1, dtype=jnp.uint32)
    salt, begins, before = cache_salt[candidate], num_full[candidate] == 0, block_at(num_full[candidate] - 1)
    return Filled(
        is_one=is_one,
        block=block_at(index),
        parent=jnp.where(index > 0, block_at(index - 1), _root(salt)),
        key=jnp.where(begins, _key_of_root(salt), cache.key[before]) + sums,
        tokens=own_tokens,
        up_to=up_to,
        is_orphan=~begins & (cache.place[before] == _NOWHERE),
    )


def register(cache: PrefixCache, filled: Filled) -> PrefixCache:
    """Register the blocks that a step has filled.

    A block is registered if the one before it is, nothing is registered under its key, and of the step's filled blocks
    none before it has its key. Those that follow a block which was not registered before have no key.
    """
    i = jnp.arange(filled.block.shape[0])
    earlier = (i[:, None] > i) & filled.is_one & ~filled.is_orphan
    is_known = _find(cache, filled.key)[0] | jnp.any(earlier & (filled.key[:, None] == filled.key), axis=1)
    # Several that come to one set take its free places in order.
    places = _places(cache, filled.key)
    is_free = ~_is_entry(cache, places, cache.entries[places])
    turn = jnp.sum(earlier & ~is_known & (places[0][:, None] == places[0]), axis=1) + 1
    is_its = is_free & (jnp.cumsum(is_free, axis=0) == turn)
    place = jnp.sum(jnp.where(is_its, places, 0), axis=0)

    fails = filled.is_one & (filled.is_orphan | is_known | ~jnp.any(is_its, axis=0))
    succeeds = filled.is_one & ~jnp.any(filled.up_to & fails, axis=1)  # and so do those before it
    block = jnp.where(succeeds, filled.block, cache.place.shape[0])
    entry = jnp.where(succeeds, place, cache.entries.shape[0])
    return PrefixCache(
        place=cache.place.at[block].set(place, mode="drop"),
        entries=cache.entries.at[entry].set(block, mode="drop"),
        key=cache.key.at[block].set(filled.key, mode="drop"),
        parent=cache.parent.at[block].set(filled.parent, mode="drop"),
        tokens=cache.tokens.at[block].set(filled.tokens, mode="drop"),
    )


def most_filled(config: EngineConfig) -> int:
    """The most blocks that one step fills: each sequence may fill one that was nearly full before."""
    return config.max_num_seqs + config.max_num_batched_tokens // config.block_size


def _root(cache_salt: Int32[Array, " *N"]) -> Int32[Array, " *N"]:
    """What stands for the block before the first: below 0, and another for each salt."""
    return -1 - cache_salt


def _key_of_root(cache_salt: Int32[Array, " *N"]) -> UInt32[Array, " *N"]:
    return _mix(cache_salt.astype(jnp.uint32))


def _words(tokens: Int32[Array, "*N"], position: Int32[Array, "*N"]) -> UInt32[Array, "*N"]:
    """A token at a position as a random word: their sum is the key, so it can be taken up where it was left."""
    return _mix(_mix(position.astype(jnp.uint32)) ^ tokens.astype(jnp.uint32))


def _mix(word: UInt32[Array, "*N"]) -> UInt32[Array, "*N"]:
    """The finalizer of MurmurHash3, after an addition, since it leaves 0 as it is."""
    word += jnp.uint32(0x9E3779B9)
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


def _find(cache: PrefixCache, key: UInt32[Array, "*N"]) -> tuple[Bool[Array, "*N"], Int32[Array, "*N"]]:
    """Whether a block is registered under the key, and which: 0 if none is, and never several."""
    places = _places(cache, key)
    blocks = cache.entries[places]
    matches = _is_entry(cache, places, blocks) & (cache.key[blocks] == key)
    return jnp.any(matches, axis=0), jnp.sum(jnp.where(matches, blocks, 0), axis=0, dtype=jnp.int32)


def _places(cache: PrefixCache, key: UInt32[Array, "*N"]) -> Int32[Array, "ways *N"]:
    """The places of a key's set. The ways come first: last, a TPU would pad them to 128 lanes."""
    sets = cache.entries.shape[0] // _WAYS
    first = (_mix(key) % jnp.uint32(sets)).astype(jnp.int32) * _WAYS
    return first + jnp.arange(_WAYS).reshape(-1, *(1,) * key.ndim)


def _is_entry(cache: PrefixCache, places: Int32[Array, "*N"], blocks: Int32[Array, "*N"]) -> Bool[Array, "*N"]:
    return cache.place[blocks] == places
