"""The methods, by the name that an experiment gives them."""

from __future__ import annotations

from fedminimax.algorithms.ada_fgda import AdaFGDA as AdaFGDA
from fedminimax.algorithms.afl import AFL as AFL
from fedminimax.algorithms.cdma import CDMAADA as CDMAADA
from fedminimax.algorithms.cdma import CDMANC as CDMANC
from fedminimax.algorithms.cdma import CDMAONE as CDMAONE
from fedminimax.algorithms.coda import Coda as Coda
from fedminimax.algorithms.coda_plus import CodaPlus as CodaPlus
from fedminimax.algorithms.codasca import Codasca as Codasca
from fedminimax.algorithms.drfa import DRFA as DRFA
from fedminimax.algorithms.fed_dr_scgd import FedDRSCGD as FedDRSCGD
from fedminimax.algorithms.fed_dr_scgda import FedDRSCGDA as FedDRSCGDA
from fedminimax.algorithms.fed_norm_sgda import FedNormSGDA as FedNormSGDA
from fedminimax.algorithms.fed_norm_sgda import FedNormSGDAPlus as FedNormSGDAPlus
from fedminimax.algorithms.fedavg import FedAvg as FedAvg
from fedminimax.algorithms.fednest import FedNest as FedNest
from fedminimax.algorithms.fedprox import FedProx as FedProx
from fedminimax.algorithms.fedsgda_m import FedSGDAM as FedSGDAM
from fedminimax.algorithms.fedsgda_plus import FedSGDAPlus as FedSGDAPlus
from fedminimax.algorithms.fess_gda import FESSGDA as FESSGDA
from fedminimax.algorithms.fgda import FGDA as FGDA
from fedminimax.algorithms.fsgda import FSGDA as FSGDA
from fedminimax.algorithms.levelwise_dr_scgd import LevelwiseDRSCGD as LevelwiseDRSCGD
from fedminimax.algorithms.levelwise_dr_scgda import LevelwiseDRSCGDA as LevelwiseDRSCGDA
from fedminimax.algorithms.levelwise_scgdam import LevelwiseSCGDAM as LevelwiseSCGDAM
from fedminimax.algorithms.levelwise_scgdm import LevelwiseSCGDM as LevelwiseSCGDM
from fedminimax.algorithms.local_scgdam import LocalSCGDAM as LocalSCGDAM
from fedminimax.algorithms.local_scgdm import LocalSCGDM as LocalSCGDM
from fedminimax.algorithms.local_sgda import LocalSGDA as LocalSGDA
from fedminimax.algorithms.local_sgda_plus import LocalSGDAPlus as LocalSGDAPlus
from fedminimax.algorithms.local_sgdam import LocalSGDAM as LocalSGDAM
from fedminimax.algorithms.local_sgdam_plus import LocalSGDAMPlus as LocalSGDAMPlus
from fedminimax.algorithms.local_sgdm import LocalSGDM as LocalSGDM
from fedminimax.algorithms.local_sgdm_rl import LocalSGDMRL as LocalSGDMRL
from fedminimax.algorithms.nlasg import NLASG as NLASG
from fedminimax.algorithms.npa import NPA as NPA
from fedminimax.algorithms.sagda import SAGDA as SAGDA
from fedminimax.algorithms.scaffold import Scaffold as Scaffold
from fedminimax.algorithms.scsc import SCSC as SCSC
from fedminimax.algorithms.smoothed_gda import SmoothedAGDA as SmoothedAGDA
from fedminimax.algorithms.smoothed_gda import SmoothedGDA as SmoothedGDA
from fedminimax.algorithms.smvr import SMVR as SMVR
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
    "levelwise_dr_scgd": LevelwiseDRSCGD,
    "levelwise_dr_scgda": LevelwiseDRSCGDA,
    "levelwise_scgdam": LevelwiseSCGDAM,
    "levelwise_scgdm": LevelwiseSCGDM,
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
