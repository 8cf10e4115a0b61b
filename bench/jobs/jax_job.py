"""The portfolio under Fed-DR-SCGD in JAX: jit(scan(vmap(vjp))), many rounds in a call. It goes on
from where our run stands, with the batches of our next rounds: a file has both."""

from __future__ import annotations

import sys

from job import Turns  # type: ignore

LR, RATE, FLOOR = 0.01, 0.5, 1e-8


def main() -> None:
    turns = Turns()
    import jax  # type: ignore
    import jax.numpy as jnp  # type: ignore
    import numpy as np

    jax.config.update("jax_enable_x64", True)
    given = {name: jnp.asarray(value) for name, value in np.load(sys.argv[1]).items()}
    returns, index = given["returns"], given["index"]
    count, steps, _, workers = index.shape

    def level1(x, r):
        return jnp.concatenate([(r @ x)[None], x])

    def level2(u, r):
        return jnp.stack([u[0], (r @ u[1:] - u[0]) ** 2])

    def outer(z):
        return -z[0] + jnp.sqrt(jnp.maximum(z[1], FLOOR))

    def storm(estimate, new, old):
        return new + (1 - RATE) * (estimate - old)

    def step(state, rows):
        x, h1, h2, v1, v2, v3 = state
        first, second = rows
        x_new = x - LR * v1
        f1_old, pull1_old = jax.vjp(lambda x: level1(x, first), x)
        f1_new, pull1_new = jax.vjp(lambda x: level1(x, first), x_new)
        h1_new = storm(h1, f1_new, f1_old)
        f2_old, pull2_old = jax.vjp(lambda u: level2(u, second), h1)
        f2_new, pull2_new = jax.vjp(lambda u: level2(u, second), h1_new)
        h2_new = storm(h2, f2_new, f2_old)
        v3_new = storm(v3, jax.grad(outer)(h2_new), jax.grad(outer)(h2))
        v2_new = storm(v2, pull2_new(v3_new)[0], pull2_old(v3)[0])
        v1_new = storm(v1, pull1_new(v2_new)[0], pull1_old(v2)[0])
        return x_new, h1_new, h2_new, v1_new, v2_new, v3_new

    def round_of(state, index):
        state = [jnp.broadcast_to(v, (workers, *v.shape)) for v in state]
        for number in range(steps):
            first, second = (returns[index[number, level]] for level in (0, 1))
            state = jax.vmap(step)(state, (first, second))
        return [v.mean(0) for v in state], None

    @jax.jit
    def rounds(state, index):
        return jax.lax.scan(round_of, state, index)[0]

    state = [given[name] for name in ("x", "h1", "h2", "v1", "v2", "v3")]

    def play() -> None:
        nonlocal state
        state = rounds(state, index)
        state[0].block_until_ready()

    turns.say(x=rounds(state, index[:1])[0].tolist())
    turns.time(play, count)


if __name__ == "__main__":
    main()
