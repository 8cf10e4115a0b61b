"""The methods, by the name that an experiment gives them."""

from __future__ import annotations

from fedminimax.algorithms.ada_fgda import AdaFGDA
from fedminimax.algorithms.afl import AFL
from fedminimax.algorithms.cdma import CDMAADA, CDMANC, CDMAONE
from fedminimax.algorithms.coda import Coda
from fedminimax.algorithms.coda_plus import CodaPlus
from fedminimax.algorithms.codasca import Codasca
from fedminimax.algorithms.drfa import DRFA
from fedminimax.algorithms.fed_dr_scgd import FedDRSCGD
from fedminimax.algorithms.fed_dr_scgda import FedDRSCGDA
from fedminimax.algorithms.fed_norm_sgda import FedNormSGDA, FedNormSGDAPlus
from fedminimax.algorithms.fedavg import FedAvg
from fedminimax.algorithms.fednest import FedNest
from fedminimax.algorithms.fedprox import FedProx
from fedminimax.algorithms.fedsgda_m import FedSGDAM
from fedminimax.algorithms.fedsgda_plus import FedSGDAPlus
from fedminimax.algorithms.fess_gda import FESSGDA
from fedminimax.algorithms.fgda import FGDA
from fedminimax.algorithms.fsgda import FSGDA
from fedminimax.algorithms.local_scgdam import LocalSCGDAM
from fedminimax.algorithms.local_scgdm import LocalSCGDM
from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.algorithms.local_sgda_plus import LocalSGDAPlus
from fedminimax.algorithms.local_sgdam import LocalSGDAM
from fedminimax.algorithms.local_sgdam_plus import LocalSGDAMPlus
from fedminimax.algorithms.local_sgdm import LocalSGDM
from fedminimax.algorithms.local_sgdm_rl import LocalSGDMRL
from fedminimax.algorithms.nlasg import NLASG
from fedminimax.algorithms.npa import NPA
from fedminimax.algorithms.sagda import SAGDA
from fedminimax.algorithms.scaffold import Scaffold
from fedminimax.algorithms.scsc import SCSC
from fedminimax.algorithms.smoothed_gda import SmoothedAGDA, SmoothedGDA
from fedminimax.algorithms.smvr import SMVR
from fedminimax.types import Algorithm

METHODS: dict[str, type[Algorithm]] = {
    "ada_fgda": AdaFGDA,
    "afl": AFL,
    "cdma_ada": CDMAADA,
    "cdma_nc": CDMANC,
    "cdma_one": CDMAONE,
    "coda": Coda,
    "coda_plus": CodaPlus,
    "codasca": Codasca,
    "drfa": DRFA,
    "fed_dr_scgd": FedDRSCGD,
    "fed_dr_scgda": FedDRSCGDA,
    "fed_norm_sgda": FedNormSGDA,
    "fed_norm_sgda_plus": FedNormSGDAPlus,
    "fedavg": FedAvg,
    "fednest": FedNest,
    "fedprox": FedProx,
    "fedsgda_m": FedSGDAM,
    "fedsgda_plus": FedSGDAPlus,
    "fess_gda": FESSGDA,
    "fgda": FGDA,
    "fsgda": FSGDA,
    "local_scgdam": LocalSCGDAM,
    "local_scgdm": LocalSCGDM,
    "local_sgda": LocalSGDA,
    "local_sgda_plus": LocalSGDAPlus,
    "local_sgdam": LocalSGDAM,
    "local_sgdam_plus": LocalSGDAMPlus,
    "local_sgdm": LocalSGDM,
    "local_sgdm_rl": LocalSGDMRL,
    "nlasg": NLASG,
    "npa": NPA,
    "sagda": SAGDA,
    "scaffold": Scaffold,
    "scsc": SCSC,
    "smoothed_agda": SmoothedAGDA,
    "smoothed_gda": SmoothedGDA,
    "smvr": SMVR,
}
