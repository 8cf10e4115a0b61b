"""What happens to messages between clients and the server, by name.

A run's stages act in the order of `STAGES`, whatever order they are given in by a file.
"""

from fedminimax.messages.clip import Clip
from fedminimax.messages.drift import Drift
from fedminimax.messages.robust import CentredClipping, Median, TrimmedMean
from fedminimax.messages.stage import Held, Mean, Messages, Reducer, Stage

STAGES: dict[str, type[Stage]] = {
    "clip": Clip,
}
REDUCERS: dict[str, type[Reducer]] = {
    "mean": Mean,
    "trimmed_mean": TrimmedMean,
    "median": Median,
    "centred_clipping": CentredClipping,
}

__all__ = [
    "REDUCERS",
    "STAGES",
    "CentredClipping",
    "Clip",
    "Drift",
    "Held",
    "Mean",
    "Median",
    "Messages",
    "Reducer",
    "Stage",
    "TrimmedMean",
]
