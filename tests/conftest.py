"""Set before torch and Triton are imported: how threads wait, and Triton's interpreter where there is no GPU."""

import os

import lorry  # noqa: F401  (sets how torch's threads wait)

if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
