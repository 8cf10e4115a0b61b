"""The job in pfl: FederatedAveraging on its simulated backend, a turn per central iteration."""

from __future__ import annotations

import sys
import time

from job import (  # type: ignore
    BATCH,
    CLIENTS,
    COHORT,
    LR,
    WARM,
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
    import torch
    from pfl.aggregate.simulate import SimulatedBackend  # type: ignore
    from pfl.algorithm.base import NNAlgorithmParams  # type: ignore
    from pfl.algorithm.federated_averaging import FederatedAveraging  # type: ignore
    from pfl.callback.base import TrainingProcessCallback  # type: ignore
    from pfl.data.dataset import Dataset  # type: ignore
    from pfl.data.federated_dataset import FederatedDataset  # type: ignore
    from pfl.data.sampling import get_user_sampler  # type: ignore
    from pfl.hyperparam import NNTrainHyperParams  # type: ignore
    from pfl.metrics import Metrics  # type: ignore
    from pfl.model.pytorch import PyTorchModel  # type: ignore

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network(kind)

        def loss(self, features, labels, **_):
            return loss(self.inner(features), labels)

        def metrics(self, *_, **__):
            return {}

    class Gate(TrainingProcessCallback):
        begun = 0.0

        def after_central_iteration(self, metrics, model, *, central_iteration):
            now, done = time.perf_counter(), central_iteration + 1
            if done == WARM:
                turns.say(rounds=done, loss=level(net.inner, kind))
            elif done > WARM:
                turns.say(seconds=now - self.begun)
            stop = done >= WARM and not turns.wait()
            self.begun = time.perf_counter()
            return stop, Metrics()

    clients = rows(kind)
    users = FederatedDataset(
        lambda user: Dataset(clients[user]), get_user_sampler("minimize_reuse", range(CLIENTS))
    )
    net = Net()
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), 1.0))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=10**9,
            evaluation_frequency=10**9,
            train_cohort_size=COHORT,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=users, val_data=None),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH
        ),
        callbacks=[Gate()],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
