"""What happens to messages between clients and the server, by name.

The stages of a file act in the order of `STAGES`, whatever their order there; a compressor is last.
"""

from fedminimax.messages.clip import Clip
from fedminimax.messages.compress import EightBit, RandomCoordinates, TopK
from fedminimax.messages.drift import Drift
from fedminimax.messages.robust import CentredClipping, Median, TrimmedMean
from fedminimax.messages.secure.masked import Masked
from fedminimax.messages.stage import Mean, Messages, MessageState, Reducer, Stage

STAGES: dict[str, type[Stage]] = {
    "clip": Clip,
}
COMPRESSORS: dict[str, type[Stage]] = {
    "eight_bit": EightBit,
    "top": TopK,
    "random": RandomCoordinates,
}
REDUCERS: dict[str, type[Reducer]] = {
    "mean": Mean,
    "masked": Masked,
    "trimmed_mean": TrimmedMean,
    "median": Median,
    "centred_clipping": CentredClipping,
}

__all__ = [
    "COMPRESSORS",
    "REDUCERS",
    "STAGES",
    "CentredClipping",
    "Clip",
    "Drift",
    "EightBit",
    "Masked",
    "Mean",
    "Median",
    "MessageState",
    "Messages",
    "RandomCoordinates",
    "Reducer",
    "Stage",
    "TopK",
    "TrimmedMean",
]
