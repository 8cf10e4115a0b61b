"""fedminimax before torch: threads of one operation then do not keep each other off where several
tests share the cores (engine/waiting.py)."""

import fedminimax  # noqa: F401
