"""What happens to messages between clients and the server, by name.

The stages of a file act in the order of `STAGES`, whatever their order there; a compressor is last.
"""

from fedminimax.messages.clip import Clip as Clip
from fedminimax.messages.compress import EightBit as EightBit
from fedminimax.messages.compress import RandomCoordinates as RandomCoordinates
from fedminimax.messages.compress import TopK as TopK
from fedminimax.messages.drift import Drift as Drift
from fedminimax.messages.robust import CentredClipping as CentredClipping
from fedminimax.messages.robust import Median as Median
from fedminimax.messages.robust import TrimmedMean as TrimmedMean
from fedminimax.messages.secure.masked import Masked as Masked
from fedminimax.messages.stage import Mean as Mean
from fedminimax.messages.stage import Messages as Messages
from fedminimax.messages.stage import MessageState as MessageState
from fedminimax.messages.stage import Reducer as Reducer
from fedminimax.messages.stage import Stage as Stage

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
