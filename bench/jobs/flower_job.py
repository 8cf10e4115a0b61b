"""The job in Flower: its FedAvg on the simulation engine (Ray), a client per core at a time."""

from __future__ import annotations

import os
import sys
import time

from job import (  # type: ignore
    BATCH,
    CLIENTS,
    COHORT,
    LR,
    WARM,
    Turns,
    kept_network,
    level,
    loss,
    network,
    rows,
)


def main() -> None:
    turns, kind = Turns(), sys.argv[1]
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    # The workers of Ray look for this folder's modules.
    os.environ["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))
    import torch
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict  # type: ignore
    from flwr.clientapp import ClientApp  # type: ignore
    from flwr.serverapp import ServerApp  # type: ignore
    from flwr.serverapp.strategy import FedAvg  # type: ignore
    from flwr.simulation import run_simulation  # type: ignore

    client_app, server_app = ClientApp(), ServerApp()

    @client_app.train()
    def train(message, context):
        torch.set_num_threads(1)
        model = kept_network(kind)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        features, labels = rows(kind)[context.node_config["partition-id"]]
        optimiser = torch.optim.SGD(model.parameters(), LR)
        for x, y in zip(features.split(BATCH), labels.split(BATCH), strict=True):
            optimiser.zero_grad()
            loss(model(x), y).backward()
            optimiser.step()
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(labels)}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    class Gated(FedAvg):
        begun = 0.0

        def configure_train(self, server_round, arrays, config, grid):
            now, done = time.perf_counter(), server_round - 1
            if done == WARM:
                model = network(kind)
                model.load_state_dict(arrays.to_torch_state_dict())
                turns.say(rounds=done, loss=level(model, kind))
            elif done > WARM:
                turns.say(seconds=now - self.begun)
            if done >= WARM and not turns.wait():
                import ray  # type: ignore

                ray.shutdown()
                os._exit(0)
            self.begun = time.perf_counter()
            return super().configure_train(server_round, arrays, config, grid)

        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            lost = [reply.error.reason for reply in replies if reply.has_error()]
            if lost or len(replies) != COHORT:
                print(f"round {server_round}: {len(replies)} replies, {lost}", file=sys.stderr)
                os._exit(1)
            return super().aggregate_train(server_round, replies)

    @server_app.main()
    def serve(grid, context):
        strategy = Gated(
            fraction_train=COHORT / CLIENTS,
            fraction_evaluate=0.0,
            min_train_nodes=COHORT,
            min_available_nodes=CLIENTS,
        )
        start = ArrayRecord(network(kind).state_dict())
        strategy.start(grid=grid, initial_arrays=start, num_rounds=10**6)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, CLIENTS, backend_config=resources)


if __name__ == "__main__":
    main()
