"""The engine: a state, and pure functions from a state to the next one. The host driver is `Engine`."""
