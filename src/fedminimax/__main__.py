"""python -m fedminimax"""

import sys

from fedminimax.cli import main

sys.exit(main())
