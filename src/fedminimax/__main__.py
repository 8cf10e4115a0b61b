"""python -m fedminimax"""

import sys

from fedminimax.cli import main

code = main()
if "torch" in sys.modules:
    from fedminimax.engine.backends.torchrun import leave

    leave(code)
sys.exit(code)
