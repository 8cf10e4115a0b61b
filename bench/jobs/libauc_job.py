"""A client's steps with LibAUC's AUCMLoss and PESG, on the network of the job.

The package's own import needs torchvision: its two modules are loaded without it. PESG without
momentum and penalties, which is descent ascent but for alpha: its step is 2 (m + b - a - alpha),
where the loss has p (1 - p) before it, and mean scores in the place of a and b.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
import warnings

from job import BATCH, LR, Turns, network, rows, threads  # type: ignore


def main() -> None:
    turns = Turns()
    threads()
    import torch

    found = importlib.util.find_spec("libauc")
    assert found is not None
    assert found.origin is not None
    folder = os.path.dirname(found.origin)
    for name in ("libauc", "libauc.utils", "libauc.losses", "libauc.optimizers"):
        package = types.ModuleType(name)
        package.__path__ = [os.path.join(folder, *name.split(".")[1:])]
        sys.modules[name] = package
    helpers = importlib.import_module("libauc.utils.utils")
    sys.modules["libauc.utils"].is_distributed = helpers.is_distributed  # type: ignore
    AUCMLoss = importlib.import_module("libauc.losses.auc").AUCMLoss
    PESG = importlib.import_module("libauc.optimizers.pesg").PESG

    model, (features, labels) = network("cnn"), rows("cnn")[0]
    loss = AUCMLoss(device=torch.device("cpu"))
    none = {"momentum": 0.0, "weight_decay": 0.0, "epoch_decay": 0.0}
    cpu = torch.device("cpu")
    optimiser = PESG(model.parameters(), loss, lr=LR, verbose=False, device=cpu, **none)
    warnings.simplefilter("ignore")

    def play() -> None:
        for x, y in zip(features.split(BATCH), labels.split(BATCH), strict=True):
            optimiser.zero_grad()
            loss(torch.sigmoid(model(x)), y).backward()
            optimiser.step()

    def value() -> float:
        with torch.no_grad():
            return float(loss(torch.sigmoid(model(features)), labels))

    turns.serve(play, value)


if __name__ == "__main__":
    main()
