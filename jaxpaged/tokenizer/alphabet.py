"""The alphabet of byte-level BPE: a visible character for each byte."""

from __future__ import annotations


def _alphabet() -> dict[int, str]:
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = sorted(set(range(0x100)) - visible)
    # A byte that Latin-1 shows as a visible character is that character; the others follow from U+0100.
    return {byte: chr(byte) for byte in visible} | {byte: chr(0x100 + place) for place, byte in enumerate(hidden)}


BYTE_TO_CHAR = _alphabet()
CHAR_TO_BYTE = {char: byte for byte, char in BYTE_TO_CHAR.items()}
