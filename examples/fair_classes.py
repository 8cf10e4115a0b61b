"""Ten sites train one classifier of ten classes: for the average image, and for the worst class.

The images are those of Fashion-MNIST (fedminimax data fetch fashion_mnist), or, where these are
not at hand, the small handwritten digits that come with scikit-learn, with few images of an 8.
"""

import numpy as np
import torch
from sklearn.datasets import load_digits

import fedminimax as fm
from fedminimax.data.image_sets import FashionMNIST
from fedminimax.data.sites import DataError

# fmt: off
CLOTHES = [
    "T-shirt", "trousers", "pullover", "dress", "coat",
    "sandal", "shirt", "sneaker", "bag", "boot",
]
# fmt: on


def fashion():
    """One image in ten of each kind of clothing, dealt out to ten sites."""
    data = FashionMNIST(clients=10, share=0.1)
    return data.client_rows(), data.test_rows(), CLOTHES


def digits():
    """Digits of 8 x 8 pixels; one in ten of the eights stays to train on."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[:1200], order[1200:]
    train = train[(labels[train] != 8) | (np.arange(1200) % 10 == 0)]
    sites = [(images[s] / 16, labels[s]) for s in np.array_split(train, 10)]
    return sites, [(images[test] / 16, labels[test])], [str(number) for number in range(10)]


try:
    rows, test, names = fashion()
    print("Fashion-MNIST, ten sites")
except DataError:
    rows, test, names = digits()
    print("Fashion-MNIST is not here: the digits of scikit-learn, ten sites, few eights")

torch.manual_seed(0)
pixels = int(np.prod(rows[0][0].shape[1:]))
network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(pixels, 10))
clients = fm.Clients(rows, batch_size=64)

# "fair" has a dual: a weight for each class, which grows while the loss of that class is larger
# than that of others. So the network is trained on what it is worst at.
choices = {
    "average": (
        fm.problems.WeightedCrossEntropy(network, 10),
        fm.methods.FedAvg(lr=0.1, local_steps=4),
    ),
    "fair": (
        fm.problems.Fair(network, classes=10),
        fm.methods.FESSGDA(primal_lr=0.05, dual_lr=0.003, local_steps=4, smoothing=0.0),
    ),
}
for name, (problem, method) in choices.items():
    run = fm.simulate(
        problem, method, clients, rounds=200, evaluate_every=200, executor="vectorised"
    )
    with torch.no_grad():
        guesses = [run.module()(torch.as_tensor(x).float()).argmax(1) for x, _ in test]
    labels = torch.cat([torch.as_tensor(y) for _, y in test])
    right = (torch.cat(guesses) == labels).float()
    recalls = [float(right[labels == c].mean()) for c in range(10)]
    worst = int(np.argmin(recalls))
    print(f"{name:>8}: accuracy {float(right.mean()):.3f}, ", end="")
    print(f"of the worst class ({names[worst]}) {recalls[worst]:.3f}")

heaviest = sorted(zip(run.point.y.tolist(), names, strict=True), reverse=True)[:4]
print("heaviest classes: " + ", ".join(f"{label} ({weight:.2f})" for weight, label in heaviest))
