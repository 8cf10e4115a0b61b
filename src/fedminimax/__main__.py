"""python -m fedminimax"""

from fedminimax.cli import main
from fedminimax.engine.distributed import leave

leave(main())
