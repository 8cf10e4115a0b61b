"""The portfolio under Fed-DR-SCGD as a loop in C++, which does this and nothing else: two passes
over the assets of a worker in a step, with all numbers in the first cache."""

from __future__ import annotations

import ctypes
import subprocess
import time

import numpy as np

from bench.ours import Steady
from bench.table import CannotMeasureError
from fedminimax.engine.executors.compiled.chained import library

SOURCE = r"""
#include <algorithm>
#include <cmath>
#include <vector>

enum { X, WEIGHTS, V1, V2, VECTORS };
enum { MEAN, SAME, VARIANCE, V2_MEAN, V3_MEAN, V3_VARIANCE, NUMBERS };

static double root_slope(double variance) {
    return variance >= 1e-8 ? 0.5 / std::sqrt(variance) : 0.0;
}

static void step(double *vectors, double *n, const double *first, const double *second,
                 long assets, double lr, double rate) {
    const double stay = 1 - rate;
    double *__restrict x = vectors + X * assets, *__restrict weights = vectors + WEIGHTS * assets;
    double *__restrict v1 = vectors + V1 * assets, *__restrict v2 = vectors + V2 * assets;
    double returned = 0, now = 0, before = 0;
    for (long i = 0; i < assets; i++) {
        const double moved = x[i] - lr * v1[i], ahead = moved - stay * x[i];
        const double held = ahead + stay * weights[i];
        returned += first[i] * ahead;
        now += second[i] * held;
        before += second[i] * weights[i];
        x[i] = moved;
        weights[i] = held;
    }
    const double mean = returned + stay * n[MEAN];
    const double off = now - mean, off_before = before - n[MEAN];
    const double variance = off * off + stay * (n[VARIANCE] - off_before * off_before);
    const double v3_mean = stay * n[V3_MEAN] - rate;
    const double v3_variance =
        root_slope(variance) + stay * (n[V3_VARIANCE] - root_slope(n[VARIANCE]));
    const double pull = 2 * off * v3_variance, pull_before = 2 * off_before * n[V3_VARIANCE];
    const double v2_mean = v3_mean - pull + stay * (n[V2_MEAN] - n[V3_MEAN] + pull_before);
    const double along = pull - stay * pull_before, ahead = v2_mean - stay * n[V2_MEAN];
    for (long i = 0; i < assets; i++) {
        const double moved = stay * v2[i] + along * second[i];
        v1[i] = ahead * first[i] + moved + stay * (v1[i] - v2[i]);
        v2[i] = moved;
    }
    n[SAME] = mean + stay * (n[SAME] - n[MEAN]);
    n[MEAN] = mean, n[VARIANCE] = variance, n[V2_MEAN] = v2_mean;
    n[V3_MEAN] = v3_mean, n[V3_VARIANCE] = v3_variance;
}

static void average(double *server, const double *all, long length, long workers) {
    std::fill_n(server, length, 0.0);
    for (long k = 0; k < workers; k++)
        for (long i = 0; i < length; i++) server[i] += all[k * length + i] / workers;
}

extern "C" void play(double *vectors, double *numbers, const double *returns, const long *index,
                     long rounds, long steps, long workers, long assets, double lr, double rate) {
    const long length = VECTORS * assets;
    std::vector<double> own(workers * length), single(workers * NUMBERS);
    for (long round = 0; round < rounds; round++) {
        for (long k = 0; k < workers; k++) {
            std::copy_n(vectors, length, &own[k * length]);
            std::copy_n(numbers, NUMBERS, &single[k * NUMBERS]);
        }
        for (long s = 0; s < steps; s++, index += 2 * workers)
            for (long k = 0; k < workers; k++)
                step(&own[k * length], &single[k * NUMBERS], returns + index[k] * assets,
                     returns + index[workers + k] * assets, assets, lr, rate);
        average(vectors, own.data(), length, workers);
        average(numbers, single.data(), NUMBERS, workers);
    }
}
"""
# What -ffast-math says, one by one: with that name the library would also switch off subnormal
# numbers in the whole process that loads it.
FAST_MATH = ("-fassociative-math", "-freciprocal-math", "-ffinite-math-only", "-fno-math-errno")
FAST_MATH += ("-fno-signed-zeros", "-fno-trapping-math")
FLAGS = ("-O3", "-march=native", *FAST_MATH)


class CppRun:
    """A run from where the engine's stands: a call plays so many rounds, always on the same
    batches, and tells the seconds of a round."""

    def __init__(self, run: Steady, rounds: int, lr: float, rate: float):
        index = run.index(rounds)[:, :2, :, 0]  # the last level uses no rows
        self.index = np.ascontiguousarray(index.numpy())
        self.returns = run.federation.clients.train.columns[0].numpy()
        s = run.state.server
        (inner1, inner2), (v1, v2, v3) = s.inner, s.momentum
        vectors, numbers = (s.x, inner1[1:], v1, v2[1:]), (inner1[0], *inner2, v2[0], *v3)
        self.vectors = np.stack([vector.numpy() for vector in vectors])
        self.numbers = np.array([float(number) for number in numbers])
        steps, _, workers = self.index.shape
        sizes = rounds, steps // rounds, workers, self.vectors.shape[1]
        given = (self.vectors, self.numbers, self.returns, self.index)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in given]
        rates = (ctypes.c_double(lr), ctypes.c_double(rate))
        self.given = *pointers, *map(ctypes.c_long, sizes), *rates
        self.rounds, self.play = rounds, compiled().play

    def __call__(self) -> float:
        begun = time.perf_counter()
        self.play(*self.given)
        return (time.perf_counter() - begun) / self.rounds


def compiled() -> ctypes.CDLL:
    try:
        return library(SOURCE, FLAGS)
    except subprocess.CalledProcessError as error:
        told = error.stderr[:300]
        raise CannotMeasureError(f"the loop in C++ was not compiled: {told}") from error
