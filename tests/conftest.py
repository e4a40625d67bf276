"""The platform and the hypothesis profile of every test."""

import os

# The golden files hold CPU results, and a test must not depend on what else uses the accelerator. Before jax's import.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from hypothesis import settings

# A first example compiles, so no deadline holds. CI draws the same examples each time: it tells of a change, not luck.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
