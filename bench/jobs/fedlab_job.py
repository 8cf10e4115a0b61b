"""The job in FedLab: its serial trainer and synchronous handler, in the loop of its pipeline."""

from __future__ import annotations

import sys
import types

from job import (  # type: ignore
    BATCH,
    CLIENTS,
    COHORT,
    LR,
    STEPS,
    Turns,
    level,
    loss,
    network,
    rows,
    threads,
)


def main() -> None:
    turns, kind = Turns(), sys.argv[1]
    threads()
    # Its data sets import torchvision, which may have been built for another torch. None is used.
    for name in ("torchvision", "torchvision.transforms"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["torchvision"].transforms = sys.modules["torchvision.transforms"]  # type: ignore
    from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer  # type: ignore
    from fedlab.contrib.algorithm.basic_server import SyncServerHandler  # type: ignore

    clients = rows(kind)

    class Data:
        def get_dataloader(self, client: int, batch_size: int):
            features, labels = clients[client]
            return zip(features.split(batch_size), labels.split(batch_size), strict=True)

    trainer = SGDSerialClientTrainer(network(kind), CLIENTS)
    trainer.setup_dataset(Data())
    trainer.setup_optim(1, BATCH, LR)
    trainer.criterion = loss
    handler = SyncServerHandler(network(kind), 10**9, COHORT / CLIENTS)
    handler.num_clients = CLIENTS
    assert len(clients[0][1]) == STEPS * BATCH

    def play() -> None:
        chosen = handler.sample_clients()
        trainer.local_process(handler.downlink_package, chosen)
        for pack in trainer.uplink_package:
            handler.load(pack)

    turns.serve(play, lambda: level(handler.model, kind))


if __name__ == "__main__":
    main()
