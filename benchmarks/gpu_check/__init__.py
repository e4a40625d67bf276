"""What has to be seen on a real GPU, by one command: `make gpu-check`. See CONTRIBUTING.md, "Checking on a GPU"."""

import sys

if sys.version_info < (3, 12):  # noqa: UP036  # the other files would be a SyntaxError
    sys.exit(f"error: Python 3.12 or newer is needed, {sys.executable} is {sys.version.split()[0]}")
