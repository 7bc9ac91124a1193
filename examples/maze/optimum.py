# SPDX-License-Identifier: Apache-2.0
"""Exact values of the maze: of any policy over squares, and the best under each meaning of "partly observed".

    python -m examples.maze.optimum

prints all of them. A policy is an array (26 squares, 4 moves) of probabilities, rows as `maze.CELLS`, columns as
`maze.MOVES`. Returns are undiscounted, with the 100 moves and the failure of `maze.Maze`; means are over the 25 starts.
Nothing here samples.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from .maze import CELLS, GOAL, MOVES, STARTS, Maze, Position, move, walls

_INDEX = {cell: i for i, cell in enumerate(CELLS)}
_GOAL = _INDEX[GOAL]
_STARTS = np.array([_INDEX[cell] for cell in STARTS])
_MAX_MOVES = Maze().max_moves
NEXT = np.array([[_INDEX[move(cell, action)] for action in MOVES] for cell in CELLS])
"""Square after each move (26, 4)."""

REWARDS = np.where(NEXT == _GOAL, 0.0, -1.0)
"""Reward of each move (26, 4)."""


def expected_returns(policy: np.ndarray) -> np.ndarray:
    """Expected return from each square (26,), 0 at the goal, by the recursion over the moves that are left.

    Raises:
      ValueError: If the policy is no array (26, 4) of probabilities.
    """
    if policy.shape != NEXT.shape or (policy < 0).any() or not np.allclose(policy.sum(axis=1), 1):
        raise ValueError(f"`policy` must be probabilities of shape {NEXT.shape}, got shape {policy.shape}")
    returns = np.full(len(CELLS), -1.0)  # no move is left: whatever is said is answered by the failure
    returns[_GOAL] = 0.0
    for _ in range(_MAX_MOVES):
        returns = (policy * (REWARDS + returns[NEXT])).sum(axis=1)
        returns[_GOAL] = 0.0
    return returns


def mean_return(policy: np.ndarray) -> float:
    """Expected return of a policy from a uniform start."""
    return float(expected_returns(policy)[_STARTS].mean())


def distances() -> np.ndarray:
    """Moves from each square to the goal (26,), breadth-first."""
    found = np.full(len(CELLS), -1)
    found[_GOAL] = 0
    queue = deque([_GOAL])
    while queue:
        cell = queue.popleft()
        for source in np.nonzero(np.any(cell == NEXT, axis=1))[0]:
            if found[source] < 0:
                found[source] = found[cell] + 1
                queue.append(int(source))
    return found


def optimal_policy() -> np.ndarray:
    """The shortest way from each square. The maze is a tree, so there is one; the goal's row is its first move."""
    return np.eye(len(MOVES))[distances()[NEXT].argmin(axis=1)]


def uniform_policy() -> np.ndarray:
    """Each of the four moves with probability 1/4, into walls as well."""
    return np.full(NEXT.shape, 1 / len(MOVES))


def mixture_policy(optimal_share: float) -> np.ndarray:
    """Each move is the optimal one with this probability, and uniformly random otherwise."""
    return optimal_share * optimal_policy() + (1 - optimal_share) * uniform_policy()


def memory_optimum(observe: Callable[[Position], Hashable]) -> float:
    """Best mean return of a player who knows the maze, sees `observe` of each square and forgets nothing.

    What it knows is the set of squares where it can be (one entry a start, so that weights are counts). All such
    sets that can be reached are enumerated, and values are iterated over the moves that are left.

    Args:
      observe: What is seen at a square. `walls` is the partly observed maze; the identity the fully observed one.
    """
    first = _by_observation(_STARTS.tolist(), observe)
    beliefs = {belief: i for i, belief in enumerate(first)}
    queue, after = deque(first), []
    while queue:
        belief = queue.popleft()
        after.append([_by_observation(NEXT[list(belief), i].tolist(), observe) for i in range(len(MOVES))])
        for child in itertools.chain(*after[-1]):
            if child not in beliefs:
                beliefs[child] = len(beliefs)
                queue.append(child)
    returns = np.array([-float(len(belief)) for belief in beliefs])
    for _ in range(_MAX_MOVES):
        returns = np.array(
            [
                max(sum(returns[beliefs[child]] - len(child) for child in children) for children in moves)
                for moves in after
            ]
        )
    return float(sum(returns[beliefs[belief]] for belief in first) / len(_STARTS))


def _by_observation(cells: Sequence[int], observe: Callable[[Position], Hashable]) -> list[tuple[int, ...]]:
    """Groups squares by what is seen there; those at the goal are done."""
    groups = defaultdict(list)
    for cell in cells:
        if cell != _GOAL:
            groups[observe(CELLS[cell])].append(cell)
    return [tuple(sorted(group)) for group in groups.values()]


def memoryless_policy(choice: Mapping[tuple[str, ...], Sequence[float]]) -> np.ndarray:
    """The policy over squares of a player who sees the walls around it and remembers nothing.

    Args:
      choice: Probabilities of the moves, for what `walls` gives; squares that are not in it take the optimal move.
    """
    policy = optimal_policy()
    for i, cell in enumerate(CELLS):
        if walls(cell) in choice:
            policy[i] = choice[walls(cell)]
    return policy


def best_fixed_policy() -> tuple[float, dict[tuple[str, ...], str]]:
    """Best mean return without memory and without chance, and the move that it takes for each view of the walls.

    Every choice of moves that are open is tried. A move into a wall is never better: the player stays where it
    makes that move, and no return is below that of staying.
    """
    views = sorted({walls(cell) for cell in STARTS})
    opens = [
        [
            i
            for i in range(len(MOVES))
            if all(NEXT[_INDEX[c], i] != _INDEX[c] for c in STARTS if walls(c) == view)
        ]
        for view in views
    ]
    best, found = -np.inf, dict[tuple[str, ...], str]()
    for moves in itertools.product(*opens):
        chosen = dict(zip(views, moves, strict=True))
        value = mean_return(memoryless_policy({view: np.eye(len(MOVES))[i] for view, i in chosen.items()}))
        if value > best:
            best, found = value, {view: tuple(MOVES)[i] for view, i in chosen.items()}
    return best, found


CORRIDOR = walls((1, 2))
"""The one view whose optimal move depends on the square: walls above and below."""

EVEN_CORRIDOR = {CORRIDOR: (0.5, 0.5, 0.0, 0.0)}
"""Choice of the best memoryless player that was found: left or right by the toss of a coin in corridors. It is a local
maximum: small steps around it lower the return (`tests/examples/test_maze.py`). That none is higher is not proven."""


def blind_optimum() -> tuple[float, tuple[str, ...]]:
    """Best mean return of a player who sees nothing, and its moves: the same ones from every start.

    A* over the tuple of squares where the 25 starts have come. What is left costs at least the mean over all
    triples of starts, scaled up, of what that triple alone costs, which value iteration gives. All starts
    are made to arrive. That a player who gives up a start does no better is not searched here: it would cost 101, and
    the other 24 would have to come in 251 moves in place of 353 for all.
    """
    nexts, costs = NEXT.copy(), -REWARDS
    nexts[_GOAL], costs[_GOAL] = _GOAL, 0.0
    triple_costs = _triple_costs(nexts, costs)
    firsts, seconds, thirds = map(np.array, zip(*itertools.combinations(range(len(STARTS)), 3), strict=True))
    triples_of_one = (len(STARTS) - 1) * (len(STARTS) - 2) / 2

    def bound(cells: np.ndarray) -> float:
        return float(triple_costs[cells[firsts], cells[seconds], cells[thirds]].sum() / triples_of_one)

    def key(cells: np.ndarray) -> bytes:
        return cells.astype(np.uint8).tobytes()

    start, end = key(_STARTS), key(np.full(len(STARTS), _GOAL))
    paid = {start: 0.0}
    came_by: dict[bytes, tuple[bytes, str]] = {}
    heap, closed = [(bound(_STARTS), start)], set[bytes]()
    while heap[0][1] != end:
        _, here = heapq.heappop(heap)
        if here in closed:
            continue
        closed.add(here)
        cells = np.frombuffer(here, np.uint8).astype(int)
        for i, action in enumerate(MOVES):
            there = nexts[cells, i]
            name, cost = key(there), paid[here] + float(costs[cells, i].sum())
            if cost < paid.get(name, np.inf):
                paid[name], came_by[name] = cost, (here, action)
                heapq.heappush(heap, (cost + bound(there), name))
    actions, here = list[str](), end
    while here != start:
        here, action = came_by[here]
        actions.append(action)
    return -paid[end] / len(STARTS), tuple(reversed(actions))


def _triple_costs(nexts: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Least sum of costs until three players, who make the same moves, are all at the goal (26, 26, 26)."""
    found = np.full((len(CELLS),) * 3, np.inf)
    found[_GOAL, _GOAL, _GOAL] = 0.0
    while True:
        better = found
        for to, cost in zip(nexts.T, costs.T, strict=True):
            step = cost[:, None, None] + cost[None, :, None] + cost[None, None, :]
            better = np.minimum(better, step + found[np.ix_(to, to, to)])
        if np.array_equal(better, found):
            return found
        found = better


def main() -> None:
    """Prints the figures of README.md."""
    from .data import OPTIMAL_SHARE

    blind, moves = blind_optimum()
    figures = {
        "fully observed, optimum": mean_return(optimal_policy()),
        "walls and memory of everything, optimum": memory_optimum(walls),
        "walls, no memory, by chance (best found)": mean_return(memoryless_policy(EVEN_CORRIDOR)),
        "walls, no memory, no chance, optimum": best_fixed_policy()[0],
        f"no observation, the best {len(moves)} moves": blind,
        "uniformly random moves": mean_return(uniform_policy()),
        f"data: one move in {1 / OPTIMAL_SHARE:.0f} optimal, else random": mean_return(
            mixture_policy(OPTIMAL_SHARE)
        ),
    }
    for name, value in figures.items():
        print(f"{value:9.4f}  {name}")


if __name__ == "__main__":
    main()
