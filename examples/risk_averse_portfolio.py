"""Eight investors find weights of high return and low risk; none shows the returns of its days.

Risk is the deviation of the return: the root of a mean of squares around a mean. So the objective
is a function of a function of means, not a mean: a composition of three levels.

The returns are those of 100 Fama-French portfolios of US stocks, day by day (fedminimax data fetch
fama_french), or, where these are not at hand, made-up ones.
"""

import torch

import fedminimax as fm
from fedminimax.data.fama_french import FamaFrench
from fedminimax.data.returns import Returns
from fedminimax.data.sites import DataError

try:
    data = FamaFrench(sort="ME", clients=8)  # each investor has another period
    rows = data.client_rows()
    print("Fama-French, 100 portfolios by size and book-to-market, daily returns in percent")
except DataError:
    data = Returns(clients=8, assets=20, spread=0.2)
    rows = data.client_rows()
    print("The Fama-French returns are not here: made-up ones of 20 assets, in percent")

# Weights sum to 1; the loss is the deviation less the mean return.
problem = fm.problems.Portfolio(data.dimension, budget="sum")
clients = fm.Clients(rows, batch_size=64)
# Level-wise: each level is averaged over all investors before the next is computed from it.
method = fm.methods.LevelwiseDRSCGD(lr=0.01, recursion_rate=0.3, local_steps=4)
run = fm.simulate(
    problem, method, clients, rounds=80, dtype=torch.float64, executor="vectorised",
    evaluate_every=20,
)  # fmt: skip

print("round  return  deviation  above the least loss by")
for record in run.history:
    found = record["train"]
    print(
        f"{record['round']:5}  {found['return']:6.3f}  {found['deviation']:9.3f}"
        f"  {found['gap']:23.3f}"
    )
print("The first line is that of equal weights for all.")
print(f"Sent by all investors: {run.history[-1]['bytes_up'] / 1e6:.1f} MB")
