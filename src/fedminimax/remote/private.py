"""Privacy for rows at a site: what it refuses, what a call releases, and the noise that it adds."""

from __future__ import annotations

import hashlib

from torch import Tensor

from fedminimax.config import Experiment
from fedminimax.engine.job import kind_of_phase
from fedminimax.engine.privacy import (
    FOR_QUESTIONS,
    Budget,
    check_question,
    check_rows,
    count_releases,
    noisy_answer,
    passes_of,
)
from fedminimax.engine.round import FIRST, Federation
from fedminimax.privacy.accountant import mu2_of
from fedminimax.privacy.noise import Secret
from fedminimax.remote.ledger import Ledger, LedgerError, Release
from fedminimax.types import Phase


def check_promise(experiment: Experiment, epsilon: float | None) -> None:
    """Refuses an experiment that does not promise what this site asks for (a limit on epsilon), or
    that promises what it does not keep."""
    privacy = experiment.privacy
    if not privacy.by_record:
        if epsilon is not None:
            raise LedgerError(
                "this site trains with privacy for rows alone (epsilon in [limits] of its site "
                'file): give [privacy] level = "record"'
            )
        return
    if experiment.split.validation:
        raise LedgerError(
            "validation rows choose a round, and what they choose tells of them: set [split] "
            "validation = 0"
        )


class SitePrivacy:
    """What a site keeps of the promise of one run."""

    def __init__(
        self, experiment: Experiment, data: str, ledger: Ledger, limit: float | None, asked: bool
    ):
        """data: the name of the rows in the site file. limit: of what they may spend over all runs.
        asked: were training rows asked before round 0?"""
        self.privacy, self.planned = experiment.privacy, experiment.run.rounds
        self.data, self.ledger, self.limit, self.asked = data, ledger, limit, asked
        self._budget: Budget | None = None

    def charged(
        self,
        federation: Federation,
        number: int,
        run: str,
        at: tuple[int, int, str],
        phase: Phase,
        begun: tuple[int, int],
        new: bool,
    ) -> Federation:
        """The federation with the oracle of a call, once the ledger has it.

        Arguments:
            federation: with the rows of this site alone, at its number.
            number: this site's.
            run: its name.
            at: the round, the number of the phase, and a digest of the call.
            phase: what is called for.
            begun: the first iteration, and how many steps this site takes.
            new: whether the site makes its first state in it.
        """
        budget, clients = self._counted(federation), federation.clients
        noise = budget.noise_of(clients)
        limits, (first, steps) = budget.counted.limits, begun
        each = limits[kind_of_phase(at[1], phase)]
        whole = sum(limits[FIRST]) if new else 0
        batches = phase.data == "minibatch" and clients.batch_size is not None
        secret = self.ledger.secret()
        release = Release(
            data=self.data,
            run=run,
            round=at[0],
            phase=at[1],
            call=_with(secret, at[2]),
            noise=noise[number] if isinstance(noise, tuple) else noise,
            passes=int(passes_of(clients)[number]),
            whole=whole if batches else whole + steps * sum(each),
            first=first if batches else 0,
            steps=steps if batches else 0,
            each=each if batches else (),
        )
        self.ledger.charge(release, self.limit)
        return budget.private(federation, Secret(secret, at[2]))

    def answer(
        self, question: str, found: tuple[Tensor, ...], rows: int, run: str, digest: str
    ) -> tuple[Tensor, ...]:
        """An answer about training rows, with noise, once the ledger has it."""
        check_question(question)
        secret = self.ledger.secret()
        noise = (FOR_QUESTIONS * mu2_of(self.privacy.epsilon, self.privacy.delta)) ** -0.5
        call = _with(secret, digest)
        release = Release(self.data, run, 0, 0, call, noise, whole=1)
        self.ledger.charge(release, self.limit)
        return noisy_answer(question, found, rows, 0, self.privacy, Secret(secret, digest))

    def _counted(self, federation: Federation) -> Budget:
        if self._budget is None:
            check_rows(federation.problem)
            counted = count_releases(federation, self.planned)
            self._budget = Budget.of(
                self.privacy, counted, federation.clients, self.planned, self.asked
            )
        return self._budget


def _with(secret: bytes, digest: str) -> str:
    """Of a call and the secret: with another secret, the same call is another release."""
    return hashlib.blake2b(digest.encode(), key=secret, digest_size=16).hexdigest()
