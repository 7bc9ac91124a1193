# SPDX-License-Identifier: Apache-2.0
"""The ILQL update on a tabular policy: Bellman's equations, targets that move by syncs alone, and rows of all kinds."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from jrl.forward import Reader
from jrl.learners.ilql import ILQLConfig, ILQLState, ilql_objective, init_ilql_state, make_ilql_update
from jrl.mesh import AXES, tree_shardings
from jrl.models.heads import init_q_heads
from jrl.ops.alignment import length_mask
from jrl.ops.metrics import finalize
from jrl.rollout.generate import make_generate
from jrl.typing import Features, ILQLBatch, ModelInputs, SamplingKnobs
from tests.jaxprs import equations
from tests.learners.batches import CHUNK_BYTES, adam, sgd
from tests.learners.tabular import EOS, START, VOCAB, tabular_params, tabular_policy

POLICY = tabular_policy()
FROZEN = {"bias": jnp.zeros(VOCAB)}
CONFIG = ILQLConfig(
    tau=0.7, gamma=0.9, cql_scale=0.1, awac_scale=1.0, beta=0.5, alpha=0.25, steps_for_target_q_sync=3
)


def parameters(seed: int | None = None, num_q_heads: int = 2) -> dict[str, Any]:
    """A table of logits, values, and so many tables of Q values, with targets of their own."""
    params, _ = tabular_params(seed=seed)
    rng = np.random.default_rng(seed)

    def tables() -> dict[str, Any]:
        scale = 0.0 if seed is None else 1.0
        return {
            str(i): {"kernel": jnp.asarray(scale * rng.normal(size=(VOCAB, VOCAB)), jnp.float32)}
            for i in range(num_q_heads)
        }

    return {**params, "q_heads": tables(), "target_q_heads": tables()}


def samples(rows: list[list[int]], rewards: list[float], columns: list[list[int]] | None = None) -> ILQLBatch:
    """Rows of tokens with a reward at the end of each; every token but the first is an action unless `columns` say."""
    columns = columns or [list(range(len(row) - 1)) for row in rows]
    width, actions = max(map(len, rows)), max(map(len, columns))
    tokens = np.zeros((len(rows), width), np.int32)
    at, rewarded = np.zeros((len(rows), actions), np.int32), np.zeros((len(rows), actions), np.float32)
    for i, (row, states, reward) in enumerate(zip(rows, columns, rewards, strict=True)):
        tokens[i, : len(row)], at[i, : len(states)] = row, states
        if states:
            rewarded[i, len(states) - 1] = reward
    lengths, counts = (jnp.asarray([len(x) for x in xs], jnp.int32) for xs in (rows, columns))
    inputs = ModelInputs(jnp.asarray(tokens), length_mask(lengths, width=width))
    return ILQLBatch(inputs, jnp.asarray(at), length_mask(counts, width=actions), jnp.asarray(rewarded))


# A string, a dialogue of two turns whose user speaks in columns 3 and 4, and a row that is too short to act in.
BATCH = samples([[2, 5, 3, 1], [6, 4, 7, 2, 5, 3, 1], [2]], [1.5, -1.0, 9.0], [[0, 1, 2], [0, 1, 4, 5], []])
PARAMS = parameters(seed=3)
OPTIMIZER = sgd(0.1)


def compiled(
    config: ILQLConfig = CONFIG,
    optimizer: Any = OPTIMIZER,
    *,
    batch_size: int = 4,
    minibatch_size: int = 4,
    chunk_bytes: int = CHUNK_BYTES,
) -> Any:
    reader = Reader(POLICY, chunk_bytes=chunk_bytes)
    return jax.jit(
        make_ilql_update(reader, optimizer, config, batch_size=batch_size, minibatch_size=minibatch_size)
    )


def step(update: Any, state: ILQLState, batch: ILQLBatch = BATCH) -> tuple[ILQLState, dict[str, float]]:
    state, metrics = update(state, FROZEN, batch, jax.random.key(0))
    return state, finalize(metrics)


@pytest.fixture(scope="module")
def update() -> Any:
    return compiled()


@pytest.fixture(scope="module")
def start() -> ILQLState:
    return init_ilql_state(PARAMS, OPTIMIZER)


def assert_equal(actual: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def by_hand(pairs: list[list[tuple[int, int]]], rewards: list[float]) -> dict[str, float]:
    """The terms in float64, from rows of (state, action) pairs of the tables; every row ends behind its last pair."""
    table, values = (np.float64(PARAMS[name]["kernel"]) for name in ("table", "v_head"))
    online, target = (
        [np.float64(head["kernel"]) for head in PARAMS[name].values()]
        for name in ("q_heads", "target_q_heads")
    )
    terms: dict[str, list[float]] = {"q_loss": [], "value_loss": [], "cql_loss": [], "awac_loss": []}

    def nll(row: np.ndarray, a: int) -> float:
        return float(np.log(np.exp(row).sum()) - row[a])

    for row, reward in zip(pairs, rewards, strict=True):
        for t, (s, a) in enumerate(row):
            last = t == len(row) - 1
            y = reward if last else CONFIG.gamma * values[row[t + 1][0]]
            advantage = min(q[s, a] for q in target) - values[s]
            terms["q_loss"].append(sum((q[s, a] - y) ** 2 for q in online))
            terms["value_loss"].append((CONFIG.tau if advantage >= 0 else 1 - CONFIG.tau) * advantage**2)
            terms["cql_loss"].append(sum(nll(q[s], a) for q in online))
            terms["awac_loss"].append(np.exp(CONFIG.beta * advantage) * nll(table[s], a))
    return {f"ilql/{name}": float(np.mean(x)) for name, x in terms.items()}


def test_lore_8_5_every_term_of_every_action_by_hand(update: Any, start: ILQLState) -> None:
    """Across turns, the next state is the one before the next action: the end of what the user said."""
    pairs = [[(2, 5), (5, 3), (3, 1)], [(6, 4), (4, 7), (5, 3), (3, 1)]]
    _, metrics = step(update, start)
    expected = by_hand(pairs, [1.5, -1.0])
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("minibatch_size", [1, 2])
def test_lore_5_2_microbatches_of_unequal_weight_share_one_denominator(
    minibatch_size: int, update: Any, start: ILQLState
) -> None:
    whole, metrics = step(update, start)
    parts, same = step(compiled(minibatch_size=minibatch_size), start)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), parts, whole)
    assert same == pytest.approx(metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("positions", [1, 3, 16])
def test_lore_5_11_chunks_equal_the_plain_path(positions: int, update: Any, start: ILQLState) -> None:
    """All 16 positions are room for one head, but not for all of them."""
    whole, metrics = step(update, start)
    chunked, same = step(compiled(chunk_bytes=4 * VOCAB * positions), start)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), chunked, whole)
    assert same == pytest.approx(metrics, rel=1e-5, abs=1e-6)


def test_lore_1_12_rows_without_actions_change_nothing(update: Any, start: ILQLState) -> None:
    def garbage(x: jax.Array) -> jax.Array:
        return x.at[2].set(jnp.nan if x.dtype == jnp.float32 else 5 if x.dtype == jnp.int32 else False)

    dirty = jax.tree.map(garbage, BATCH)
    dirty = dirty._replace(columns=dirty.columns.at[2].set(6))
    assert_equal(step(update, start, dirty), step(update, start))


class TestChain:
    """State 4 leads to the goal 7 or astray to 6. The data mostly take the long way 2 3 4 and mostly go astray.

    No sample goes the best way, 2 4 7: it has to be put together from two. γ = 0.8 makes the short way better.
    """

    rows = [[START, 3, 4, 6, EOS]] * 4 + [[START, 3, 4, 7, EOS]] * 2 + [[START, 4, 6, EOS]] * 4
    rewards = [0.0] * 4 + [1.0] * 2 + [0.0] * 4
    cloned, best = [3, 4, 6, EOS], [4, 7, EOS, 0]

    @staticmethod
    def train(optimizer: Any, steps: int, **fields: Any) -> ILQLState:
        """A fresh state after that many steps on all of the chain."""
        config = ILQLConfig(gamma=0.8, **fields)
        update = make_ilql_update(
            Reader(POLICY, chunk_bytes=CHUNK_BYTES), optimizer, config, batch_size=10, minibatch_size=10
        )
        batch = samples(TestChain.rows, TestChain.rewards)

        @jax.jit
        def run(state: ILQLState) -> ILQLState:
            return jax.lax.fori_loop(
                0, steps, lambda i, state: update(state, FROZEN, batch, jax.random.key(0))[0], state
            )

        return run(init_ilql_state(parameters(), optimizer))

    @pytest.fixture(scope="class")
    @classmethod
    def trained(cls) -> ILQLState:
        return cls.train(adam(0.05), 400, tau=0.9, cql_scale=0.1, alpha=0.1, steps_for_target_q_sync=5)

    def test_lore_8_5_where_cloning_is_suboptimal_the_decoded_policy_is_optimal(
        self, trained: ILQLState
    ) -> None:
        run = jax.jit(
            make_generate(POLICY, max_new_tokens=4, eos_token_ids=(EOS,), pad_token_id=0, do_sample=False)
        )
        params = {**trained.train.params, "q_heads": trained.target_params}
        prompt = ModelInputs(jnp.array([[START]]), jnp.ones((1, 1), bool))

        def decoded(beta: float) -> list[int]:
            knobs = SamplingKnobs(np.float32(1), np.float32(1), np.float32(beta))
            return run(params, FROZEN, prompt, np.arange(1), knobs, jax.random.key(0)).tokens[0].tolist()

        assert decoded(0.0) == self.cloned
        assert decoded(100.0) == self.best

    def test_lore_8_5_at_one_half_the_values_solve_the_equations_of_the_data(self) -> None:
        """V is the mean of Q over the data's actions, Q the reward and γ·V of what follows."""
        state = self.train(sgd(2.0), 300, tau=0.5, cql_scale=0.0, alpha=1.0, steps_for_target_q_sync=1)
        values = np.asarray(state.train.params["v_head"]["kernel"])
        # V(7) = 1 and V(6) = 0; of ten actions in 4, two lead to 7: V(4) = 0.2·0.8; V(3) = 0.8·V(4);
        # of ten in 2, six lead to 3: V(2) = 0.8·(0.6·V(3) + 0.4·V(4)).
        expected = {7: 1.0, 6: 0.0, 4: 0.16, 3: 0.128, START: 0.8 * (0.6 * 0.128 + 0.4 * 0.16)}
        assert {s: float(values[s]) for s in expected} == pytest.approx(expected, abs=1e-5)
        for head in state.train.params["q_heads"].values():
            q = np.asarray(head["kernel"])
            pairs = {(START, 3): 0.8 * 0.128, (START, 4): 0.8 * 0.16, (4, 7): 0.8, (4, 6): 0.0, (7, EOS): 1.0}
            assert {pair: float(q[pair]) for pair in pairs} == pytest.approx(pairs, abs=1e-5)


class TestEpisodes:
    """A corridor of four cells, ids 2 to 5, whose right end is the goal: "left" (6) and "right" (7) cost 1 each.

    A turn is one action, the observation one cell, and a row one turn. Every cell shows both actions, so one step of
    each makes all of the data.
    """

    cells, goal, left, right = (2, 3, 4), 5, 6, 7
    gamma = 0.8

    def go(self, cell: int, action: int) -> int:
        return max(cell + (1 if action == self.right else -1), self.cells[0])

    def data(self, copies: dict[int, int]) -> ILQLBatch:
        """Each action of each cell, so many times, and the cell behind it, unless it is the goal."""
        steps = [(c, a) for c in self.cells for a, count in copies.items() for _ in range(count)]
        batch = samples([[c, a] for c, a in steps], [-1.0] * len(steps), [[0]] * len(steps))
        behind = [self.go(c, a) for c, a in steps]
        after = ModelInputs(jnp.asarray(behind)[:, None], jnp.asarray(behind)[:, None] != self.goal)
        # Returns of the data: 0 behind every step, as if each episode had been cut there.
        return batch._replace(after=after, returns_after=jnp.full(len(steps), -2.0))

    def train(self, copies: dict[int, int], steps: int, **fields: Any) -> ILQLState:
        config = ILQLConfig(gamma=self.gamma, **({"cql_scale": 0.0, "awac_scale": 0.0} | fields))
        batch, optimizer = self.data(copies), sgd(2.0)
        rows = batch.mask.shape[0]
        update = make_ilql_update(
            Reader(POLICY, chunk_bytes=CHUNK_BYTES), optimizer, config, batch_size=rows, minibatch_size=rows
        )

        @jax.jit
        def run(state: ILQLState) -> ILQLState:
            return jax.lax.fori_loop(
                0, steps, lambda i, state: update(state, FROZEN, batch, jax.random.key(0))[0], state
            )

        params = parameters()
        # The goal is terminal whatever is thought of it.
        params["v_head"] = {"kernel": params["v_head"]["kernel"].at[self.goal].set(7.0)}
        return run(init_ilql_state(params, optimizer))

    def test_lore_8_6_one_turn_rows_solve_the_equations_of_the_policy_that_acted(self) -> None:
        """At expectile ½ V solves V = P(r + γV') of the data's policy, a linear system; Q follows from it."""
        copies = {self.left: 3, self.right: 1}
        state = self.train(copies, 500, tau=0.5, alpha=1.0, steps_for_target_q_sync=1)
        index = {c: i for i, c in enumerate(self.cells)}
        transitions = np.zeros((3, 3))
        for c in self.cells:
            for a, count in copies.items():
                if self.go(c, a) != self.goal:
                    transitions[index[c], index[self.go(c, a)]] += count / 4
        exact = np.linalg.solve(np.eye(3) - self.gamma * transitions, -np.ones(3))
        values = np.asarray(state.train.params["v_head"]["kernel"])
        np.testing.assert_allclose([values[c] for c in self.cells], exact, atol=2e-5)
        for head in state.train.params["q_heads"].values():
            for c in self.cells:
                for a in copies:
                    there = self.go(c, a)
                    behind = 0.0 if there == self.goal else exact[index[there]]
                    assert float(head["kernel"][c, a]) == pytest.approx(-1 + self.gamma * behind, abs=2e-5)

    def test_near_expectile_one_they_solve_the_equations_of_the_best_policy(self) -> None:
        """Value iteration: −1, −1.8, −2.44 from the cells next to the goal on."""
        state = self.train(
            {self.left: 1, self.right: 1}, 3000, tau=0.999, alpha=1.0, steps_for_target_q_sync=1
        )
        best = {cell: 0.0 for cell in (*self.cells, self.goal)}
        for _ in range(10):
            best = {
                c: 0.0 if c == self.goal else max(-1 + self.gamma * best[self.go(c, a)] for a in (6, 7))
                for c in best
            }
        assert [best[c] for c in self.cells] == pytest.approx([-2.44, -1.8, -1.0])
        values = np.asarray(state.train.params["v_head"]["kernel"])
        np.testing.assert_allclose([values[c] for c in self.cells], [best[c] for c in self.cells], atol=5e-3)

    def test_monte_carlo_learns_the_returns_of_the_data_alone(self) -> None:
        state = self.train({self.left: 1, self.right: 1}, 300, target="mc")
        for head in state.train.params["q_heads"].values():
            found = [float(head["kernel"][c, a]) for c in self.cells for a in (self.left, self.right)]
            assert found == pytest.approx([-1 + self.gamma * -2.0] * 6, abs=1e-5)

    def test_no_gradient_reaches_the_state_behind_a_row(self) -> None:
        """Of the loss with Q terms alone, V of a cell that only stands behind rows does not move."""
        batch = self.data({self.right: 1})
        only_first = jax.tree.map(lambda x: x[:1], batch)

        def loss(params: Any) -> jax.Array:
            reader = Reader(POLICY, chunk_bytes=CHUNK_BYTES)
            return ilql_objective(
                reader, params, FROZEN, PARAMS["target_q_heads"], only_first, config=CONFIG
            ).loss_sum

        gradient = jax.jit(jax.grad(loss))(PARAMS)
        assert float(gradient["v_head"]["kernel"][3]) == 0.0 != float(gradient["v_head"]["kernel"][2])


class TestTargets:
    def test_lore_8_5_targets_move_by_syncs_alone(self, update: Any, start: ILQLState) -> None:
        """α = ¼ every third step, of what the heads are after that step."""
        state = start
        for number in range(1, 7):
            before = state.target_params
            state, metrics = step(update, state)
            assert metrics["ilql/target_sync"] == float(number % 3 == 0)
            if number % 3:
                assert_equal(state.target_params, before)
            else:
                jax.tree.map(
                    lambda new, online, old: np.testing.assert_allclose(
                        new, 0.25 * online + 0.75 * old, atol=1e-6
                    ),
                    state.target_params,
                    state.train.params["q_heads"],
                    before,
                )

    def test_a_sync_with_alpha_one_copies(self, start: ILQLState) -> None:
        copy = compiled(dataclasses.replace(CONFIG, alpha=1.0, steps_for_target_q_sync=1))
        state, _ = step(copy, start)
        assert_equal(state.target_params, state.train.params["q_heads"])

    def test_from_one_and_zero_a_sync_gives_alpha(self, update: Any, start: ILQLState) -> None:
        """A batch without any weight leaves the heads where they are, and counts as a step."""
        params = {**start.train.params, "q_heads": jax.tree.map(jnp.ones_like, start.train.params["q_heads"])}
        train = start.train.replace(params=params, step=jnp.int32(2))
        zeros = jax.tree.map(jnp.zeros_like, start.target_params)
        idle = BATCH._replace(mask=jnp.zeros_like(BATCH.mask))
        state, _ = step(update, ILQLState(train=train, target_params=zeros), idle)
        jax.tree.map(lambda x: np.testing.assert_allclose(x, 0.25, rtol=1e-6), state.target_params)

    def test_lore_7_6_a_step_that_is_not_finite_is_skipped_and_counted(
        self, update: Any, start: ILQLState
    ) -> None:
        broken = BATCH._replace(rewards=BATCH.rewards.at[0, 2].set(jnp.nan))
        state, metrics = step(update, start, broken)
        assert_equal((state.train.params, state.target_params), (start.train.params, start.target_params))
        assert metrics["optim/skipped_steps"] == 1 and int(state.train.step) == 1

    def test_lore_8_5_no_gradient_reaches_them_nor_the_trunk_through_them(self) -> None:
        """One number scales all hidden states. With the target's values held fixed, its gradient is the same."""

        def branch(params: Any, frozen: Any, trunk: Any, inputs: Any, dropout_key: Any) -> Features:
            hidden = trunk * params["scale"]
            return Features(hidden, hidden)

        scaled = dataclasses.replace(POLICY, branch=branch)

        def objective(scale: jax.Array, targets: Any, policy: Any) -> jax.Array:
            params = {**PARAMS, "scale": scale}
            reader = Reader(policy, chunk_bytes=CHUNK_BYTES)
            return ilql_objective(reader, params, FROZEN, targets, BATCH, config=CONFIG).loss_sum

        def heads(params: Any, hidden: jax.Array, actions: jax.Array | None = None) -> dict[str, jax.Array]:
            """Target heads that do not look at the scale."""
            heads = params.get("q_heads", {})
            if any("fixed" in head for head in heads.values()):
                fixed = {name: head["fixed"] for name, head in heads.items()}
                return POLICY.heads({"q_heads": fixed}, jnp.sign(hidden), actions)
            return POLICY.heads(params, hidden, actions)

        gradient = jax.jit(jax.grad(objective, argnums=(0, 1)), static_argnums=2)
        fixed = {name: {"fixed": head} for name, head in PARAMS["target_q_heads"].items()}
        wanted, _ = gradient(1.0, fixed, dataclasses.replace(scaled, heads=heads))
        got, of_targets = gradient(1.0, PARAMS["target_q_heads"], scaled)
        assert float(got) == pytest.approx(float(wanted), rel=1e-6) and abs(float(got)) > 0.1
        assert all(not np.any(leaf) for leaf in jax.tree.leaves(of_targets))


class TestState:
    def test_targets_that_a_checkpoint_brought_are_used(self, start: ILQLState) -> None:
        assert "target_q_heads" not in start.train.params
        assert_equal(start.target_params, PARAMS["target_q_heads"])

    def test_fresh_targets_are_copies_of_the_heads(self) -> None:
        params = {name: tree for name, tree in PARAMS.items() if name != "target_q_heads"}
        state = init_ilql_state(params, OPTIMIZER)
        assert_equal(state.target_params, params["q_heads"])
        buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((params, state.target_params))]
        assert len(set(buffers)) == len(buffers)

    @pytest.mark.parametrize("positions", [3, 16, 1000])
    def test_over_fsdp_each_head_waits_for_the_one_before(self, positions: int) -> None:
        """However few positions one has at once: else the compiler gathers several heads together."""
        reader = Reader(POLICY, chunk_bytes=4 * VOCAB * positions)
        update = make_ilql_update(reader, OPTIMIZER, CONFIG, batch_size=4, minibatch_size=4)
        state = init_ilql_state(PARAMS, OPTIMIZER)
        with jax.sharding.use_abstract_mesh(AbstractMesh((1, 2, 1), AXES, (AxisType.Auto,) * 3)):
            jaxpr = jax.make_jaxpr(update)(state, FROZEN, BATCH, jax.random.key(0)).jaxpr
        # A barrier between one kernel and results of all positions; the whole model is tied to its rows elsewhere.
        held = [
            equation
            for equation in equations(jaxpr)
            if equation.primitive.name == "optimization_barrier"
            and [variable.aval.shape for variable in equation.invars].count((VOCAB, VOCAB)) == 1
            and any(variable.aval.shape == (4, 4) for variable in equation.invars)
        ]
        # The second target and both heads, and in the backward pass the gradients of the heads.
        assert len(held) == 5

    def test_targets_are_split_over_the_mesh_as_the_heads_are(self) -> None:
        mesh = AbstractMesh((1, 2, 4), AXES, (AxisType.Auto,) * 3)
        heads = jax.eval_shape(partial(init_q_heads, 2, 16, 29, 32), jax.random.key(0))
        state = jax.eval_shape(lambda q: init_ilql_state({**q, "v_head": {}}, OPTIMIZER), heads)
        split, _ = tree_shardings(mesh, state)
        assert split.target_params == split.train.params["q_heads"]
        assert split.target_params["1"]["out"]["kernel"].shard_shape((16, 32)) == (8, 8)

    def test_a_missing_head_is_named(self) -> None:
        with pytest.raises(ValueError, match="`params` must hold `v_head` and `q_heads`, q_heads is missing"):
            init_ilql_state(tabular_params()[0], OPTIMIZER)

    def test_one_head_is_enough(self) -> None:
        state = init_ilql_state(parameters(3, num_q_heads=1), OPTIMIZER)
        state, metrics = step(compiled(), state)
        assert list(state.target_params) == ["0"] and np.isfinite(metrics["ilql/loss"])

    def test_too_many_rows_are_refused(self, start: ILQLState) -> None:
        with pytest.raises(ValueError, match="`batch` must have at most `batch_size` = 2 rows, got 3"):
            step(compiled(batch_size=2, minibatch_size=1), start)


def test_config_checks_its_ranges() -> None:
    assert ILQLConfig().gen_kwargs["beta"] == 1.0
    wrong = dict(tau=1.0, gamma=1.5, alpha=0.0, cql_scale=-1.0, beta=-1.0, steps_for_target_q_sync=0)
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"`method.{name}` must be"):
            ILQLConfig(**{name: value})
