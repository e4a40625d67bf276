"""The operations that own the KV cache's memory, one folder each: a dispatching API and its implementations."""
