"""Paged attention in plain jnp: the definition the kernels are held to, and what runs on CPU."""

from kernels_pallas.paged_attention.reference.attend import Reference as Reference
